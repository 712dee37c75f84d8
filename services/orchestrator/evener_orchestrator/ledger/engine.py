"""One request or message is one transaction: its effects and its outgoing messages commit together or not at all.

SQLite runs in WAL mode with one writer: a transaction of `Ledger.write` begins IMMEDIATE and waits for the one before it.
On Postgres writers of any number of processes run side by side; a repository function locks the run's row first, so that a run
has one writer. Time is the database's. Used by every part of the orchestrator.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import func, insert, select, type_coerce
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from evener.messages import Message, encode
from evener_orchestrator.ledger.faults import FAULTS, is_victim
from evener_orchestrator.ledger.idle import ping_the_idle
from evener_orchestrator.ledger.models import Attempt, Group, Outgoing, Rollout, Run, Task
from evener_orchestrator.ledger.sqlite import create_sqlite_engine
from evener_orchestrator.ledger.types import Timestamp, as_json

PATIENCE_S = 30.0
"""How long a transaction waits for another process that writes SQLite."""

RETRY_S = 0.05

CONNECT_S = 10.0
COMMAND_S = 120.0
"""Longest that Postgres may take for one statement; a lock is waited for as long, and no statement of ours takes seconds."""

IDLE_S = 120.0
"""Longest pause within a transaction, after which Postgres lets go of its locks; the outbox waits 30 s for a broker."""

CONNECTIONS = 16
"""Of a process to Postgres. Whoever finds none free waits: one that is opened for a burst and closed after it costs both sides
more than most transactions.
"""

ATTEMPTS = 5
"""Times that a transaction is tried which Postgres rolls back for another's sake; each time one of the two gets on."""

T = TypeVar("T")
Last = Callable[["Transaction", list[Any]], Awaitable[None]]


@dataclass(slots=True)
class Transaction:
    """A transaction at work: ``session`` to read and write, ``now`` by the database's clock; ``outgoing``: rows of the outbox.

    ``about``: the sessions that its works are about, so that all are read at once; ``held``: what was (`locks.hold`).
    ``newest``: by policy, the version that `versions.newest` read.
    """

    session: AsyncSession
    now: datetime
    postgres: bool
    changes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    outgoing: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    about: tuple[str, ...] = ()
    held: dict[str, "Held"] = field(default_factory=dict[str, "Held"])
    newest: dict[str, int] = field(default_factory=dict[str, int])
    _last: dict[Last, list[Any]] = field(default_factory=dict[Last, list[Any]])

    def send(self, message: Message, *, priority: int = 0) -> None:
        """Send ``message`` after the commit. ``priority`` 0 to 9, greater goes first."""
        self.outgoing.append({"body": encode(message).decode(), "priority": priority})

    def at_last(self, work: Last, item: Any) -> None:
        """Do ``work`` before the commit, once with all items that were given for it."""
        self._last.setdefault(work, []).append(item)

    async def finish(self) -> None:
        """Do what was put off, and what that put off."""
        while self._last:
            work = next(iter(self._last))
            await work(self, self._last.pop(work))

    def note(self, kind: str, **facts: Any) -> None:
        """Tell those who wait on /v1/events what changed, after the commit."""
        self.changes.append({"kind": kind, "at": self.now.timestamp(), **facts})


@dataclass(frozen=True, slots=True)
class Held:
    """An attempt and what it belongs to, under its run's lock."""

    attempt: Attempt
    rollout: Rollout
    group: Group
    task: Task
    run: Run


