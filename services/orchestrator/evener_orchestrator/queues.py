"""The queue of a policy's learner goes when the policy's run is over, and no broker keeps one for every run there was.

A policy belongs to one run. The queue goes only when the learner has let go of it: a consumer would make it anew. Its deletion
is recorded, so that one that failed is tried again. Run by `loops`.
"""

from datetime import timedelta

from sqlalchemy import select

from evener.bus import Bus
from evener.messages import train_queue
from evener_orchestrator.ledger import Ledger, Transaction
from evener_orchestrator.ledger.models import Run

IDLE_S = 60.0
"""How long a run has to be over; what was on its way to the queue has arrived by then."""

BATCH = 16


async def delete_queues(ledger: Ledger, bus: Bus) -> int:
    """Delete the queues of runs that are over; the number of them."""
    return await ledger.write(lambda tx: _delete(tx, bus))


async def _delete(tx: Transaction, bus: Bus) -> int:
    over = await tx.session.scalars(
        select(Run)
        .where(
            Run.kind == "train",
            Run.queue_deleted_at.is_(None),
            Run.ended_at < tx.now - timedelta(seconds=IDLE_S),
            Run.learner_expires_at.is_(None) | (Run.learner_expires_at < tx.now),
        )
        .order_by(Run.id)
        .limit(BATCH)
        .with_for_update(skip_locked=True)
    )
    runs = over.all()
    for run in runs:
        await bus.delete(train_queue(run.policy))
        run.queue_deleted_at = tx.now
    return len(runs)
