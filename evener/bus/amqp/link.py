"""A link is one connection for one role, opened when it is asked for and again after every loss; nothing is replayed here.

Every way in which aio-pika can say that the broker is gone becomes `Lost`, and what no retry mends becomes `Refused`; the
callers (publisher, consumer, dead letters) decide what to do again. Every wait on the broker goes through `guard`.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from aio_pika.exceptions import CONNECTION_EXCEPTIONS, AuthenticationError, ChannelPreconditionFailed

from evener.errors import InfraError

CONNECT_S = 5.0
"""Longest a connection may take; a local one takes 20 ms."""

ANSWER_S = 10.0
"""Longest wait for one answer of the broker; a quorum queue is declared in 20 ms, and in seconds while a leader is elected."""

CLOSE_S = 1.0
"""Longest wait for a farewell; whatever is unsettled returns to its queue when the socket closes."""

RECONNECT_S = 0.25
"""Between two tries to connect, whoever asks: a hundred waiting publications are one caller to a broker that starts."""

HEARTBEAT_S = 10
"""A peer that was silent for three of these is lost; aio-pika's 60 would leave a cut cable unnoticed for three minutes."""

T = TypeVar("T")


class Lost(Exception):
    """The broker is gone, or did not take a message: worth another try."""

    cause = "bus_unavailable"


class NotTaken(Lost):
    """The broker is there but returned or refused one message: worth another try, the queue may be declared or drained."""

    cause = "bus_refused"


class Refused(Exception):
    """The broker will not, however often it is asked: wrong credentials, or a queue that has other arguments."""


async def guard(answer: Awaitable[T], timeout: float = ANSWER_S) -> T:
    """Wait for an answer of the broker. Raises Lost or Refused."""
    task = asyncio.current_task()
    try:
        async with asyncio.timeout(timeout):
            return await answer
    except asyncio.CancelledError:
        # aiormq ends pending calls with CancelledError when a silent connection is given up; only a task that somebody
        # cancelled may see one, else a service would stop without a word.
        if task is None or task.cancelling():
            raise
        raise Lost("the connection was closed") from None
    except (ChannelPreconditionFailed, AuthenticationError) as error:
        raise Refused(_text(error)) from error
    except TimeoutError as error:
        raise Lost(f"no answer within {timeout:g} s") from error
    except CONNECTION_EXCEPTIONS as error:
        if "ACCESS_REFUSED" in str(error):  # the protocol's name for wrong credentials and missing permissions
            raise Refused(_text(error)) from error
        raise Lost(_text(error)) from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        # aiormq ends what waits with a bare Exception where the connection closed without a reason of its own
        raise Lost("the connection was closed") from error


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def pauses() -> Iterator[float]:
    """Seconds between tries: 0.1, 0.2, ... 3.2, with up to a quarter of jitter, so that services do not return in step."""
    pause = 0.1
    while True:
        yield pause * random.uniform(0.75, 1.0)  # noqa: S311 - jitter, not a secret
        pause = min(pause * 2, 3.2)


async def persist(attempt: Callable[[], Awaitable[T]], *, patience_s: float, what: str) -> T:
    """Try again through every loss for ``patience_s``. Raises InfraError that says ``what`` failed."""
    deadline = time.monotonic() + patience_s
    for pause in pauses():
        try:
            return await attempt()
        except Refused as error:
            raise InfraError("bus_refused", f"{what}: {error}") from error
        except Lost as error:
            if time.monotonic() + pause > deadline:
                raise InfraError(error.cause, f"{what}: {error}") from error
        await asyncio.sleep(pause)
    raise AssertionError("the pauses never end")


def place(url: str) -> str:
    """Where a URL points, without its password."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (5671 if parts.scheme == 'amqps' else 5672)}{parts.path}"


class Link:
    """One connection, shared by the channels of a role.

    A channel that was asked a few things, or had a consumer, is used again: aio-pika 10 keeps a part of every channel until
    its connection ends.
    """

    def __init__(self, url: str, role: str) -> None:
        self.place = place(url)
        self._url = url
        self._role = role
        self._lock = asyncio.Lock()
        self._connection: AbstractConnection | None = None
        self._idle: list[AbstractChannel] = []
        self._failed = (-RECONNECT_S, "")
        self.closed = False

    async def lend(self) -> AbstractChannel:
        """A channel without confirms for a while. Raises as `channel` does."""
        await self._connected()
        while self._idle:
            channel = self._idle.pop()
            if not channel.is_closed:
                return channel
        return await self.channel(confirms=False)

    def take_back(self, channel: AbstractChannel) -> None:
        """Keep for others what was lent, on which nothing is under way any more: no answer, no consumer, no message."""
        if not channel.is_closed and not self.closed:
            self._idle.append(channel)

    @asynccontextmanager
    async def asked(self) -> AsyncGenerator[AbstractChannel]:
        """A channel for questions that are answered within the block. Raises as `channel` does."""
        channel = await self.lend()
        try:
            yield channel
        except BaseException:
            await farewell(channel.close())
            raise
        self.take_back(channel)

    async def channel(self, *, confirms: bool) -> AbstractChannel:
        """A new channel, on a new connection where the last one was lost. Raises Lost, Refused; InfraError once closed."""
        connection = await self._connected()
        try:
            channel = connection.channel(publisher_confirms=confirms, on_return_raises=confirms)
        except RuntimeError as error:  # lost between the two lines
            raise Lost(str(error)) from error
        await guard(channel.initialize())
        return channel

    async def _connected(self) -> AbstractConnection:
        async with self._lock:
            if self._connection is None or _is_lost(self._connection):
                self._connection = None
                self._idle.clear()
                if not self.closed:
                    self._connection = await self._connect()
            if self.closed or self._connection is None:
                await self.close()
                raise InfraError("bus_unavailable", f"{self.place}: this bus was closed")
            return self._connection

    async def _connect(self) -> AbstractConnection:
        when, why = self._failed
        if time.monotonic() < when + RECONNECT_S:
            raise Lost(why)
        properties = {"connection_name": f"evener {self._role}"}
        opening = aio_pika.connect(self._url, heartbeat=HEARTBEAT_S, client_properties={**properties})
        try:
            return await guard(opening, CONNECT_S)
        except Lost as error:
            self._failed = (time.monotonic(), str(error))
            raise

    async def close(self) -> None:
        """Leave; at most `CLOSE_S`."""
        self.closed = True
        await self.drop()

    async def drop(self) -> None:
        """Give up the connection, with all that is unsettled on it; the next channel is on a new one."""
        self._idle.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            await farewell(connection.close())


def _is_lost(connection: AbstractConnection) -> bool:
    return connection.transport is None or connection.transport.connection.is_closed


async def farewell(answer: Awaitable[None]) -> None:
    """Wait for the end of a channel or connection, which a broker that is already gone cannot confirm."""
    try:
        await guard(answer, CLOSE_S)
    except (Lost, Refused):
        return
