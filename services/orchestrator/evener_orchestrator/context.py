"""What the parts of one orchestrator process share. Nothing here is truth: the ledger alone is.

`Context.committed` runs after each transaction that wrote: it wakes the loops and tells the feed.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from evener.blobs import Blobs
from evener.bus import Bus
from evener.settings import Settings
from evener_orchestrator.archive import Archiver
from evener_orchestrator.ledger import Ledger, Transaction
from evener_orchestrator.ledger.together import Together

FEED = 4096
"""Changes that the feed remembers; a reader that is further behind reads the objects themselves."""


class Sessions(Protocol):
    """The proxy's admin side, as far as it is needed here (`evener.proxy_admin.ProxyAdmin`)."""

    async def seal(self, session_id: str) -> Any:
        """No call of the session is answered any more."""
        ...

    async def delete(self, session_id: str) -> None:
        """Forget the session and its captures."""
        ...

    async def prompt_problem(self) -> str | None:
        """Why the engines cannot be given prompts as ids; None where they can. Raises InfraError while no engine answers."""
        ...


class Feed:
    """The latest changes, each with a number that grows, also across restarts (it starts at the clock's milliseconds)."""

    def __init__(self) -> None:
        self._number = time.time_ns() // 1_000_000
        self._changes: deque[dict[str, Any]] = deque(maxlen=FEED)
        self._more = asyncio.Event()

    def add(self, changes: list[dict[str, Any]]) -> None:
        """Append changes and wake who waits."""
        for change in changes:
            self._number += 1
            self._changes.append({"number": self._number, **change})
        if changes:
            self._more.set()
            self._more = asyncio.Event()

    async def after(self, number: int, *, run_id: str | None, timeout: float) -> list[dict[str, Any]]:
        """The changes after ``number`` (of one run), waiting up to ``timeout`` seconds for the first."""
        deadline = time.monotonic() + timeout
        while True:
            more = self._more
            found = [change for change in self._changes if change["number"] > number and run_id in (None, change.get("run_id"))]
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            try:
                async with asyncio.timeout(left):
                    await more.wait()
            except TimeoutError:
                return []


@dataclass(slots=True)
class Context:
    """One process's shared objects."""

    settings: Settings
    bus: Bus
    blobs: Blobs
    archiver: Archiver
    sessions: Sessions
    ping_redis: Callable[[], Awaitable[Any]]
    ledger: Ledger = field(init=False)
    events: Together = field(init=False)
    requests: Together = field(init=False)
    feed: Feed = field(default_factory=Feed)
    refused: Counter[str] = field(default_factory=Counter[str])
    outbox: asyncio.Event = field(default_factory=asyncio.Event)
    planner: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.settings.database, on_commit=self.committed)
        self.events, self.requests = Together(self.ledger), Together(self.ledger)

    async def close(self) -> None:
        """End what is under way, and every connection of the ledger."""
        await self.events.close()
        await self.requests.close()
        await self.ledger.close()

    def committed(self, transaction: Transaction) -> None:
        """Wake whoever has work now."""
        if transaction.outgoing:
            self.outbox.set()
        if transaction.changes:
            self.planner.set()
            self.feed.add(transaction.changes)
