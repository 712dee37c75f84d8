"""Isolates NOTHING: a command is a process of this user, sees all that he sees, and reaches whatever he reaches.

For the user's own tasks on a machine that has nothing better. Folders replace the paths inside (`locate`), a process group
gathers what the command starts, rlimits bound each process. What leaves the group on purpose outlives it. The folders are in
the system's temporary folder: agents and test runners look for a project's files in all folders above. Made by `probe.create`.
"""

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import Coroutine
from subprocess import DEVNULL, PIPE

from evener.errors import InfraError
from evener.sandbox.arguments import PATH
from evener.sandbox.output import collect, feed
from evener.sandbox.port import HOME, OUTPUT_LIMIT, WORKSPACE, ExecResult, Kind, SandboxSpec
from evener.sandbox.snapshot import MAX_BYTES, Snapshot
from evener.sandbox.threads import in_thread
from evener.sandbox.writable import Writable

_SETTLE_S = 2.0
"""After the group is killed its pipes end at once, unless something left the group with them."""


class ProcessSandbox:
    """Folders and a process group."""

    kind: Kind = "process"

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._running: list[asyncio.subprocess.Process] = []

    async def make(self) -> "ProcessSandbox":
        """Make the folders. Raises InfraError."""
        try:
            self._files = Writable(self._spec.folder.make_outside(), self._spec.writable, os.geteuid())
            self._files.make()
        except OSError as error:
            raise InfraError("sandbox_failed", f"{self._spec.folder.path}: {error}") from error
        return self

    @property
    def proxy_url(self) -> str | None:
        """The proxy itself."""
        return self._spec.proxy_url

    @property
    def proxy_lost(self) -> bool:
        """Not known: nothing of ours stands between."""
        return False

    def locate(self, path: str) -> str:
        """The real place of what lies at ``path`` in other sandboxes."""
        places = {mount.target: str(mount.source) for mount in self._spec.mounts}
        places |= {inside: str(self._files.host(inside)) for inside in self._spec.writable}
        for inside, host in sorted(places.items(), key=lambda place: -len(place[0])):
            if path == inside or path.startswith(inside + "/"):
                return host + path.removeprefix(inside)
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
        started = time.monotonic()
        base = {"PATH": os.environ.get("PATH", PATH), "HOME": self.locate(HOME), "TMPDIR": self.locate("/tmp")}  # noqa: S108
        start = asyncio.create_subprocess_exec(
            *argv,
            stdin=PIPE if stdin else DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env={**base, "LANG": "C.UTF-8", **self._spec.env, **(env or {})},
            cwd=self.locate(cwd),
            start_new_session=True,
        )
        try:
            process = await _uncut(start)
        except OSError as error:
            return ExecResult(127, b"", f"{argv[0]}: {error.strerror}\n".encode(), False, time.monotonic() - started)
        data, file_bytes = self._spec.limits.data_bytes, self._spec.limits.file_bytes
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (data, data))
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        self._running.append(process)
        try:
            return await _finish(process, stdin, timeout, started)
        finally:
            self._running.remove(process)
            _kill(process)

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
        """Kill whatever runs."""
        for process in self._running:
            _kill(process)

    async def destroy(self) -> None:
        """Kill, and remove every trace."""
        await self.kill()
        await asyncio.to_thread(self._spec.folder.remove)


async def _uncut(start: Coroutine[None, None, asyncio.subprocess.Process]) -> asyncio.subprocess.Process:
    """Where its caller is cancelled, asyncio would kill the first process alone and wait for the pipes that others hold."""
    starting = asyncio.ensure_future(start)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting})
        if starting.exception() is None:
            _kill(starting.result())
        raise


async def _finish(process: asyncio.subprocess.Process, stdin: bytes, timeout: float, started: float) -> ExecResult:
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = [asyncio.ensure_future(collect(stream, OUTPUT_LIMIT)) for stream in (process.stdout, process.stderr)]
    feeding = asyncio.ensure_future(feed(process, stdin))
    exited = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({exited}, timeout=timeout)
        timed_out = not exited.done()
        _kill(process)
        await asyncio.wait({exited, feeding, *outputs}, timeout=_SETTLE_S)
        stdout, stderr = (output.result().content() if output.done() else b"" for output in outputs)
    finally:
        for task in (exited, feeding, *outputs):
            task.cancel()
    code = process.returncode if process.returncode is not None else -signal.SIGKILL
    return ExecResult(code if code >= 0 else 128 - code, stdout, stderr, timed_out, time.monotonic() - started)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the group, which may outlive its first process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
