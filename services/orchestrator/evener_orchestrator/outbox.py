"""What a transaction decided to say is said at least once: a row leaves the outbox when the bus has confirmed it.

Rows are locked while they are published, so that two orchestrators do not send the same ones. Run by `loops`.
"""

from sqlalchemy import delete, select

from evener.bus import Bus
from evener.messages import decode
from evener_orchestrator.ledger import Ledger
from evener_orchestrator.ledger.models import Outgoing

BATCH = 64


async def send(ledger: Ledger, bus: Bus) -> int:
    """Publish the oldest rows; the number of them. A publication that fails leaves all of them in the outbox."""
    async with ledger.read() as session:
        if await session.scalar(select(Outgoing.id).limit(1)) is None:
            return 0
    async with ledger.write() as tx:
        rows = (
            await tx.session.scalars(select(Outgoing).order_by(Outgoing.id).limit(BATCH).with_for_update(skip_locked=True))
        ).all()
        for row in rows:
            await bus.publish(decode(row.body.encode()), priority=row.priority)
        await tx.session.execute(delete(Outgoing).where(Outgoing.id.in_([row.id for row in rows])))
    return len(rows)
