"""The least HTTP/1.1 client that can read both proxies, so that the clients leave the machine to what is measured."""

import asyncio
import re

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Connection:
    """One kept-alive connection to a port of 127.0.0.1; opens itself, and again after an error."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, method: str, path: str, body: bytes = b"", key: str = "") -> tuple[int, bytes]:
        """Status and whole body; asked again where the server closed the connection while it was idle.

        Raises OSError or EOFError where the connection ends before the answer is whole.
        """
        was_idle = self._streams is not None
        try:
            return await self._exchange(method, path, body, key)
        except (OSError, EOFError):
            self.close()
            if not was_idle:
                raise
        return await self._exchange(method, path, body, key)

    async def _exchange(self, method: str, path: str, body: bytes, key: str) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        reader, writer = self._streams
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: 127.0.0.1",
            "content-type: application/json",
            f"authorization: Bearer {key}",
            f"content-length: {len(body)}",
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        head = await reader.readuntil(b"\r\n\r\n")
        declared = _LENGTH.search(head)
        content = await (reader.readexactly(int(declared[1])) if declared else _chunks(reader, head))
        return int(head.split(b" ", 2)[1]), content

    def close(self) -> None:
        """Drop the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _chunks(reader: asyncio.StreamReader, head: bytes) -> bytes:
    if b"chunked" not in head.lower():
        return b""
    parts: list[bytes] = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(parts)
