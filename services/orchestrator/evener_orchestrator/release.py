"""The proxy forgets a session only after the ledger has what it held, and in the end it forgets every one.

Deleting is idempotent and its success is recorded, so that a crash between the two, or a second orchestrator, does it again.
A session whose runner fell silent is sealed first, so that a zombie's agent samples nothing more; and one that was never
opened is deleted as well, so that no zombie opens it. Run by `loops`.
"""

import contextlib
from collections.abc import Awaitable

from sqlalchemy import select, update

from evener.errors import EvenerError
from evener_orchestrator.context import Sessions
from evener_orchestrator.ledger import Ledger, Transaction
from evener_orchestrator.ledger.models import Attempt

BATCH = 32
GONE = frozenset({"not_found", "session_lost"})


async def release(ledger: Ledger, sessions: Sessions) -> int:
    """Delete the sessions of attempts that ended; the number of them.

    One that the proxy does not delete holds back no other, of which a full Redis has to be rid: the first failure is raised in
    the end.
    """
    async with ledger.read() as session:
        ended = await session.execute(
            select(Attempt.id, Attempt.cause)
            .where(Attempt.ended_at.is_not(None), Attempt.released_at.is_(None))
            .order_by(Attempt.id)
            .limit(BATCH)
        )
        rows = ended.all()
    if not rows:
        return 0
    released: list[str] = []
    failures: list[EvenerError] = []
    for name, cause in rows:
        try:
            await _end(sessions, name, of_a_zombie=cause == "lease_expired")
        except EvenerError as error:
            failures.append(error)
        else:
            released.append(name)
    if released:
        await ledger.write(lambda tx: _record(tx, released))
    if failures:
        raise failures[0]
    return len(released)


async def _end(sessions: Sessions, name: str, *, of_a_zombie: bool) -> None:
    """Delete a session. What is deleted answers no zombie either: a seal only tells calls in flight at once."""
    if of_a_zombie:
        with contextlib.suppress(EvenerError):
            await sessions.seal(name)
    await _unless_gone(sessions.delete(name))


async def _unless_gone(work: Awaitable[object]) -> None:
    """Do it, where there is such a session: one whose runner fell silent may not have been opened yet."""
    try:
        await work
    except EvenerError as error:
        if error.cause not in GONE:
            raise


async def _record(tx: Transaction, released: list[str]) -> None:
    await tx.session.execute(update(Attempt).where(Attempt.id.in_(released)).values(released_at=tx.now))
