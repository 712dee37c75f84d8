"""The tests run in a fresh sandbox over the workspace; what they may rely on is in docs/verifier.md.

Out of process the workspace cannot be executed there, and ``candidate`` runs its code in another sandbox. In process the
test runners are guarded. Called by the verifier, once a scoring and once for a baseline.
"""

import asyncio
import os
import shlex
import shutil
import stat
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evener import log
from evener.errors import InfraError, TaskError
from evener.sandbox import HOME, WORKSPACE, ExecResult, Folder, Kind, Mount, Sandbox, SandboxSpec, create, interpreter
from evener.sandbox.arguments import PATH
from evener.sandbox.initial import limits_of
from evener.sandbox.threads import in_thread
from evener.tasks import TaskToml
from evener_verifier import relocate, reward
from evener_verifier.canary import Canaries, Rewards, write_guard
from evener_verifier.candidate import Candidate
from evener_verifier.channel import Channel
from evener_verifier.images import program_of
from evener_verifier.inside import candidate as candidate_program
from evener_verifier.workspace import baked, without_execution

TESTS = "/tests"
LOGS = "/logs/verifier"
TOOLS = "/opt/evener/bin"
PROGRAM = "/opt/evener/candidate.py"
GUARD = "/opt/evener/guard"
ROOT = "/opt/grader"
RUN = "/run/evener"
SOCKET = "verifier.sock"
REWARDS = ("reward.json", "reward.txt")
REPORTS = ("ctrf.json", "junit.xml", "report.json")
REPORT_LIMIT = 4 << 10
TTL_S = 24 * 3600.0
"""How long a sandbox's folder may stand, for the reaper of another host."""

_WHERE_NO_ROOT: dict[Kind, str] = {
    "bubblewrap": "under a verifier that root runs itself: give it a user of its own",
    "process": "without bubblewrap",
}

_log = log.get("verifier")


@dataclass(frozen=True, slots=True)
class Job:
    """What is run on what: ``tests`` is a folder of the host, ``graded`` has a tar file for each folder that an agent left.

    ``folder`` is the sandbox's, and gone when the tests ran. ``root`` is what is at ``/opt/grader``; ``image`` is the grader's
    own system, in place of the host's.
    """

    toml: TaskToml
    tests: Path
    graded: dict[str, bytes]
    kind: Kind
    folder: Folder
    root: Path | None
    image: Path | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """What the tests did and wrote."""

    result: ExecResult
    json: bytes | None
    text: bytes | None
    reports: dict[str, str]
    candidate: dict[str, Any] | None
    canaries: Canaries | None
    closed: bool
    """Whether nobody could write to /logs/verifier any more."""
    tests_write: bool
    """Whether tests other than shell scripts name a reward file: they write it while a test runner runs."""


async def grade(job: Job) -> Ran:
    """Run the tests over the workspace. Raises InfraError, and TaskError where this host has no root for them."""
    if job.kind == "process":
        _warn()
    if job.toml.verifier.as_root and (os.geteuid() == 0) == (job.kind == "bubblewrap"):
        raise TaskError("task_setup", f"verifier.user: no grader can be root {_WHERE_NO_ROOT[job.kind]}")
    grading = _Grading(job)
    try:
        return await grading.run()
    except OSError as error:
        raise InfraError("sandbox_failed", f"{job.folder.path}: {error}") from error
    finally:
        await grading.close()


@cache
def _warn() -> None:
    _log.warning("SCORES ARE NOT PROTECTED: graders run as this user, and the code they grade can reach tests and reward")


