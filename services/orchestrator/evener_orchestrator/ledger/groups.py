"""A group closes when each of its rollouts has its last outcome, and is trained whole or not at all.

``close_complete`` ends each transaction in which a rollout got its outcome; ``claim`` hands a closed group to the learner.
"""

from collections.abc import Sequence as Many

import msgspec
import numpy as np
from sqlalchemy import func, select

from evener.api import GroupOrder, Provenance, TrainedRollout, TrainedSequence
from evener.errors import Outcome
from evener.ids import new_id
from evener.messages import TrainGroup
from evener.runfile import Harness, RunFile
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.endings import dispose
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.locks import lock_group
from evener_orchestrator.ledger.models import Attempt, Group, PolicyVersion, Rollout, Run, Runs, Sequence, Task
from evener_orchestrator.states import GroupState, RolloutState, RunState, VersionState, moved

SMALLEST_GROUP = 2
"""An advantage is relative to the group: one rollout alone has none."""


def plan(
    tx: Transaction, run: Run, *, task: str, harness: Harness, purpose: str, number: int, size: int, version: int | None
) -> Group:
    """Write a new group with its planned rollouts."""
    group = Group(
        id=new_id(),
        run_id=run.id,
        task_digest=task,
        harness=harness.name,
        profile=harness.profile,
        purpose=purpose,
        version=version,
        number=number,
        size=size,
        state=GroupState.OPEN,
        created_at=tx.now,
    )
    tx.session.add(group)
    tx.session.add_all(
        Rollout(id=new_id(), run_id=run.id, group_id=group.id, number=place, state=RolloutState.PLANNED, created_at=tx.now)
        for place in range(size)
    )
    return group


async def close_complete(tx: Transaction, of: Many[tuple[Run, Group]]) -> None:
    """Close those open groups whose rollouts all have their outcome."""
    found = {group.id: (run, group) for run, group in of if group.state is GroupState.OPEN}
    if not found:
        return
    scored = func.count().filter(Rollout.state == RolloutState.SCORED)
    complete = await tx.session.execute(
        select(Rollout.group_id, scored)
        .where(Rollout.group_id.in_(found))
        .group_by(Rollout.group_id)
        .having(func.count().filter(Rollout.outcome.is_(None)) == 0)
    )
    for group_id, number in complete.all():
        await _close(tx, *found[group_id], scored=number)


async def _close(tx: Transaction, run: Run, group: Group, *, scored: int) -> None:
    """Close a group; a training group goes to the learner."""
    if group.state is not GroupState.OPEN:
        return  # the one before it ended the run
    if group.purpose == "train" and scored < SMALLEST_GROUP:
        await dispose(tx, run, group, GroupState.REJECTED, "fewer than two rollouts were scored")
        return
    group.state = moved(group.state, GroupState.CLOSED)
    group.closed_at = tx.now
    tx.note("group", run_id=run.id, group_id=group.id, state=group.state)
    if group.purpose == "train":
        issue(tx, run, group)


def issue(tx: Transaction, run: Run, group: Group) -> None:
    """Ask the learner to train a closed group."""
    group.issued_at = tx.now
    tx.send(TrainGroup(run_id=run.id, policy=run.policy, group_id=group.id))


async def claim(tx: Transaction, group_id: str, *, epoch: int) -> GroupOrder | str:
    """Hand a closed group to the learner of ``epoch``; a text where it was rejected just now, for that reason.

    Raises Conflict where the epoch is old or the group was disposed of.
    """
    run, group = await lock_group(tx, group_id)
    if epoch != run.epoch:
        raise Conflict(f"epoch {epoch} is not the learner's: the ledger is at {run.epoch}")
    if run.state not in (RunState.RUNNING, RunState.PAUSED):
        raise Conflict(f"the run is {run.state}")
    if group.state not in (GroupState.CLOSED, GroupState.TRAINING):
        raise Conflict(f"group {group_id} is {group.state}")
    sequences = await _sequences(tx, group_id)
    if lost := await _lost_versions(tx, run, sequences):
        await dispose(tx, run, group, GroupState.REJECTED, "lost_version")
        return f"group {group_id} holds tokens of version {lost}, which died with its learner"
    if group.state is GroupState.CLOSED:
        group.state = moved(group.state, GroupState.TRAINING)
    return await _order(tx, run, group, sequences)


async def _sequences(tx: Transaction, group_id: str) -> dict[str, list[Sequence]]:
    """The sequences of a group's scored attempts, by rollout, in order."""
    rows = await tx.session.execute(
        select(Rollout.id, Sequence)
        .join(Attempt, (Attempt.rollout_id == Rollout.id) & (Attempt.number == Rollout.attempt))
        .join(Sequence, Sequence.attempt_id == Attempt.id)
        .where(Rollout.group_id == group_id, Rollout.state == RolloutState.SCORED)
        .order_by(Sequence.attempt_id, Sequence.number)
    )
    found: dict[str, list[Sequence]] = {}
    for rollout_id, sequence in rows:
        found.setdefault(rollout_id, []).append(sequence)
    return found


async def _lost_versions(tx: Transaction, run: Run, sequences: dict[str, list[Sequence]]) -> int | None:
    lost = await tx.session.scalars(
        select(PolicyVersion.version).where(PolicyVersion.policy == run.policy, PolicyVersion.state == VersionState.LOST)
    )
    dead = set(lost)
    used = {version for rows in sequences.values() for row in rows for _, _, version in row.version_runs} if dead else set()
    return min(dead & used, default=None)


async def _order(tx: Transaction, run: Run, group: Group, sequences: dict[str, list[Sequence]]) -> GroupOrder:
    rollouts = await tx.session.scalars(
        select(Rollout).where(Rollout.group_id == group.id, Rollout.state == RolloutState.SCORED).order_by(Rollout.number)
    )
    return GroupOrder(
        group_id=group.id,
        run_id=run.id,
        task_id=(await tx.session.get_one(Task, group.task_digest)).task_id,
        harness=group.harness,
        temperature=RunFile.model_validate(run.file).rollouts.temperature,
        rollouts=[
            TrainedRollout(
                rollout_id=rollout.id,
                outcome=rollout.outcome or Outcome.FINISHED,
                score=rollout.score or 0.0,
                reward=rollout.reward or 0.0,
                sequences=[trained(row) for row in sequences.get(rollout.id, [])],
            )
            for rollout in rollouts
        ],
    )


def trained(row: Sequence) -> TrainedSequence:
    """A stored sequence as four arrays of equal length."""
    mask, versions = spread(row.mask_runs, row.version_runs, len(row.token_ids))
    return TrainedSequence(
        sequence_id=row.id,
        ids=row.token_ids.tobytes(),
        mask=mask.tobytes(),
        logprobs=row.logprobs.tobytes(),
        versions=versions.tobytes(),
        digest=row.digest,
        provenance=None if row.provenance is None else msgspec.convert(row.provenance, Provenance),
    )


def spread(mask_runs: Many[Many[int]], version_runs: Runs, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The loss mask (uint8) and the versions (int32; 0 where the mask is 0) of ``length`` tokens."""
    mask = np.zeros(length, dtype=np.uint8)
    versions = np.zeros(length, dtype="<i4")
    for start, end in mask_runs:
        mask[start:end] = 1
    for start, end, version in version_runs:
        versions[start:end] = version
    return mask, versions
