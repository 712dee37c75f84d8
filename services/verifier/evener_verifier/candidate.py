"""The candidate's code runs in a sandbox of its own, and the grader sees what it printed and wrote, and nothing more.

Out of process the grader's sandbox has a command ``candidate`` (`inside.candidate`) that asks for a run through a socket. The
second sandbox holds the snapshot alone: no tests, no reward channel, no socket. It is made at the first call and is the same
for all calls of one scoring. A fault of it is ours: it is kept in `fault`, and the grader is ended. Called by the grader.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from evener.errors import InfraError
from evener.sandbox import Sandbox
from evener_verifier.channel import read_frame, write_frame
from evener_verifier.inside.candidate import TIMED_OUT, UNUSABLE

CALLS_SHOWN = 20
WORDS_SHOWN = 120
"""Characters shown of the command of a call."""


class Candidate:
    """Answers the calls of one scoring. ``make`` makes the second sandbox; no call outlasts ``deadline`` (`time.monotonic`)."""

    def __init__(self, make: Callable[[], Awaitable[Sandbox]], deadline: float) -> None:
        self._make = make
        self._deadline = deadline
        self._making = asyncio.Lock()
        self._sandbox: Sandbox | None = None
        self._calls = 0
        self._shown: list[dict[str, Any]] = []
        self.fault: InfraError | None = None
        self.failed = asyncio.Event()
        self.translate: Callable[[bytes], bytes] = bytes
        """What becomes of a word of the command, which may hold a path that is elsewhere in the second sandbox."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one call; the caller's leaving ends the command."""
        request = await read_frame(reader)
        if request is None or len(request) < 3:
            await write_frame(writer, [b"%d" % UNUSABLE, b"", b"candidate: the command or its input is too long\n"])
            return
        running = asyncio.ensure_future(self._run(*request))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await write_frame(writer, running.result())
        except InfraError as error:
            self.fault = self.fault or error
            self.failed.set()
        finally:
            for task in (running, leaving):
                task.cancel()
            await asyncio.wait({running, leaving})

    def evidence(self) -> dict[str, Any]:
        """How often the candidate was run, and how the first runs ended."""
        return {"calls": self._calls, "first": self._shown}

    async def close(self) -> None:
        """Remove the second sandbox."""
        if self._sandbox is not None:
            await self._sandbox.destroy()

    async def _run(self, timeout: bytes, stdin: bytes, *argv: bytes) -> list[bytes]:
        async with self._making:
            if self._sandbox is None:
                self._sandbox = await self._make()
        left = max(self._deadline - time.monotonic(), 0.0)
        seconds = min(float(timeout), left) if timeout else left
        command = [self.translate(word).decode(errors="surrogateescape") for word in argv]
        result = await self._sandbox.exec(command, timeout=seconds, stdin=stdin)
        self._calls += 1
        if len(self._shown) < CALLS_SHOWN:
            ended = {"exit_code": result.exit_code, "timed_out": result.timed_out, "seconds": round(result.seconds, 3)}
            words = " ".join(word.decode(errors="replace") for word in argv)
            self._shown.append({"command": words[:WORDS_SHOWN], **ended})
        code = TIMED_OUT if result.timed_out else result.exit_code
        return [b"%d" % code, result.stdout, result.stderr]