class _Grading:
    """The sandboxes of one grading, and the socket between."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sandbox: Sandbox | None = None
        self._candidate: Candidate | None = None
        self._canaries: Canaries | None = None
        self._ends = AsyncExitStack()

    async def run(self) -> Ran:
        toml = self._job.toml
        if toml.verifier.tier == "out_of_process":
            self._candidate = Candidate(self._second, time.monotonic() + toml.verifier.timeout_sec)
            self._ends.push_async_callback(self._candidate.close)
            serve = self._candidate.serve
        else:
            self._canaries = Canaries(self._rewards)
            serve = self._canaries.serve
        place = self._job.folder.path
        channel = await Channel(place / "run", SOCKET, serve).open()
        self._ends.push_async_callback(channel.close)
        spec = await in_thread(self._spec)
        self._sandbox = sandbox = await create(self._job.kind, spec)
        self._ends.push_async_callback(sandbox.destroy)
        for path, tar in self._job.graded.items():
            if self._job.image is not None:
                await sandbox.upload(await in_thread(baked, self._job.image, path, toml), path)
            left = without_execution(tar) if self._candidate else tar
            await sandbox.upload(left, path, over=self._job.image is not None)
        await in_thread(self._equip, sandbox)
        result = await self._execute(sandbox)
        files = {name: await sandbox.read(f"{LOGS}/{name}", limit=reward.LIMIT) for name in (*REWARDS, *REPORTS)}
        return Ran(
            result,
            *(files[name] for name in REWARDS),
            reports={name: text[:REPORT_LIMIT].decode(errors="replace") for name in REPORTS if (text := files[name])},
            candidate=self._candidate.evidence() if self._candidate else None,
            canaries=self._canaries,
            closed=not (await sandbox.modes(LOGS))["."] & stat.S_IWUSR,
            tests_write=await in_thread(_name_a_reward, self._job.tests),
        )

    async def close(self) -> None:
        """Remove all of it, whatever fails."""
        await self._ends.aclose()

    def _spec(self) -> SandboxSpec:
        job = self._job
        place = job.folder.path
        tests = job.tests
        if job.image is None:
            tests.mkdir(mode=0o755, exist_ok=True)
        if job.kind == "process":  # whose words are changed
            tests = place / "tests"
            shutil.copytree(job.tests, tests)
        mounts = [Mount(place / "run", RUN), *([Mount(tests, TESTS)] if tests.is_dir() else [])]
        if self._candidate is not None:
            mounts += [Mount(place / "bin", TOOLS), Mount(Path(candidate_program.__file__), PROGRAM)]
            mounts += [Mount(path, str(path)) for path in interpreter.files() if job.image is None]
            (place / "bin").mkdir(mode=0o755)
        else:
            mounts.append(Mount(place / "guard", GUARD))
            write_guard(place / "guard")
        if job.root is not None:
            mounts.append(Mount(job.root, ROOT))
        own = job.toml.verifier.environment
        limits = limits_of(job.toml if own is None else job.toml.model_copy(update={"environment": own}))
        writable = (*job.graded, HOME, "/tmp", LOGS)  # noqa: S108 - a path inside
        as_root = job.toml.verifier.as_root
        return SandboxSpec(Folder(place), tuple(mounts), writable, limits=limits, root=job.image, as_root=as_root)

    def _equip(self, sandbox: Sandbox) -> None:
        """Put the tools in their place, and where paths are not what they say, say so in the tests."""
        if self._candidate is not None:
            image = self._job.image
            python = str(interpreter.executable()) if image is None else program_of(image, "python3") or "python3"
            words = [python, "-I", "-S", "-E", sandbox.locate(PROGRAM), f"{sandbox.locate(RUN)}/{SOCKET}"]
            file = self._job.folder.path / "bin/candidate"
            file.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            file.chmod(0o755)
        if sandbox.kind == "process":
            relocate.rewrite(self._job.folder.path / "tests", sandbox.locate)

    async def _execute(self, sandbox: Sandbox) -> ExecResult:
        toml, locate = self._job.toml, sandbox.locate
        image = self._job.image
        bash = shutil.which("bash") if image is None else program_of(image, "bash")
        argv = ["bash" if bash else "sh", locate(f"{TESTS}/test.sh")]
        if toml.verify is not None:
            verify = toml.verify.encode()
            argv = ["sh", "-c", (relocate.text(verify, locate) if sandbox.kind == "process" else verify).decode()]
        running = asyncio.ensure_future(sandbox.exec(argv, timeout=toml.verifier.timeout_sec, env=self._environment(sandbox)))
        waits: set[asyncio.Future[Any]] = {running}
        if self._candidate is not None:
            waits.add(asyncio.ensure_future(self._candidate.failed.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._candidate is not None and self._candidate.fault is not None:
                raise self._candidate.fault
            return running.result()
        finally:
            for each in waits:
                each.cancel()
            await asyncio.wait(waits)

    def _environment(self, sandbox: Sandbox) -> dict[str, str]:
        """The task's own, and what keeps the workspace's out."""
        path = os.environ.get("PATH", PATH) if sandbox.kind == "process" else PATH
        tools = [sandbox.locate(TOOLS)] if self._candidate is not None else []
        env = {"PYTHONDONTWRITEBYTECODE": "1"}
        if self._candidate is not None:
            env["PYTHONSAFEPATH"] = "1"  # `python3 -m` would import from the working directory first
        if self._job.root is not None:
            root = sandbox.locate(ROOT)
            tools.append(f"{root}/bin")
            env["PYTHONUSERBASE"] = root
        if self._canaries is not None:
            settings = {"core.hooksPath": "/dev/null", "core.fsmonitor": "false"}
            env["GIT_CONFIG_COUNT"] = str(len(settings))
            for number, (key, value) in enumerate(settings.items()):
                env |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
            env |= {"PYTHONPATH": sandbox.locate(GUARD), "EVENER_GUARD": f"{sandbox.locate(RUN)}/{SOCKET}"}
            env["EVENER_GUARD_TESTS"] = sandbox.locate(TESTS)
            env["EVENER_GUARD_ALONE"] = "1" if sandbox.kind == "bubblewrap" else "0"
        env["PATH"] = ":".join([*tools, path])
        own = dict(self._job.toml.verifier.env)
        for name in ("PATH", "PYTHONPATH"):
            if name in own and name in env:
                own[name] = f"{env[name]}:{own[name]}"
        return env | own

    async def _second(self) -> Sandbox:
        """The candidate's own sandbox, with the snapshot as it is."""
        assert self._candidate is not None
        assert self._sandbox is not None
        folder = self._job.folder
        own = Folder.make(folder.path.parent, f"{folder.path.name}-candidate", ttl_s=TTL_S)
        graded = self._job.graded
        writable = (*graded, HOME, "/tmp")  # noqa: S108 - a path inside
        sandbox = await create(self._job.kind, SandboxSpec(own, writable=writable, limits=limits_of(self._job.toml)))
        try:
            for path, tar in graded.items():
                await sandbox.upload(tar, path)
        except BaseException:
            await sandbox.destroy()
            raise
        here, there = (os.fsencode(each.locate(WORKSPACE)) for each in (self._sandbox, sandbox))
        if here != there:
            self._candidate.translate = lambda word: word.replace(here, there)
        return sandbox

    async def _rewards(self) -> Rewards:
        """What is in the place of reward files now."""
        assert self._sandbox is not None
        there = await self._sandbox.modes(LOGS)
        return {name: await self._sandbox.read(f"{LOGS}/{name}", limit=reward.LIMIT) for name in REWARDS if name in there}


def _name_a_reward(tests: Path) -> bool:
    names = [name.encode() for name in REWARDS]
    files = (path for path in tests.rglob("*") if path.is_file() and path.suffix not in (".sh", ".bash"))
    return any(name in content for path in files for content in [path.read_bytes()] for name in names)
