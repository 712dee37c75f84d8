"""Whatever a run no longer wants ends here, each rollout with exactly one outcome, and nothing is left waiting.

Waiting rollouts are cancelled at once; running ones learn of it by their heartbeat; of a run that is over none waits for a
score. A run none of whose groups can be trained stops and says why; one that has learnt what there was goes on to its last
evaluation.
Called wherever a group is skipped or rejected, and wherever a run ends.
"""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import CursorResult, Row, func, select, update
from sqlalchemy.sql import ColumnElement

from evener.errors import Outcome
from evener.runfile import RunFile
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.models import Attempt, Group, Rollout, Run
from evener_orchestrator.states import GroupState, RolloutState, RunState, moved, sources

HOPELESS_GROUPS = 32
"""Groups in a row without a trained one after which training ends, at least (and at least four steps' worth)."""

MASTERED_GROUPS = 16
"""Groups in a row that were solved whole after which training ends, at least (and at least four steps' worth): where the policy
solves 9 of 10, sixteen groups of four are solved whole once in 850 times."""

WAITING = (RolloutState.PLANNED, RolloutState.QUEUED)


async def dispose(tx: Transaction, run: Run, group: Group, state: GroupState, reason: str) -> None:
    """Skip or reject a group; what it still waited for is cancelled and the planner's credit comes back."""
    group.state = moved(group.state, state)
    group.reason = reason
    group.disposed_at = tx.now
    tx.note("group", run_id=run.id, group_id=group.id, state=state, reason=reason)
    await _cancel_waiting(tx, Rollout.group_id == group.id)
    if group.purpose == "train" and run.state is RunState.RUNNING:
        await _check_signal(tx, run)


async def end_run(tx: Transaction, run: Run, state: RunState, reason: str = "") -> None:
    """End a run; its unfinished groups are rejected."""
    run.state = moved(run.state, state)
    run.reason = reason
    run.ended_at = tx.now
    tx.note("run", run_id=run.id, state=state, reason=reason)
    await retire(tx, run, reason=f"the run is {state}")
    await _end_unscored(tx, Rollout.run_id == run.id)


async def retire(tx: Transaction, run: Run, *, reason: str, purpose: str | None = None) -> None:
    """Reject every unfinished group of a run (of one purpose), without touching what was trained or evaluated."""
    unfinished = [Group.run_id == run.id, Group.state.in_(sources(GroupState.REJECTED))]
    # A closed group of an evaluation is finished: it waits for no learner.
    unfinished.append((Group.purpose == "train") | (Group.state == GroupState.OPEN))
    if purpose is not None:
        unfinished.append(Group.purpose == purpose)
    groups = (await tx.session.scalars(select(Group.id).where(*unfinished))).all()
    if not groups:
        return
    await tx.session.execute(
        update(Group)
        .where(*unfinished)
        .values(state=GroupState.REJECTED, reason=reason, disposed_at=tx.now)
        .execution_options(synchronize_session="fetch")
    )
    await _cancel_waiting(tx, Rollout.group_id.in_(groups))


async def _cancel_waiting(tx: Transaction, which: ColumnElement[bool]) -> None:
    """End the planned and queued rollouts among ``which``; their sessions were never opened."""
    waiting = select(Rollout.id).where(which, Rollout.state.in_(WAITING))
    await _end_attempts(tx, waiting, tx.now)
    result = await tx.session.execute(
        update(Rollout)
        .where(which, Rollout.state.in_(WAITING))
        .values(state=RolloutState.ENDED, outcome=Outcome.CANCELLED, ended_at=tx.now)
        .execution_options(synchronize_session="fetch")
    )
    if isinstance(result, CursorResult) and result.rowcount:
        tx.note("rollouts", cancelled=result.rowcount)


async def _end_unscored(tx: Transaction, which: ColumnElement[bool]) -> None:
    """Give those of ``which`` that wait for a score their attempt's outcome: nobody asks a verifier for it any more."""
    last = (Attempt.rollout_id == Rollout.id) & (Attempt.number == Rollout.attempt)
    await tx.session.execute(
        update(Rollout)
        .where(which, Rollout.state == RolloutState.ARCHIVED, Rollout.outcome.is_(None))
        .values(outcome=select(Attempt.outcome).where(last).scalar_subquery(), ended_at=tx.now)
        .execution_options(synchronize_session="fetch")
    )


