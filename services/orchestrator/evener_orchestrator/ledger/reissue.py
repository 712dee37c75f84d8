"""The command of every rollout and group whose next effect is absent is issued again, so that no lost message stops a run.

Commands are idempotent: one too many is refused by a claim, and a learner that has disposed of the group says so again. What
merely waits its turn is issued ever more seldom, so that no queue fills with copies. Called at start, every minute, and when
a run is resumed.
"""

from collections.abc import Sequence as Many
from datetime import datetime, timedelta

from sqlalchemy import Row, Select, or_, select

from evener.messages import RunRollout
from evener_orchestrator.ledger.attempts import EVAL_PRIORITY, ask_for_score
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.groups import issue
from evener_orchestrator.ledger.models import Attempt, Group, Rollout, Run
from evener_orchestrator.states import GroupState, RolloutState, RunState

REISSUE_S = 60.0
"""Age at which a command without effect is issued again, the first time; each further time waits twice as long."""

LONGEST_S = 1800.0
"""Longest pause between two issues: a rollout that waits a day for a runner leaves 50 copies, not 1,440."""

ALIVE = (RunState.RUNNING, RunState.PAUSED)


async def reissue(tx: Transaction, *, before: datetime, run_id: str | None = None) -> int:
    """Issue again what was last issued at ``before`` or earlier (of one run); the number of commands.

    Where ``before`` is now, everything is, as often as it was issued already: whoever held the commands is gone.
    """
    runs = select(Run.id).where(Run.state.in_(ALIVE)) if run_id is None else select(Run.id).where(Run.id == run_id)
    everything = before >= tx.now
    number = 0
    for rollout, attempt, purpose in await _waiting_rollouts(tx, runs, before):
        since = attempt.created_at if rollout.state is RolloutState.QUEUED else attempt.ended_at
        if not (everything or due(tx.now, since, rollout.issued_at)):
            continue
        number += 1
        if rollout.state is RolloutState.ARCHIVED:
            ask_for_score(tx, rollout)
            continue
        rollout.issued_at = tx.now
        tx.send(
            RunRollout(run_id=rollout.run_id, rollout_id=rollout.id, attempt=rollout.attempt),
            priority=EVAL_PRIORITY if purpose == "eval" else 0,
        )
    for group, run in await _waiting_groups(tx, runs, before):
        if everything or due(tx.now, group.closed_at, group.issued_at):
            number += 1
            issue(tx, run, group)
    return number


def due(now: datetime, since: datetime | None, issued: datetime | None) -> bool:
    """Whether as much time has gone by since the last issue as before it."""
    if since is None or issued is None:
        return True
    return now - issued >= min(issued - since, timedelta(seconds=LONGEST_S))


async def _waiting_rollouts(tx: Transaction, runs: Select[str], before: datetime) -> Many[Row[Rollout, Attempt, str]]:
    rows = await tx.session.execute(
        select(Rollout, Attempt, Group.purpose)
        .join(Group, Group.id == Rollout.group_id)
        .join(Attempt, (Attempt.rollout_id == Rollout.id) & (Attempt.number == Rollout.attempt))
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
    return rows.all()


async def _waiting_groups(tx: Transaction, runs: Select[str], before: datetime) -> Many[Row[Group, Run]]:
    rows = await tx.session.execute(
        select(Group, Run)
        .join(Run, Run.id == Group.run_id)
        .where(
            Group.run_id.in_(runs),
            Group.purpose == "train",
            Group.state.in_((GroupState.CLOSED, GroupState.TRAINING)),
            Group.issued_at <= before,
        )
        .order_by(Group.number)
        .with_for_update(of=Group, skip_locked=True)
    )
    return rows.all()
