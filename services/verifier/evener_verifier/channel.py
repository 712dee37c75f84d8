"""A unix socket through which a grader's sandbox asks the verifier for something, and the only thing it can reach.

The socket is in a folder of its own, which the sandbox mounts; on the host the folder above is 0700. Frames are a list of byte
strings: their number (4 bytes, big-endian), then each with its length (8 bytes) before it. Used by `candidate` and `canary`.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

MAX_FRAME = 20 << 20
MAX_WORDS = 4096
_BACKLOG = 16

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Channel:
    """A listening socket ``name`` in the new folder ``folder``; every connection is given to ``serve``."""

    def __init__(self, folder: Path, name: str, serve: Serve) -> None:
        self.folder = folder
        self._name = name
        self._answer = serve
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> "Channel":
        """Listen, for any user who reaches the folder. Raises OSError."""
        self.folder.mkdir(mode=0o755)
        listener = socket.socket(socket.AF_UNIX)
        # An address of a unix socket has at most 107 bytes (unix(7)), and data folders lie deep: go through the folder's fd.
        descriptor = os.open(self.folder, os.O_PATH | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{descriptor}/{self._name}")
        finally:
            os.close(descriptor)
        (self.folder / self._name).chmod(0o666)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, backlog=_BACKLOG)
        return self

    async def close(self) -> None:
        """Cut every connection, and end what is being done for it. Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()


async def read_frame(reader: asyncio.StreamReader) -> list[bytes] | None:
    """A frame; None for one over the limits. Raises asyncio.IncompleteReadError where the other end closes before."""
    count = int.from_bytes(await reader.readexactly(4))
    if count > MAX_WORDS:
        return None
    words: list[bytes] = []
    room = MAX_FRAME
    for _ in range(count):
        size = int.from_bytes(await reader.readexactly(8))
        room -= size
        if room < 0:
            return None
        words.append(await reader.readexactly(size))
    return words


async def write_frame(writer: asyncio.StreamWriter, words: list[bytes]) -> None:
    """Send a frame. Raises ConnectionError."""
    writer.write(len(words).to_bytes(4))
    for word in words:
        writer.write(len(word).to_bytes(8))
        writer.write(word)
    await writer.drain()
