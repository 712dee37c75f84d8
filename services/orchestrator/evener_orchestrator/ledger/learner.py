"""A policy has one learner while that one is heard of; the next gets a greater epoch and starts from the last checkpoint.

A learner is known by its name: one that was restarted under its name need not wait until its own lease ends.
Steps after the checkpoint died with the learner: their groups are closed again and re-issued, their versions and those that
were allotted but never published are lost. Called by the API.
"""

from datetime import timedelta

from sqlalchemy import delete, select, update

from evener.api import Heartbeat, LearnerLease
from evener.errors import InputError
from evener.runfile import RunFile
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.endings import dispose
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.groups import issue
from evener_orchestrator.ledger.locks import lock_policy
from evener_orchestrator.ledger.models import Group, PolicyVersion, Run, Step
from evener_orchestrator.ledger.versions import check_newest, latest
from evener_orchestrator.states import GroupState, RunState, VersionState, moved, sources


async def claim(tx: Transaction, policy: str, *, learner: str, lease_s: float) -> LearnerLease | None:
    """Make ``learner`` the one that may speak; None where no run trains the policy now.

    Raises Conflict while another learner holds the policy.
    """
    try:
        run = await lock_policy(tx, policy)
    except InputError:
        return None
    file = RunFile.model_validate(run.file)
    if file.train is None or run.state is not RunState.RUNNING:
        return None
    if run.step >= file.train.steps and (await latest(tx.session, policy)).step >= file.train.steps:
        return None
    if run.learner != learner and run.learner_expires_at is not None and run.learner_expires_at > tx.now:
        raise Conflict(f"learner {run.learner} holds policy {policy}")
    run.epoch += 1
    run.learner = learner
    run.learner_expires_at = tx.now + timedelta(seconds=lease_s)
    checkpoint = (
        await tx.session.scalars(
            select(Step)
            .where(Step.run_id == run.id, Step.step <= run.step, Step.checkpoint.is_not(None))
            .order_by(Step.step.desc())
            .limit(1)
        )
    ).one_or_none()
    await _go_back(tx, run, checkpoint.step if checkpoint else 0)
    version = await latest(tx.session, policy)
    tx.note("learner", run_id=run.id, policy=policy, learner=learner, epoch=run.epoch, step=run.step)
    return LearnerLease(
        policy=policy,
        epoch=run.epoch,
        lease_s=lease_s,
        run_id=run.id,
        step=run.step,
        version=version.version,
        weights=version.weights or "",
        checkpoint=checkpoint.checkpoint if checkpoint else None,
        group_size=file.rollouts.group_size,
        temperature=file.rollouts.temperature,
        train=file.train.model_dump(),
    )


async def heartbeat(tx: Transaction, policy: str, *, epoch: int, lease_s: float) -> Heartbeat:
    """Prolong the lease, also one that ran out but that nobody took. Raises Conflict where the epoch is old."""
    run = await lock_policy(tx, policy)
    check_newest(run, epoch)
    if run.state not in (RunState.RUNNING, RunState.PAUSED):
        return Heartbeat(lease_s=lease_s, action="cancel")
    run.learner_expires_at = tx.now + timedelta(seconds=lease_s)
    return Heartbeat(lease_s=lease_s)


async def release(tx: Transaction, policy: str, *, epoch: int, step: int) -> None:
    """End the lease of a learner that stops, so that the next need not wait. Raises Conflict where the epoch is old.

    Where ``step``, the last that it has reported, waits to be read, the lease ends by itself: a claim before that would
    have the step trained again.
    """
    run = await lock_policy(tx, policy)
    check_newest(run, epoch)
    if run.step >= step:
        run.learner_expires_at = None


async def _go_back(tx: Transaction, run: Run, step: int) -> None:
    """Undo what the checkpoint of ``step`` does not hold, and issue every closed group."""
    await tx.session.execute(
        update(PolicyVersion)
        .where(
            PolicyVersion.policy == run.policy,
            PolicyVersion.state.in_(sources(VersionState.LOST)),
            (PolicyVersion.state == VersionState.ALLOTTED) | (PolicyVersion.step > step),
        )
        .values(state=VersionState.LOST)
        .execution_options(synchronize_session="fetch")
    )
    await tx.session.execute(delete(Step).where(Step.run_id == run.id, Step.step > step))
    run.step = step
    run.evaluated_step = min(run.evaluated_step, step)
    held = await tx.session.scalars(
        select(Group)
        .where(
            Group.run_id == run.id,
            Group.purpose == "train",
            Group.state.in_((GroupState.CLOSED, GroupState.TRAINING)) | (Group.step > step),
        )
        .order_by(Group.number)
    )
    for group in held:
        if group.state is not GroupState.CLOSED:
            group.state = moved(group.state, GroupState.CLOSED)
        group.step = group.staleness = group.disposed_at = None
        issue(tx, run, group)
    await _drop_lost_evaluation(tx, run)


async def _drop_lost_evaluation(tx: Transaction, run: Run) -> None:
    """An evaluation of a lost version cannot end: no engine will serve it again."""
    if run.evaluating is None:
        return
    row = await tx.session.get_one(PolicyVersion, (run.policy, run.evaluating))
    if row.state is not VersionState.LOST:
        return
    unfinished = await tx.session.scalars(
        select(Group).where(Group.run_id == run.id, Group.version == run.evaluating, Group.state == GroupState.OPEN)
    )
    for group in unfinished.all():
        await dispose(tx, run, group, GroupState.REJECTED, "lost_version")
    run.evaluating = None
