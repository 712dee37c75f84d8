"""A workspace is known to be scored until the ledger has the score, so that no second verifier is given it.

Tests may take longer than the ledger waits before it issues a command again, and a score may wait to be read: the beats go on
after the report, and end with the refusal that says that the attempt is past scoring. Used by the service.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from evener import log
from evener.api import REPORT_S, ApiClient, Refused, ScoreOrder
from evener.errors import InfraError, InputError

BEATS = 3
"""How often it is said before the ledger would issue the command again; each is waited for until the next is due, since a
replica that starts may accept and not answer."""

_log = log.get("verifier")


class Hearts:
    """The heartbeats of all workspaces that are being scored, and of those whose score was not read yet."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self._beating: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def beating(self, order: ScoreOrder) -> AsyncGenerator[None]:
        """Beat while the block scores and reports, and once it has, until the ledger has read the report."""
        task = asyncio.create_task(self._beat(order))
        self._beating.add(task)
        task.add_done_callback(self._beating.discard)
        try:
            yield
        except BaseException:
            task.cancel()
            raise
        timer = asyncio.get_running_loop().call_later(REPORT_S, task.cancel)
        task.add_done_callback(lambda _: timer.cancel())  # else it would keep task and order for as long

    async def stop(self) -> None:
        """End all of them."""
        tasks = set(self._beating)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self, order: ScoreOrder) -> None:
        due = time.monotonic()
        while True:
            due = max(due + order.again_s / BEATS, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            try:
                async with asyncio.timeout(order.again_s / BEATS):
                    await self._api.scoring(order.session_id, begins=False)
            except (Refused, InputError):
                return
            except (InfraError, TimeoutError) as error:
                _log.warning("heartbeat unanswered", session=order.session_id, error=str(error))
