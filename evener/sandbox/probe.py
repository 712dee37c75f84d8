"""The strongest sandbox that really works here is chosen, by trying it; what is missing is named in one loud line.

Runner and verifier call `choose` for every rollout (the trial is made once a process) and `create` with its answer.
"""

import asyncio
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from evener import log
from evener.errors import InfraError, InputError
from evener.sandbox.bubblewrap import BubblewrapSandbox
from evener.sandbox.folders import Folder
from evener.sandbox.port import Kind, Sandbox, SandboxSpec
from evener.sandbox.process import ProcessSandbox
from evener.settings import SandboxKind

_TRIAL_S = 20.0
_log = log.get("sandbox")
_trial: "asyncio.Task[str | None] | None" = None


async def choose(kind: SandboxKind, *, trusted: bool, host: SandboxKind = "auto") -> Kind:
    """The kind to use where a run asks for ``kind`` and the setting of this host says ``host``.

    What the host names counts, except that it is never weaker than the bubblewrap that a run asks for. ``trusted``: the tasks
    are the user's own.

    Raises InputError ``sandbox_refused`` where nothing contains what is not trusted, and where what was asked for by name
    does not work here.
    """
    kind = kind if host == "auto" or kind == "bubblewrap" else host
    if kind == "docker":
        raise InputError("sandbox_refused", "there is no docker sandbox in this version")
    if kind != "process":
        missing = await bubblewrap_missing()
        if missing is None:
            return "bubblewrap"
        if kind == "bubblewrap":
            raise InputError("sandbox_refused", f"bubblewrap does not work here: {missing}")
        if trusted:
            _warn(missing)
    if not trusted:
        raise InputError("sandbox_refused", "kind process isolates nothing")
    return "process"


async def create(kind: Kind, spec: SandboxSpec) -> Sandbox:
    """Make a sandbox. Raises InfraError ``sandbox_failed``; then nothing is left but the folder."""
    sandbox = BubblewrapSandbox(spec) if kind == "bubblewrap" else ProcessSandbox(spec)
    return await sandbox.make()


async def bubblewrap_missing() -> str | None:
    """What keeps bubblewrap from working here, with its remedy; None where it works. Tried once a process."""
    global _trial
    loop = asyncio.get_running_loop()
    if _trial is None or (not _trial.done() and _trial.get_loop() is not loop):
        _trial = loop.create_task(_try())
    return await asyncio.shield(_trial) if not _trial.done() else _trial.result()


async def _try() -> str | None:
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (Debian, Ubuntu: apt install bubblewrap)"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return "setpriv is not installed (Debian, Ubuntu: apt install util-linux)"
    with tempfile.TemporaryDirectory() as root:
        folder = Folder.make(Path(root), "probe", ttl_s=_TRIAL_S)
        try:
            sandbox = await create("bubblewrap", SandboxSpec(folder))
            result = await sandbox.exec(["test", "-w", "/workspace"], timeout=_TRIAL_S)
            await sandbox.destroy()
        except InfraError as error:
            return f"{error.detail} ({_remedy()})"
    return None if result.exit_code == 0 else f"exit code {result.exit_code}: {result.stderr[:200].decode(errors='replace')}"


@cache
def _warn(missing: str) -> None:
    _log.warning("SANDBOX OFF: agents run as this user, with nothing between them and this machine", missing=missing)


def _remedy() -> str:
    """What most probably has to change on this host."""
    switches = {
        "kernel.unprivileged_userns_clone": "0",  # Debian's and Arch's own
        "user.max_user_namespaces": "0",
        "kernel.apparmor_restrict_unprivileged_userns": "1",  # Ubuntu since 24.04
    }
    if os.geteuid() == 0:
        return "root needs CAP_SYS_ADMIN; in a container: seccomp=unconfined and systempaths=unconfined"
    for name, off in switches.items():
        file = Path("/proc/sys") / name.replace(".", "/")
        if file.exists() and file.read_text().strip() == off:
            return f"sysctl {name} is {off}"
    return "user namespaces do not work here; in a container: seccomp=unconfined and systempaths=unconfined"
