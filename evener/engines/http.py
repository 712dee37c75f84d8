"""One request at a time on each connection to an engine, as many connections as there are calls, and nothing else.

A general HTTP client spends more CPU on a call than the rest of the proxy; an engine needs no redirects, cookies, proxies or
compression of it. A request whose caller is cancelled closes its connection, at which engines abort the generation. Used by
`evener.engines.vllm`.
"""

import asyncio
import base64
import socket
import ssl
import time
from collections import deque
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import httptools

KEEP_S = 15.0  # a busy moment leaves thousands of connections, which nobody needs later
PEER_IDLE_S, PEER_PROBES = 10, 3
"""The host of an engine is gone after 40 s without a sign of life; a living one answers, however long its engine takes."""


class HttpError(Exception):
    """The server could not be reached, ended the connection before its answer was whole, or does not speak HTTP."""


class HttpClient:
    """A client of the server at ``url`` (http or https; a path is put before the paths of requests).

    ``key`` is sent as a bearer token; without it the user and password of ``url``, where it has them.
    """

    def __init__(self, url: str, *, connect_s: float, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url}: not a http(s) URL")
        self._host, self._base = parts.hostname, parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._connect_s = connect_s
        user, _, host = parts.netloc.rpartition("@")
        self._headers = f"host: {host}\r\naccept: application/json\r\ncontent-type: application/json\r\n"
        if key is not None:
            self._headers += f"authorization: Bearer {key}\r\n"
        elif user:
            self._headers += f"authorization: Basic {base64.b64encode(unquote(user).encode()).decode()}\r\n"
        self._idle: deque[tuple[float, _Connection]] = deque()  # by when it was used last

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and whole body of the answer. Raises HttpError."""
        connection = self._take() or await self._connect()
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        try:
            answer = await connection.exchange(head.encode() + body)
        except BaseException:
            connection.abort()
            raise
        self._put(connection)
        return answer

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop()[1].abort()

    def _take(self) -> "_Connection | None":
        """The connection that was used last, so that those beyond the need grow old."""
        while self._idle:
            _, connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    def _put(self, connection: "_Connection") -> None:
        now = time.monotonic()
        while self._idle and self._idle[0][0] < now - KEEP_S:
            self._idle.popleft()[1].abort()
        if connection.reusable:
            self._idle.append((now, connection))
        else:
            connection.abort()

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise HttpError(str(error) or "no connection in time") from error
        return connection


def _watch_peer(connection: socket.socket) -> None:
    """Have the kernel close a connection whose host is gone: a reply may take an hour, and a dead host never says so."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", PEER_IDLE_S), ("TCP_KEEPINTVL", PEER_IDLE_S), ("TCP_KEEPCNT", PEER_PROBES)):
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class _Connection(asyncio.Protocol):
    """A connection, and the answer that it waits for."""

    def __init__(self) -> None:
        self.reusable = True
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser: Any = None
        self._body: list[bytes] = []

    async def exchange(self, request: bytes) -> tuple[int, bytes]:
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body = []
        self._transport.write(request)
        return await self._answer

    def abort(self) -> None:
        """Close it at once."""
        self.reusable = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The way out."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it
        _watch_peer(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """A part of the answer; without a request nothing may come."""
        if self._answer is None or self._answer.done():
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(HttpError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has gone, or we have closed it."""
        self._fail(HttpError(f"the connection was closed before the answer was whole: {exc or 'by the server'}"))

    def on_body(self, body: bytes) -> None:
        """A piece of the body (called by the parser)."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The answer is whole (called by the parser)."""
        if self._answer is not None and not self._answer.done():
            self.reusable = self.reusable and self._parser.should_keep_alive()
            self._answer.set_result((self._parser.get_status_code(), b"".join(self._body)))

    def _fail(self, error: HttpError) -> None:
        self.reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
