"""An attempt is heard of from its claim until the ledger has its report, so that work which is done is not done again.

A busy ledger may read a report later than a lease lasts: the beats go on after the report, and end with the refusal that says
that the attempt is over. A lease is lost where the ledger says so, and not where it says nothing: a database that restarts for
longer than a lease lasts costs no attempt, and one that was given to another meanwhile is refused. Used by the runner.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from evener import log
from evener.api import ApiClient, Refused, RolloutLease
from evener.errors import EvenerError
from evener_runner.outcome import Stop

BEATS = 3
"""Heartbeats in one lease; each is waited for until the next is due, since a replica that starts may accept and not answer."""

SILENCE_S = 900.0
"""How long an attempt goes on unheard: longer than a database recovers from a crash. Then its sandbox is needed for others."""

_log = log.get("runner")


class Heart:
    """The heartbeat of one attempt. ``obey`` is told of every word of the ledger that ends it; the first one counts."""

    def __init__(self, api: ApiClient, lease: RolloutLease, obey: Callable[[Stop], None]) -> None:
        self._api = api
        self._lease = lease
        self._obey = obey
        self._reported = False

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncGenerator[None]:
        """Beat for as long as the block lasts."""
        self._task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def until_read(self, timeout: float) -> None:
        """Within `beating`, after the report: wait until the ledger has read it, for ``timeout`` seconds at most."""
        self._reported = True
        done, _ = await asyncio.wait({self._task}, timeout=timeout)
        if not done:
            _log.warning("report not read", session=self._lease.session_id, seconds=timeout)

    async def _beat(self) -> None:
        session, lease_s = self._lease.session_id, self._lease.lease_s
        heard = due = time.monotonic()
        while True:
            due = max(due + lease_s / BEATS, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            try:
                async with asyncio.timeout(lease_s / BEATS):
                    answer = await self._api.heartbeat(session, lease=self._lease.lease)
            except Refused:
                self._obey("lost")
                return
            except (EvenerError, TimeoutError) as error:
                _log.warning("heartbeat unanswered", session=session, error=str(error))
                if time.monotonic() - heard > max(SILENCE_S, lease_s) and not self._reported:
                    self._obey("lost")
                    return
            else:
                heard, lease_s = time.monotonic(), answer.lease_s
                if answer.action != "continue":
                    self._obey(answer.action)
