"""A runner is silent only where it could have been heard: after an outage of ours every lease lasts as long as a fresh one.

While the database takes nothing no heartbeat is recorded, and all leases run out at once although every agent is at work. An
orchestrator that has just started does not know for how long nobody was heard, and takes it for such an outage. Run by `loops`.
"""

import time

from sqlalchemy import false, update

from evener_orchestrator.ledger import Ledger, Transaction
from evener_orchestrator.ledger.attempts import expire
from evener_orchestrator.ledger.faults import FAULTS
from evener_orchestrator.ledger.models import Attempt


class Silence:
    """Ends the attempts of silent runners, but for ``lease_s`` seconds after the ledger could not be written."""

    def __init__(self, ledger: Ledger, *, lease_s: float) -> None:
        self._ledger = ledger
        self._lease_s = lease_s
        self._outage_over()

    async def end_attempts(self) -> None:
        """End what has run out, where its runner could have been heard. Raises what says that the database is down."""
        began = time.monotonic()

        async def work(tx: Transaction) -> None:
            if began < self._trusted or self._is_long(began):
                await _try_to_write(tx)
            else:
                await expire(tx)

        try:
            await self._ledger.write(work)
        except FAULTS:
            self._outage_over()
            raise
        if self._is_long(began):
            self._outage_over()

    def _is_long(self, began: float) -> bool:
        """Whether the database has stalled since: heartbeats waited for it as well."""
        return time.monotonic() - began > self._lease_s / 2

    def _outage_over(self) -> None:
        self._trusted = time.monotonic() + self._lease_s


async def _try_to_write(tx: Transaction) -> None:
    """A read-only database answers every question, and refuses this."""
    await tx.session.execute(
        update(Attempt).where(false()).values(runner=Attempt.runner).execution_options(synchronize_session=False)
    )
