"""A TCP relay in front of a real service, whose connections a test can cut, refuse, slow down or let fall silent."""

import asyncio
import contextlib
from typing import Self


class Relay:
    """Listens on a free port of 127.0.0.1 and passes bytes to ``port``; use as an async context manager."""

    def __init__(self, port: int) -> None:
        self.refusing = False
        self.delay_s = 0.0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._target = port
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Reset every connection."""
        self._flowing.set()
        for writer in list(self._writers):
            writer.transport.abort()

    def stall(self) -> None:
        """Pass nothing on, and keep the connections: a cable was pulled."""
        self._flowing.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = (writer, there_writer)
        self._writers.update(ends)
        try:
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        finally:
            self._writers.difference_update(ends)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