class Ledger:
    """The database. ``on_commit`` is called after each transaction that wrote."""

    def __init__(self, url: str, *, on_commit: Callable[[Transaction], None] = lambda _: None) -> None:
        self._on_commit = on_commit
        location = make_url(url)
        self.sqlite = location.get_backend_name() == "sqlite"
        if self.sqlite:
            Path(location.database or "").parent.mkdir(parents=True, exist_ok=True)
            self.writer = create_sqlite_engine(location, "BEGIN IMMEDIATE", connections=1)
            self.reader = create_sqlite_engine(location, "BEGIN", connections=8)
        else:
            location = location.set(drivername="postgresql+asyncpg")
            self.writer = self.reader = create_async_engine(
                location, pool_size=CONNECTIONS, max_overflow=0, json_serializer=as_json, connect_args=_deadlines()
            )
            ping_the_idle(self.writer)
        self._write = async_sessionmaker(self.writer, expire_on_commit=False)
        self._read = async_sessionmaker(self.reader, expire_on_commit=False)
        self._turn: AbstractAsyncContextManager[Any] = asyncio.Lock() if self.sqlite else nullcontext()

    async def write(self, work: Callable[[Transaction], Awaitable[T]], *, about: Sequence[str] = ()) -> T:
        """What ``work`` returns, done in one transaction that leaves nothing behind where it raises.

        ``about``: the sessions it is about, where that is known before. ``work`` is done again from its beginning where
        Postgres rolled it back because of another transaction.
        """
        for number in range(1, ATTEMPTS + 1):
            try:
                transaction, result = await self._once(work, tuple(about))
            except FAULTS as error:
                if number == ATTEMPTS or not is_victim(error):
                    raise
                await asyncio.sleep(random.uniform(0, RETRY_S * 2**number))  # noqa: S311 - to part two that collided
            else:
                self._on_commit(transaction)
                return result
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _once(self, work: Callable[[Transaction], Awaitable[T]], about: tuple[str, ...]) -> tuple[Transaction, T]:
        async with self._turn, self._write() as session:
            transaction = Transaction(session, await self._begin(session), postgres=not self.sqlite, about=about)
            result = await work(transaction)
            await transaction.finish()
            if transaction.outgoing:
                await session.execute(insert(Outgoing), transaction.outgoing)  # all of them in one trip
            await session.commit()
        return transaction, result

    async def _begin(self, session: AsyncSession) -> datetime:
        """Begin with a look at the clock. Another process that writes SQLite is waited for without blocking the loop."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await _clock(session, sqlite=self.sqlite)
            except OperationalError as error:
                if "database is locked" not in str(error) or time.monotonic() > deadline:
                    raise
                await session.rollback()
                await asyncio.sleep(RETRY_S)

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[AsyncSession]:
        """A snapshot to read from."""
        async with self._read() as session, session.begin():
            yield session

    @asynccontextmanager
    async def alone(self, what: str) -> AsyncGenerator[bool]:
        """Whether no other process is at ``what`` until the block ends: for work that is more than one transaction.

        The lock is the connection's: it goes with a process that dies.
        """
        if self.sqlite:
            yield True
            return
        key = func.hashtextextended(what, 0)
        async with self.reader.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            try:
                yield bool(await connection.scalar(select(func.pg_try_advisory_lock(key))))
                await connection.execute(select(func.pg_advisory_unlock(key)))
            except BaseException:
                await connection.invalidate()  # it may hold the lock, and must not go back among the others with it
                raise

    async def close(self) -> None:
        """Close every connection."""
        await self.writer.dispose()
        if self.reader is not self.writer:
            await self.reader.dispose()


def _deadlines() -> dict[str, Any]:
    """A Postgres that fell silent is noticed here, and a transaction whose process fell silent is ended there."""
    settings = {"idle_in_transaction_session_timeout": str(round(IDLE_S * 1000)), "tcp_keepalives_idle": "30"}
    return {"timeout": CONNECT_S, "command_timeout": COMMAND_S, "server_settings": settings}


async def _clock(session: AsyncSession, *, sqlite: bool) -> datetime:
    return (await session.execute(_NOW_SQLITE if sqlite else _NOW)).scalar_one()


# Postgres's clock_timestamp and not now: a transaction may have waited for a row before.
_NOW = select(type_coerce(func.clock_timestamp(), Timestamp))
_NOW_SQLITE = select(type_coerce(func.strftime("%Y-%m-%d %H:%M:%f", "now"), Timestamp))
