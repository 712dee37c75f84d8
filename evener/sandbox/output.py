"""The output of a command that is not trusted is read to its end and kept within a bound: its start and its end.

Its input is written whole, or as far as it is taken. Called by the sandboxes.
"""

import asyncio
import contextlib

_CHUNK = 65536


class Output:
    """Keeps the first and the last half of ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        """Take some more."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[max(room, 0) :]
        excess = len(self._tail) - self._half
        if excess > 0:
            del self._tail[:excess]
            self._dropped += excess

    def content(self) -> bytes:
        """What was kept, with a line in the middle that says how much was not."""
        gap = b"\n[%d bytes left out]\n" % self._dropped if self._dropped else b""
        return bytes(self._head) + gap + bytes(self._tail)


async def feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    """Write the input of a command, which need not read it."""
    if process.stdin is not None:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(stdin)
            await process.stdin.drain()
        process.stdin.close()
        with contextlib.suppress(ConnectionError):
            await process.stdin.wait_closed()


async def collect(reader: asyncio.StreamReader, limit: int) -> Output:
    """Read a stream to its end."""
    output = Output(limit)
    while data := await reader.read(_CHUNK):
        output.feed(data)
    return output