async def _end_attempts(tx: Transaction, rollouts: object, now: datetime) -> None:
    await tx.session.execute(
        update(Attempt)
        .where(Attempt.rollout_id.in_(rollouts), Attempt.ended_at.is_(None))  # type: ignore[arg-type]
        .values(outcome=Outcome.CANCELLED, ended_at=now, released_at=now)
        .execution_options(synchronize_session="fetch")
    )


async def _check_signal(tx: Transaction, run: Run) -> None:
    """End the training of a run that has learnt what there was; fail one whose last groups taught nothing otherwise."""
    file = RunFile.model_validate(run.file)
    if file.train is not None and run.step >= file.train.steps:
        return  # training is over, and this is a group that was under way
    several = 4 * file.train.groups_per_step if file.train else 0
    enough = max(HOPELESS_GROUPS, several)
    last = (
        await tx.session.execute(
            select(Group.id, Group.state)
            .where(Group.run_id == run.id, Group.purpose == "train", Group.disposed_at.is_not(None))
            .order_by(Group.disposed_at.desc(), Group.id.desc())
            .limit(enough)
        )
    ).all()
    mastered = max(MASTERED_GROUPS, several)
    learning = file.train is not None and run.step > 0
    if learning and await _solved_whole(tx, run, last[:mastered], mastered):
        _stop_training(tx, run, f"every rollout of the last {mastered} groups was right")
        return
    states = [state for _, state in last]
    if len(states) < enough or GroupState.TRAINED in states:
        return
    skipped = states.count(GroupState.SKIPPED)
    if skipped < enough:
        reason = f"no group could be trained: of the last {enough}, {skipped} were skipped and {enough - skipped} rejected"
        await end_run(tx, run, RunState.FAILED, reason)
        return
    reason = f"in each of the last {enough} groups all rollouts had the same reward"
    if learning:
        _stop_training(tx, run, reason)
        return
    advice = "so there is nothing to learn; choose tasks that the policy solves sometimes, or a larger group_size"
    await end_run(tx, run, RunState.FAILED, f"no variance: {reason}, {advice}")


def _stop_training(tx: Transaction, run: Run, reason: str) -> None:
    """As if the user had asked for no more steps than were made; what was learnt is evaluated and kept."""
    steps = run.file["train"]["steps"]
    run.file = {**run.file, "train": {**run.file["train"], "steps": run.step}}
    run.reason = f"{reason}: training ended at step {run.step} of {steps}"
    tx.note("run", run_id=run.id, reason=run.reason)


async def _solved_whole(tx: Transaction, run: Run, groups: Sequence[Row[str, GroupState]], enough: int) -> bool:
    """Whether each of ``groups``, at least ``enough``, was skipped since every rollout was solved, and no task is failed whole.

    A task that a harness failed whole sits a pass out, so that its group is seldom among the last.
    """
    if len(groups) < enough or any(state is not GroupState.SKIPPED for _, state in groups):
        return False
    by_turn = (
        select(
            Group.id,
            Group.state,
            func.row_number()
            .over(
                partition_by=(Group.harness, Group.profile, Group.task_digest),
                order_by=(Group.disposed_at.desc(), Group.id.desc()),
            )
            .label("back"),
        )
        .where(Group.run_id == run.id, Group.purpose == "train", Group.disposed_at.is_not(None))
        .subquery()
    )
    latest = select(by_turn.c.id).where(by_turn.c.back == 1, by_turn.c.state == GroupState.SKIPPED)
    unsolved = select(Rollout.id).where(
        Rollout.group_id.in_([group for group, _ in groups]) | Rollout.group_id.in_(latest),
        Rollout.state == RolloutState.SCORED,
        func.coalesce(Rollout.score, 0.0) < 1,
    )
    return await tx.session.scalar(unsolved.limit(1)) is None
