"""One unix socket a sandbox is its only way out, and it leads to one place: the proxy's agent side.

Every connection to the socket becomes one TCP connection to the proxy, so that any replica behind the address may take
it; bytes are copied, never read. While the proxy accepts nothing a connection waits for it: an agent has seconds of patience
for a server that is gone, and minutes for one that is slow. The socket's folder is 0700 and the sandbox user's, so that no
other user of the host can sample. Opened and closed by the bubblewrap sandbox.
"""

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from evener.errors import InputError

SOCKET = "proxy.sock"
CONNECT_S = 45.0
"""How long a connection waits for the proxy; the shortest patience of an agent for the head of a reply is 60 s."""
_CONNECT_PAUSE_S = 0.25
_CHUNK = 65536
_BACKLOG = 128


def address_of(url: str) -> tuple[str, int]:
    """Host and port of the proxy's agent side. Raises InputError for what cannot be pumped to."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.path not in ("", "/"):
        raise InputError("settings_invalid", f"EVENER_PROXY_URL: {url!r} is not http://HOST:PORT")
    return parts.hostname, parts.port or 80


class Pump:
    """A unix socket in ``folder`` whose connections go to ``address``."""

    def __init__(self, folder: Path, address: tuple[str, int]) -> None:
        self._folder = folder
        self._address = address
        self._descriptor = -1
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.unreachable = False
        """Whether the last connection found no proxy until its patience was over."""

    async def open(self, owner: int) -> None:
        """Listen; the folder and the socket belong to user ``owner``."""
        self._folder.mkdir(mode=0o700)
        listener = socket.socket(socket.AF_UNIX)
        # An address of a unix socket has at most 107 bytes (unix(7)), and data folders lie deep: go through the folder's fd.
        self._descriptor = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        listener.bind(f"/proc/self/fd/{self._descriptor}/{SOCKET}")
        if owner != os.geteuid():
            os.chown(self._folder / SOCKET, owner, owner)
            os.chown(self._folder, owner, owner)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, backlog=_BACKLOG)

    async def close(self) -> None:
        """Cut every connection. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        ends = [writer]
        try:
            upstream_reader, upstream = await self._connect()
            ends.append(upstream)
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, upstream))
                both.create_task(_copy(upstream_reader, writer))
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass  # the agent sees a closed connection, as from any server that went away
        finally:
            self._connections.discard(task)
            for end in ends:
                end.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the proxy, as soon as it takes one. Raises OSError."""
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                connection = await asyncio.open_connection(*self._address)
            except OSError:
                if time.monotonic() > deadline:
                    self.unreachable = True
                    raise
            else:
                self.unreachable = False
                return connection
            await asyncio.sleep(_CONNECT_PAUSE_S)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
