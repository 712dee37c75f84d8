"""A snapshot may be graded again; the new score is kept beside the one that counted, which nothing here changes.

A regrade waits until a verifier has reported it, is issued again like any command without effect, and carries its id through
order and report, so that a late word about the attempt's own score is never taken for it. Called by the API, the consumer and
`loops`.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import ColumnElement

from evener.api import ScoreOrder
from evener.errors import CAUSES, Boundary, InputError
from evener.ids import new_id, session_id
from evener.messages import RolloutScored, ScoreWorkspace
from evener_orchestrator.ledger import scores
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.find import find_any
from evener_orchestrator.ledger.locks import hold, lock_run
from evener_orchestrator.ledger.models import Attempt, Group, Regrade, Rollout, Run, Score, Task
from evener_orchestrator.ledger.reissue import due
from evener_orchestrator.ledger.types import storable


@dataclass(frozen=True, slots=True)
class Asked:
    """What is graded again: all ``rollouts`` of ``id`` that left a snapshot and are past scoring; the others are left out."""

    kind: str
    id: str
    rollouts: int
    left_out: int


async def ask(tx: Transaction, given: str) -> Asked:
    """Have a rollout, a group or a run graded again; what waits already is not asked twice. Raises InputError."""
    target = await find_any(tx.session, given)
    run = await lock_run(tx, target.id if isinstance(target, Run) else target.run_id)
    rows = await tx.session.execute(
        select(Rollout, Attempt)
        .join(Attempt, (Attempt.rollout_id == Rollout.id) & (Attempt.number == Rollout.attempt))
        .where(_of(target), Attempt.snapshot.is_not(None), Rollout.outcome.is_not(None))
        .order_by(Rollout.id)
    )
    graded = rows.all()
    kind = type(target).__name__.lower()
    if not graded:
        raise InputError("not_found", f"a snapshot of {kind} {target.id} that was scored")
    open_ = Regrade.ended_at.is_(None)
    waiting = set(await tx.session.scalars(select(Regrade.rollout_id).where(open_).join(Rollout).where(_of(target))))
    for rollout, attempt in graded:
        if rollout.id not in waiting:
            tx.session.add(_regrade(tx, rollout, attempt))
            tx.send(ScoreWorkspace(run_id=run.id, rollout_id=rollout.id, attempt=attempt.number))
    number = await tx.session.scalar(select(func.count()).select_from(Rollout).where(_of(target)))
    return Asked(kind, target.id, len(graded), (number or 0) - len(graded))


async def order(tx: Transaction, session: str, *, begins: bool) -> ScoreOrder | None:
    """What to score of an attempt: its own score, or else what is to be graded again. Raises Conflict where neither is.

    None where that has ended now: too many verifiers have begun (`scores.ORDERS`).
    """
    held = await hold(tx, session)
    if scores.awaits(held):
        return scores.order(tx, held, begins=begins)
    regrade = await tx.session.scalar(
        select(Regrade).where(Regrade.attempt_id == session, Regrade.ended_at.is_(None)).order_by(Regrade.id).limit(1)
    )
    if regrade is None:
        raise Conflict(f"attempt {session} is past scoring")
    regrade.issued_at = tx.now
    regrade.orders += begins
    if regrade.orders > scores.ORDERS:
        regrade.cause, regrade.detail, regrade.ended_at = "verifier_failed", scores.SILENT, tx.now
        tx.note("regrade", run_id=held.run.id, rollout_id=held.rollout.id, score=None, cause=regrade.cause)
        return None
    return scores.order_of(held, regrade=regrade.id)


async def record(tx: Transaction, message: RolloutScored) -> None:
    """Record a verifier's answer. Raises Conflict where the regrade is over, or not of this attempt."""
    held = await hold(tx, session_id(message.rollout_id, message.attempt))
    regrade = await tx.session.get(Regrade, message.regrade)
    if regrade is None or regrade.attempt_id != held.attempt.id or regrade.ended_at is not None:
        raise Conflict(f"regrade {message.regrade} of attempt {held.attempt.id} is over")
    cause, detail = scores.fault(message)
    if cause is not None and CAUSES[cause].boundary is not Boundary.TASK:
        regrade.scorings += 1
        if regrade.scorings < scores.SCORINGS:
            _issue(tx, regrade, held.run.id)
            return
    regrade.score = None if cause is not None else message.scores["reward"]
    regrade.scores = dict(message.scores)
    regrade.evidence = message.evidence
    regrade.cause = cause
    regrade.detail = storable(detail)
    regrade.seconds = message.seconds
    regrade.ended_at = tx.now
    tx.note("regrade", run_id=held.run.id, rollout_id=held.rollout.id, score=regrade.score, cause=cause)


async def reissue(tx: Transaction, *, before: datetime) -> int:
    """Issue again what was last issued at ``before`` or earlier and waits still; the number of commands.

    Where ``before`` is now, everything is, as `evener_orchestrator.ledger.reissue` has it.
    """
    rows = await tx.session.execute(
        select(Regrade, Rollout.run_id)
        .join(Rollout, Rollout.id == Regrade.rollout_id)
        .where(Regrade.ended_at.is_(None), Regrade.issued_at <= before)
        .order_by(Regrade.id)
        .with_for_update(of=Regrade, skip_locked=True)
    )
    found = [row for row in rows if before >= tx.now or due(tx.now, row[0].created_at, row[0].issued_at)]
    for regrade, run_id in found:
        _issue(tx, regrade, run_id)
    return len(found)


async def newest(session: AsyncSession, given: str) -> list[tuple[Regrade, Score | None, Group, Task]]:
    """The newest regrade of each rollout of a rollout, a group or a run, with the score that counted."""
    target = await find_any(session, given)
    last = select(func.max(Regrade.id)).join(Rollout, Rollout.id == Regrade.rollout_id).where(_of(target))
    rows = await session.execute(
        select(Regrade, Score, Group, Task)
        .join(Rollout, Rollout.id == Regrade.rollout_id)
        .join(Group, Group.id == Rollout.group_id)
        .join(Task, Task.digest == Group.task_digest)
        .outerjoin(Score, Score.attempt_id == Regrade.attempt_id)
        .where(Regrade.id.in_(last.group_by(Regrade.rollout_id)))
        .order_by(Regrade.rollout_id)
    )
    return [(regrade, score, group, task) for regrade, score, group, task in rows]


def _of(target: Run | Group | Rollout) -> ColumnElement[bool]:
    match target:
        case Run():
            return Rollout.run_id == target.id
        case Group():
            return Rollout.group_id == target.id
        case Rollout():
            return Rollout.id == target.id


def _regrade(tx: Transaction, rollout: Rollout, attempt: Attempt) -> Regrade:
    regrade = Regrade(id=new_id(), attempt_id=attempt.id, rollout_id=rollout.id, created_at=tx.now, issued_at=tx.now)
    regrade.scores, regrade.evidence = {}, {}
    return regrade


def _issue(tx: Transaction, regrade: Regrade, run_id: str) -> None:
    regrade.issued_at = tx.now
    number = int(regrade.attempt_id.rpartition(".")[2])
    tx.send(ScoreWorkspace(run_id=run_id, rollout_id=regrade.rollout_id, attempt=number))
