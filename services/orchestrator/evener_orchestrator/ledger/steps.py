"""A step marks the whole groups it trained in the transaction that records it; a group that no step holds says why.

What an older epoch says is refused. Called by the consumer.
"""

from sqlalchemy import func, select

from evener.messages import GroupClosed, StepFinished
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.endings import dispose
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.locks import lock_group, lock_run
from evener_orchestrator.ledger.models import Group, PolicyVersion, Rollout, Run, Step
from evener_orchestrator.ledger.versions import check_epoch, serve
from evener_orchestrator.states import GroupState, RolloutState, VersionState, moved


async def finished(tx: Transaction, message: StepFinished) -> None:
    """Record a step. Raises Conflict where the epoch is old."""
    run = await lock_run(tx, message.run_id)
    check_epoch(run, message.epoch)
    if await tx.session.get(Step, (run.id, message.step)) is not None:
        return  # said before
    if message.weights is not None:
        # A step whose version is not published could never be gone on from: the next learner would find it lost.
        await serve(tx, run, message.version, epoch=message.epoch, step=message.step, weights=message.weights)
    oldest = await _oldest_versions(tx, message.groups)
    learner = await _version_before(tx, run.policy, message.version)
    groups = (await tx.session.scalars(select(Group).where(Group.id.in_(message.groups), Group.run_id == run.id))).all()
    for group in groups:
        if group.state is not GroupState.TRAINING:
            continue
        group.state = moved(group.state, GroupState.TRAINED)
        group.step = message.step
        group.disposed_at = tx.now
        if group.id in oldest:
            group.staleness = max(0, learner - oldest[group.id])
    stale = [group.staleness for group in groups if group.staleness is not None]
    tx.session.add(
        Step(
            run_id=run.id,
            step=message.step,
            epoch=message.epoch,
            version=message.version,
            groups=len(groups),
            metrics=message.metrics,
            staleness_mean=sum(stale) / len(stale) if stale else None,
            staleness_max=max(stale, default=None),
            checkpoint=message.checkpoint,
            seconds=message.seconds,
            created_at=tx.now,
        )
    )
    run.step = await _last_without_gap(tx, run, message.step)
    tx.note("step", run_id=run.id, step=message.step, version=message.version, metrics=message.metrics)


async def _last_without_gap(tx: Transaction, run: Run, recorded: int) -> int:
    """The step up to which every one is recorded, now that ``recorded`` is.

    A later step whose predecessor's word is on its way is not gone on from: the run would end, or a learner go back to its
    checkpoint, while the predecessor's groups count as untrained.
    """
    later = await tx.session.scalars(select(Step.step).where(Step.run_id == run.id, Step.step > run.step))
    known, last = {*later, recorded}, run.step
    while last + 1 in known:
        last += 1
    return last


async def group_closed(tx: Transaction, message: GroupClosed) -> None:
    """Record that a group was skipped or rejected (``trained`` is its step's to say).

    Raises Conflict where the epoch is old or the learner does not hold the group.
    """
    run, group = await lock_group(tx, message.group_id)
    check_epoch(run, message.epoch)
    if message.disposition == "trained":
        return
    state = GroupState(message.disposition)
    if group.state is state:
        return  # said before
    if group.state is not GroupState.TRAINING:
        raise Conflict(f"group {group.id} is {group.state}")
    await dispose(tx, run, group, state, message.reason)


async def _oldest_versions(tx: Transaction, groups: list[str]) -> dict[str, int]:
    rows = await tx.session.execute(
        select(Rollout.group_id, func.min(Rollout.version_min))
        .where(Rollout.group_id.in_(groups), Rollout.state == RolloutState.SCORED, Rollout.version_min.is_not(None))
        .group_by(Rollout.group_id)
    )
    return {group: oldest for group, oldest in rows if oldest is not None}


async def _version_before(tx: Transaction, policy: str, version: int) -> int:
    """The version the learner had while it made ``version``."""
    before = await tx.session.scalar(
        select(func.max(PolicyVersion.version)).where(
            PolicyVersion.policy == policy, PolicyVersion.version < version, PolicyVersion.state != VersionState.LOST
        )
    )
    return before or version
