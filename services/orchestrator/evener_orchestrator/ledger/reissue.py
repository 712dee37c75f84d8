"""The command of every rollout and group whose next effect is absent is issued again, so that no lost message stops a run.

Commands are idempotent: one too many is refused by a claim. Called at start, every minute, and when a run is resumed.
"""

from datetime import datetime

from sqlalchemy import or_, select

from evener.messages import RunRollout
from evener_orchestrator.ledger.attempts import EVAL_PRIORITY, ask_for_score
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.groups import issue
from evener_orchestrator.ledger.models import Group, Rollout, Run
from evener_orchestrator.states import GroupState, RolloutState, RunState

REISSUE_S = 60.0
"""Age at which a command without effect is issued again."""

ALIVE = (RunState.RUNNING, RunState.PAUSED)


async def reissue(tx: Transaction, *, before: datetime, run_id: str | None = None) -> int:
    """Issue again what was last issued at ``before`` or earlier (of one run); the number of commands."""
    runs = select(Run.id).where(Run.state.in_(ALIVE)) if run_id is None else select(Run.id).where(Run.id == run_id)
    rollouts = await tx.session.execute(
        select(Rollout, Group.purpose)
        .join(Group, Group.id == Rollout.group_id)
        .where(
            Rollout.run_id.in_(runs),
            Rollout.issued_at <= before,
            or_(
                Rollout.state == RolloutState.QUEUED,
                (Rollout.state == RolloutState.ARCHIVED) & Rollout.outcome.is_(None),
            ),
        )
        .order_by(Rollout.id)
        .with_for_update(of=Rollout, skip_locked=True)
    )
    number = 0
    for rollout, purpose in rollouts.all():
        number += 1
        if rollout.state is RolloutState.ARCHIVED:
            ask_for_score(tx, rollout)
            continue
        rollout.issued_at = tx.now
        tx.send(
            RunRollout(run_id=rollout.run_id, rollout_id=rollout.id, attempt=rollout.attempt),
            priority=EVAL_PRIORITY if purpose == "eval" else 0,
        )
    groups = await tx.session.execute(
        select(Group, Run)
        .join(Run, Run.id == Group.run_id)
        .where(
            Group.run_id.in_(runs),
            Group.purpose == "train",
            Group.state == GroupState.CLOSED,
            Group.issued_at <= before,
        )
        .order_by(Group.number)
        .with_for_update(of=Group, skip_locked=True)
    )
    for group, run in groups.all():
        number += 1
        issue(tx, run, group)
    return number
