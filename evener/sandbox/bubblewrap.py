"""A command under bubblewrap reaches its own folders, a read-only system and the proxy's socket; when it returns, all is dead.

No network, no secret of the host, no capability, a process tree of its own. Run by root, bubblewrap makes the mounts with
root's rights and the command drops to an unprivileged user; run by a user, it is that user in a namespace of its own.
Whatever is secret goes to bubblewrap through a file descriptor, never in its arguments. Made by `probe.create`.
"""

import asyncio
import contextlib
import os
import resource
import secrets
import time
from collections.abc import Coroutine
from functools import cache
from subprocess import DEVNULL, PIPE

from evener import log
from evener.errors import InfraError
from evener.sandbox import cgroups, seccomp, tree
from evener.sandbox.arguments import ROOT_RUNS_AS, Inside, write_etc
from evener.sandbox.output import collect, feed
from evener.sandbox.port import FORWARDER_PORT, OUTPUT_LIMIT, WORKSPACE, ExecResult, Kind, Limits, SandboxSpec
from evener.sandbox.pump import Pump, address_of
from evener.sandbox.snapshot import MAX_BYTES, Snapshot
from evener.sandbox.threads import in_thread
from evener.sandbox.writable import Writable

KILLED = 137
_QUICK_DEATH_S = 1.0
_SHARED_USER_PROCESSES = 4096
"""Without cgroups root's sandboxes share one user, whose processes RLIMIT_NPROC counts together."""

_log = log.get("sandbox")


class BubblewrapSandbox:
    """A sandbox made of Linux namespaces."""

    kind: Kind = "bubblewrap"

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._files = Writable(spec.folder.path / "files", spec.writable, ROOT_RUNS_AS if os.geteuid() == 0 else os.geteuid())
        self._pump: Pump | None = None
        self._cgroup: cgroups.Cgroup | None = None
        self._trees: list[tree.Tree] = []
        self._commands: set[asyncio.Task[object]] = set()
        self._kills = 0

    async def make(self) -> "BubblewrapSandbox":
        """Make all that a command will need. Raises InfraError."""
        folder = self._spec.folder
        try:
            self._files.make()
            write_etc(folder.path / "etc")
            if self._spec.proxy_url is not None:
                self._pump = Pump(folder.path / "proxy", address_of(self._spec.proxy_url))
                await self._pump.open(self._files.owner)
            hierarchy = _hierarchy()
            if hierarchy is not None:
                # Named as no other: a cgroup is the host's, and another sandbox of the same name would end with this one.
                self._cgroup = hierarchy.make(f"{folder.path.name}-{secrets.token_hex(4)}", self._spec.limits)
                folder.add_cgroups(self._cgroup.paths)
        except BaseException as error:
            await self.destroy()
            if isinstance(error, OSError):
                raise InfraError("sandbox_failed", f"{folder.path}: {error}") from error
            raise
        return self

    @property
    def proxy_url(self) -> str | None:
        """The forwarder's address."""
        return None if self._pump is None else f"http://127.0.0.1:{FORWARDER_PORT}"

    @property
    def proxy_lost(self) -> bool:
        """Whether the last connection to the proxy was given up."""
        return self._pump is not None and self._pump.unreachable

    def locate(self, path: str) -> str:
        """Paths inside are what they say."""
        return path

    async def exec(
        self,
        argv: list[str],
        *,
        timeout: float,
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
        cwd: str = WORKSPACE,
    ) -> ExecResult:
        """Run a command; see `Sandbox.exec`."""
        task = asyncio.current_task()
        assert task is not None
        self._commands.add(task)
        try:
            return await self._exec(argv, timeout, stdin, {**self._spec.env, **(env or {})}, cwd)
        finally:
            self._commands.discard(task)

    async def _exec(self, argv: list[str], timeout: float, stdin: bytes, env: dict[str, str], cwd: str) -> ExecResult:
        started, kills = time.monotonic(), self._kills
        inside = Inside(
            {path: self._files.host(path) for path in self._spec.writable},
            self._spec.mounts,
            self._spec.folder.path / "etc",
            self._spec.folder.path / "proxy" if self._pump else None,
            self._spec.root,
            self._spec.as_root,
        )
        start = tree.start(
            inside.options(env, cwd),
            inside.command(argv),
            mark=str(self._spec.folder.path),
            seccomp=_filter(),
            limit=self._limit,
            stdin=PIPE if stdin else DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
        )
        running = await _uncut(start)
        self._trees.append(running)
        if kills != self._kills:  # killed while it started
            running.kill()
        try:
            return await _finish(running, self._cgroup, stdin, timeout, started)
        finally:
            self._trees.remove(running)
            await asyncio.shield(running.end())

    async def upload(self, tar: bytes, path: str, *, over: bool = False) -> None:
        """Unpack ``tar`` into a writable folder."""
        await in_thread(self._files.unpack, tar, path, over)

    async def read(self, path: str, *, limit: int) -> bytes | None:
        """Read a file directly below a writable folder."""
        return self._files.read(path, limit)

    async def modes(self, path: str) -> dict[str, int]:
        """Look at what lies directly below a writable folder."""
        return self._files.modes(path)

    async def snapshot(self, path: str, *, max_bytes: int = MAX_BYTES) -> Snapshot:
        """Archive a writable folder."""
        return await in_thread(self._files.snapshot, path, max_bytes)

    async def kill(self) -> None:
        """Kill whatever runs or is about to."""
        self._kills += 1
        for running in self._trees:
            running.kill()

    async def destroy(self) -> None:
        """Kill, and remove every trace."""
        await self.kill()
        if self._commands:
            await asyncio.wait(self._commands, timeout=tree.DEATH_S)
        if self._pump is not None:
            await self._pump.close()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        if self._cgroup is not None:
            self._cgroup.remove()
        self._spec.folder.remove()

    def _limit(self, pid: int) -> None:
        """Limit the first process, before it starts another."""
        file_bytes = self._spec.limits.file_bytes
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        if self._cgroup is not None:
            self._cgroup.add(pid)
            return
        for name, value in _rlimits(self._spec.limits).items():
            resource.prlimit(pid, name, (value, value))


