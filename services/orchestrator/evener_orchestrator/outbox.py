"""What a transaction decided to say is said at least once: a row leaves the outbox when the bus has confirmed it.

Whoever wrote a row publishes it; every second each orchestrator looks for what a dead one has left. Rows are locked while they
are published, so that two do not send the same ones. Run by `loops`.
"""

import asyncio
from collections.abc import Sequence

from sqlalchemy import delete, select

from evener.bus import Bus
from evener.messages import decode
from evener_orchestrator.ledger import Ledger, Transaction
from evener_orchestrator.ledger.models import Outgoing

BATCH = 64
"""Messages that are published together: a broker confirms ten times as many gathered as one by one."""


async def send(ledger: Ledger, bus: Bus) -> int:
    """Publish the oldest rows that nobody else is publishing; the number of them.

    A message that the bus refused stays in the outbox and holds back no other; the first refusal is raised in the end.
    """
    refusals = await ledger.write(lambda tx: _publish(tx, bus))
    for refusal in refusals:
        if refusal is not None:
            raise refusal
    return len(refusals)


async def _publish(tx: Transaction, bus: Bus) -> Sequence[BaseException | None]:
    rows = (
        await tx.session.scalars(select(Outgoing).order_by(Outgoing.id).limit(BATCH).with_for_update(skip_locked=True))
    ).all()
    if not rows:
        return ()
    refusals = await asyncio.gather(*(_publish_one(bus, row) for row in rows), return_exceptions=True)
    said = [row.id for row, refusal in zip(rows, refusals, strict=True) if refusal is None]
    await tx.session.execute(delete(Outgoing).where(Outgoing.id.in_(said)))
    return refusals


async def _publish_one(bus: Bus, row: Outgoing) -> None:
    await bus.publish(decode(row.body.encode()), priority=row.priority)
