"""What waits while a transaction is under way is done in the next one, all of it together: a busy ledger takes more at once.

To begin, to lock the run and to commit costs as many trips as most work does, and what locks the same run waits for each other
anyway. A work that fails takes back those it was done with, whereupon each is done in a transaction of its own: whoever waits
sees the result of his own work, as if it had been alone. Where the database is down, all who wait are told so. Made by
`context.Context`, used by the consumer and the API.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from evener_orchestrator.ledger.engine import Ledger, Transaction
from evener_orchestrator.ledger.faults import FAULTS, is_down

MOST = 16
"""Works of one transaction: it holds the run's lock for the time of as many."""

T = TypeVar("T")
Work = Callable[[Transaction], Awaitable[Any]]


@dataclass(slots=True, eq=False)
class _Waiting:
    work: Work
    about: str
    result: asyncio.Future[Any]

    def succeed(self, result: Any) -> None:
        if not self.result.done():
            self.result.set_result(result)

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class Together:
    """A way into ``ledger`` that has one transaction under way at a time."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: deque[_Waiting] = deque()
        self._busy = False
        self._draining: asyncio.Task[None] | None = None

    async def write(self, work: Callable[[Transaction], Awaitable[T]], *, about: str = "") -> T:
        """As `Ledger.write`, of a work that is about one session or none.

        Whoever is cancelled while he waits may find his work done all the same.
        """
        if self._busy:
            waiting = _Waiting(work, about, asyncio.get_running_loop().create_future())
            self._waiting.append(waiting)
            return await waiting.result
        self._busy = True
        try:
            return await self._ledger.write(work)
        finally:
            if self._waiting:
                self._draining = asyncio.create_task(self._drain())
            else:
                self._busy = False

    async def close(self) -> None:
        """Wait for what is under way."""
        if self._draining is not None:
            await asyncio.wait({self._draining})

    async def _drain(self) -> None:
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
                wanted = [each for each in batch if not each.result.done()]
                try:
                    if len(wanted) < 2 or not await self._at_once(wanted):
                        for each in wanted:
                            await self._alone(each)
                except FAULTS as error:
                    for each in (*wanted, *self._waiting):
                        each.fail(error)
                    self._waiting.clear()
        finally:
            self._busy = False

    async def _at_once(self, batch: Sequence[_Waiting]) -> bool:
        """Whether all of ``batch`` is done. Raises what says that the database is down."""

        async def work(tx: Transaction) -> list[Any]:
            return [await each.work(tx) for each in batch]

        try:
            results = await self._ledger.write(work, about=[each.about for each in batch if each.about])
        except Exception as error:
            if is_down(error):
                raise
            return False  # each is done again alone, and tells its own failure
        for each, result in zip(batch, results, strict=True):
            each.succeed(result)
        return True

    async def _alone(self, each: _Waiting) -> None:
        try:
            each.succeed(await self._ledger.write(each.work))
        except Exception as error:
            if is_down(error):
                raise
            each.fail(error)
