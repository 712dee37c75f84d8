"""The processes of one command under bubblewrap, held by their first one: its death is the death of all.

The first process of a process namespace is the last to die: the kernel kills and awaits the others first. It is held by a
pidfd from before it does anything, so that no process is ever signalled by a recycled number, and limits apply from the
start. Called by the bubblewrap sandbox.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from evener.errors import InfraError

START_S = 20.0
_GO = b"1\n"
_GATE = ["/bin/sh", "-c", 'read -r go < "$1" || exit 125; shift; exec "$@"']
"""One byte lets bubblewrap go on, the other the command. bubblewrap goes on too where we died before, and binds its life to
ours only later: the gate does not."""
DEATH_S = 30.0
"""A killed tree is gone within milliseconds, one of hundreds of processes on a busy host within seconds; after this long
something is stuck in the kernel."""


@dataclass(slots=True, eq=False)
class Tree:
    """bubblewrap outside (``process``), the first process inside, and bubblewrap's own report."""

    process: asyncio.subprocess.Process
    first: int  # pidfd; -1 when closed
    status: asyncio.StreamReader
    status_pipe: asyncio.StreamWriter
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        asyncio.get_running_loop().add_reader(self.first, self._died)

    def kill(self) -> None:
        """Kill all of it."""
        if self.first >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.first, signal.SIGKILL)

    async def dead(self, timeout: float) -> bool:
        """Wait until all of it is dead; False where it still lives after ``timeout`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.over.wait()
        return self.over.is_set()

    async def exit_code(self) -> int | None:
        """The command's exit code; None where bubblewrap never came to start it."""
        await self.process.wait()
        report: dict[str, int] = {}
        for line in (await self.status.read()).splitlines():
            report |= json.loads(line)
        return report.get("exit-code")

    async def end(self) -> None:
        """Kill what is left, wait for its death, and let go. Called once. Raises InfraError where it does not die."""
        self.kill()
        died = await self.dead(DEATH_S)
        if died:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEATH_S):
                    await self._leave()
        self.status_pipe.close()
        if self.first >= 0:
            asyncio.get_running_loop().remove_reader(self.first)
            os.close(self.first)
            self.first = -1
        if not died:
            raise InfraError("sandbox_failed", "a killed sandbox does not die")

    async def _leave(self) -> None:
        """Let bubblewrap itself end; its pipes are read to their end, without which asyncio keeps them open."""
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                await stream.read()
        if self.process.stdin is not None:
            self.process.stdin.close()
        await self.process.wait()

    def _died(self) -> None:
        asyncio.get_running_loop().remove_reader(self.first)
        self.over.set()


async def start(
    options: list[str],
    command: list[str],
    *,
    mark: str,
    seccomp: bytes | None,
    limit: Callable[[int], None],
    **popen: Any,
) -> Tree:
    """Start ``command`` under bubblewrap.

    ``mark`` is among bubblewrap's arguments, for the reaper; ``limit`` is called with the id of the first process before that
    goes on. Raises InfraError with bubblewrap's own words where it fails before that.
    """
    # A socket pair, not a pipe: uvloop 0.23 closes a pipe's descriptor in libuv and then again through its file object (strace
    # shows EBADF), and in between another thread may have been given the number. A socket it detaches.
    ours, theirs = socket.socketpair()
    go_read, go_write = os.pipe()
    status_write = theirs.detach()
    # With a reader of its own bubblewrap can report after our death; else SIGPIPE would end it before its first process.
    inherited = [os.dup(ours.fileno()), status_write, go_read, gate := os.dup(go_read), arguments := _file(b"")]
    flags = ["--json-status-fd", str(status_write), "--block-fd", str(go_read)]
    if seccomp is not None:
        inherited.append(filter_ := _file(seccomp))
        flags += ["--seccomp", str(filter_)]
    os.write(arguments, b"\0".join(word.encode() for word in [*options, *flags]) + b"\0")
    os.lseek(arguments, 0, os.SEEK_SET)
    status_pipe: asyncio.StreamWriter | None = None
    try:
        argv = ["bwrap", "--args", str(arguments), "--", *_GATE, mark, f"/proc/self/fd/{gate}", *command]
        # An empty environment: that of bubblewrap itself can be read inside, as /proc/1/environ.
        environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
        try:
            # A session of its own: Ctrl-C at the terminal is for the runner, which ends its agents in order.
            process = await asyncio.create_subprocess_exec(
                *argv, pass_fds=inherited, env=environment, start_new_session=True, **popen
            )
        except OSError as error:
            raise InfraError("sandbox_failed", f"bwrap: {error.strerror}") from error
        finally:
            for descriptor in inherited:
                os.close(descriptor)
        status, status_pipe = await asyncio.open_connection(sock=ours)
        first = await _first(process, status, limit)
        os.write(go_write, _GO)
        return Tree(process, first, status, status_pipe)
    except BaseException:
        if status_pipe is None:
            ours.close()
        else:
            status_pipe.close()
        raise
    finally:
        os.close(go_write)


async def _first(process: asyncio.subprocess.Process, status: asyncio.StreamReader, limit: Callable[[int], None]) -> int:
    """Hold the first process, which waits for our word, and limit it."""
    first = -1
    try:
        async with asyncio.timeout(START_S):
            line = await status.readline()
        if not line:
            raise ProcessLookupError
        pid = json.loads(line)["child-pid"]
        first = os.pidfd_open(pid)
        limit(pid)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if first >= 0:
            os.close(first)
        if isinstance(error, ProcessLookupError):  # bubblewrap gave up, and says why
            words = b"" if process.stderr is None else await process.stderr.read()
            raise InfraError("sandbox_failed", words.decode(errors="replace").strip() or "bwrap died") from error
        if isinstance(error, (TimeoutError, OSError, ValueError)):
            raise InfraError("sandbox_failed", f"bwrap: {error or type(error).__name__}") from error
        raise
    return first


def _file(content: bytes) -> int:
    """A file in memory that a child can read from its start."""
    descriptor = os.memfd_create("evener")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