async def _uncut(start: Coroutine[None, None, tree.Tree]) -> tree.Tree:
    """A start takes 20 ms and cannot be broken off half way: a caller who is cancelled meanwhile ends what was started."""
    starting = asyncio.ensure_future(start)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting})
        if starting.exception() is None:
            await starting.result().end()
        raise


async def _finish(
    running: tree.Tree, cgroup: cgroups.Cgroup | None, stdin: bytes, timeout: float, started: float
) -> ExecResult:
    process = running.process
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = [asyncio.ensure_future(collect(stream, OUTPUT_LIMIT)) for stream in (process.stdout, process.stderr)]
    feeding = asyncio.ensure_future(feed(process, stdin))
    try:
        in_time = await running.dead(timeout)
        await _kill(running, cgroup)
        stdout, stderr = [await output for output in outputs]
        await feeding
    finally:
        for task in (feeding, *outputs):
            task.cancel()
        await asyncio.wait({feeding, *outputs})
    code = await running.exit_code()
    if code is None and in_time and stderr.content().startswith(b"bwrap: "):
        raise InfraError("sandbox_failed", stderr.content().decode(errors="replace").strip())
    return ExecResult(
        exit_code=KILLED if code is None else code,
        stdout=stdout.content(),
        stderr=stderr.content(),
        timed_out=not in_time,
        seconds=time.monotonic() - started,
    )


async def _kill(running: tree.Tree, cgroup: cgroups.Cgroup | None) -> None:
    running.kill()
    if await running.dead(_QUICK_DEATH_S):
        return
    with contextlib.nullcontext() if cgroup is None else cgroup.loosened():
        if not await running.dead(tree.DEATH_S):
            raise InfraError("sandbox_failed", "a killed sandbox does not die")


def _rlimits(limits: Limits) -> dict[int, int]:
    """What stands in for cgroups: memory for each process; the number of processes where the user is the sandbox's own."""
    pids = _SHARED_USER_PROCESSES if os.geteuid() == 0 else limits.pids
    return {resource.RLIMIT_DATA: limits.data_bytes, resource.RLIMIT_NPROC: pids}


@cache
def _hierarchy() -> cgroups.Hierarchy | None:
    hierarchy = cgroups.find()
    if hierarchy is None:
        _log.info("no cgroup can be made here: rlimits bound each process of a sandbox")
    return hierarchy


@cache
def _filter() -> bytes | None:
    program = seccomp.program()
    if program is None:
        _log.warning("no seccomp filter for this processor: sandboxes run without one", machine=os.uname().machine)
    return program
