"""One request or message is one transaction: its effects and its outgoing messages commit together or not at all.

SQLite runs in WAL mode with one writer: a transaction of `Ledger.write` begins IMMEDIATE and waits for the one before it.
On Postgres writers run side by side; a repository function locks the run's row first, so that a run has one writer.
Time is the database's. Used by every part of the orchestrator.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event, func, select, type_coerce
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from evener.messages import Message, encode
from evener_orchestrator.ledger.models import Outgoing
from evener_orchestrator.ledger.types import Timestamp

BUSY_MS = 30_000
"""How long SQLite waits for another process (a person's shell) that writes."""


@dataclass(slots=True)
class Transaction:
    """A transaction at work: ``session`` to read and write, ``now`` by the database's clock."""

    session: AsyncSession
    now: datetime
    changes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    sends: bool = False

    def send(self, message: Message, *, priority: int = 0) -> None:
        """Send ``message`` after the commit. ``priority`` 0 to 9, greater goes first."""
        self.session.add(Outgoing(body=encode(message).decode(), priority=priority))
        self.sends = True

    def note(self, kind: str, **facts: Any) -> None:
        """Tell those who wait on /v1/events what changed, after the commit."""
        self.changes.append({"kind": kind, "at": self.now.timestamp(), **facts})


class Ledger:
    """The database. ``on_commit`` is called after each transaction that wrote."""

    def __init__(self, url: str, *, on_commit: Callable[[Transaction], None] = lambda _: None) -> None:
        self._on_commit = on_commit
        self.sqlite = make_url(url).get_backend_name() == "sqlite"
        if self.sqlite:
            Path(make_url(url).database or "").parent.mkdir(parents=True, exist_ok=True)
            self.writer = _sqlite(url, "BEGIN IMMEDIATE", connections=1)
            self.reader = _sqlite(url, "BEGIN", connections=4)
        else:
            self.writer = self.reader = create_async_engine(url, pool_size=16, pool_pre_ping=True)
        self._write = async_sessionmaker(self.writer, expire_on_commit=False)
        self._read = async_sessionmaker(self.reader, expire_on_commit=False)
        self._turn: AbstractAsyncContextManager[Any] = asyncio.Lock() if self.sqlite else nullcontext()

    @asynccontextmanager
    async def write(self) -> AsyncGenerator[Transaction]:
        """A transaction that commits when the block ends, and leaves nothing behind where it raises."""
        async with self._turn, self._write() as session, session.begin():
            transaction = Transaction(session, await _clock(session, sqlite=self.sqlite))
            yield transaction
        self._on_commit(transaction)

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[AsyncSession]:
        """A snapshot to read from."""
        async with self._read() as session, session.begin():
            yield session

    async def close(self) -> None:
        """Close every connection."""
        await self.writer.dispose()
        if self.reader is not self.writer:
            await self.reader.dispose()


async def _clock(session: AsyncSession, *, sqlite: bool) -> datetime:
    # Postgres's clock_timestamp and not now: a transaction may have waited for a row before.
    clock = func.strftime("%Y-%m-%d %H:%M:%f", "now") if sqlite else func.clock_timestamp()
    return (await session.execute(select(type_coerce(clock, Timestamp)))).scalar_one()


def _sqlite(url: str, begin: str, *, connections: int) -> AsyncEngine:
    engine = create_async_engine(url, pool_size=connections, max_overflow=0)

    def connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself
        cursor = connection.cursor()
        # synchronous=NORMAL: a commit outlives every process, and only the last ones can be lost with the machine's power.
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"busy_timeout={BUSY_MS}"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def start(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine.sync_engine, "connect", connect)
    event.listen(engine.sync_engine, "begin", start)
    return engine
