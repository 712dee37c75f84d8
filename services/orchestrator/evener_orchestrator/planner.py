"""A run moves on only here: evaluations first, then as many training groups as the learner can still use in time.

Credit: at most (max_staleness + 1) steps' worth of training groups are open, closed or in training, so that what is sampled now
is trained within the bound; it comes back when a group is trained, skipped or rejected. Called after every change and
every second.
"""

from sqlalchemy import exists, func, select

from evener.runfile import RunFile, Train
from evener_orchestrator import evaluation
from evener_orchestrator.ledger import groups
from evener_orchestrator.ledger.attempts import queue
from evener_orchestrator.ledger.endings import end_run, retire
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.locks import lock_run, take_turn
from evener_orchestrator.ledger.models import Group, Rollout, Run, RunTask
from evener_orchestrator.ledger.runs import UNKNOWN
from evener_orchestrator.ledger.versions import latest
from evener_orchestrator.schedule import pick_harness, pick_task, turns_of
from evener_orchestrator.states import GroupState, RolloutState, RunState

BUSY = (RolloutState.QUEUED, RolloutState.RUNNING)
IN_FLIGHT = (GroupState.OPEN, GroupState.CLOSED, GroupState.TRAINING)


async def advance(tx: Transaction, run_id: str) -> None:
    """Plan and dispatch what a run is ready for, or end it; nothing where another orchestrator is about it.

    The other sees what we would: it reads the run under its lock, which a change takes first.
    """
    if not await take_turn(tx, f"plan {run_id}"):
        return
    run = await lock_run(tx, run_id)
    if run.state is not RunState.RUNNING or run.prompt_mode == UNKNOWN:
        return
    file = RunFile.model_validate(run.file)
    if run.evaluating is not None and not await evaluation.running(tx.session, run):
        tx.note("evaluation", run_id=run.id, version=run.evaluating, over=True)
        run.evaluating = None
    if file.train is not None and run.step >= file.train.steps:
        await retire(tx, run, reason="the run needs no more groups", purpose="train")
    if run.evaluating is None:
        newest = await latest(tx.session, run.policy)
        if await evaluation.due(tx.session, run, newest):
            run.evaluating, run.evaluated_step = newest.version, newest.step
            await _plan_evaluation(tx, run, file)
        elif file.train is None or min(run.step, newest.step) >= file.train.steps:
            await _finish(tx, run)
            return
        elif run.step < file.train.steps:
            await _plan_training(tx, run, file, file.train)
    await _dispatch(tx, run, file)


async def _plan_evaluation(tx: Transaction, run: Run, file: RunFile) -> None:
    """One group for each task under each harness, at the pinned version."""
    size = file.eval.group_size if file.eval and file.train else file.rollouts.group_size
    number = await _count(tx, run, "eval")
    for task in await _tasks(tx, run, "eval"):
        for harness in file.harness:
            groups.plan(tx, run, task=task, harness=harness, purpose="eval", number=number, size=size, version=run.evaluating)
            number += 1
    tx.note("evaluation", run_id=run.id, version=run.evaluating, over=False)
    await tx.session.flush()


async def _plan_training(tx: Transaction, run: Run, file: RunFile, train: Train) -> None:
    """As many groups as credit and the remaining steps allow.

    One that is open still, although as many planned after it were trained as can be in flight, sampled what is too old by now:
    the last steps do not wait for it.
    """
    window = (train.max_staleness + 1) * train.groups_per_step
    counts = await tx.session.execute(
        select(
            func.count(),
            func.count().filter(Group.state.in_(IN_FLIGHT)),
            func.count().filter(Group.state == GroupState.TRAINED),
            func.coalesce(func.max(Group.number).filter(Group.state == GroupState.TRAINED), -1),
        ).where(Group.run_id == run.id, Group.purpose == "train")
    )
    planned, in_flight, trained, last_trained = counts.one()
    credit = window - in_flight
    needed = train.steps * train.groups_per_step - trained - in_flight
    if needed < credit:
        late = select(func.count()).where(
            Group.run_id == run.id,
            Group.purpose == "train",
            Group.state == GroupState.OPEN,
            Group.number <= last_trained - window,
        )
        needed += await tx.session.scalar(late) or 0
    if min(credit, needed) <= 0:
        return
    tasks = await _tasks(tx, run, "train")
    turns = await _turns(tx, run, tasks)
    for number in range(planned, planned + min(credit, needed)):
        harness = pick_harness(number, seed=train.seed, harnesses=file.harness)
        of_harness = turns.setdefault((harness.name, harness.profile), [0] * len(tasks))
        index = pick_task(of_harness, seed=train.seed)
        of_harness[index] += 1
        groups.plan(
            tx,
            run,
            task=tasks[index],
            harness=harness,
            purpose="train",
            number=number,
            size=file.rollouts.group_size,
            version=None,
        )
    await tx.session.flush()


async def _turns(tx: Transaction, run: Run, tasks: list[str]) -> dict[tuple[str, str], list[int]]:
    """By harness and profile: the turns that each task has had (see `evener_orchestrator.schedule`)."""
    skipped = Group.state == GroupState.SKIPPED
    solved = exists().where(Rollout.group_id == Group.id, Rollout.score > 0)
    rows = await tx.session.execute(
        select(
            Group.harness,
            Group.profile,
            Group.task_digest,
            func.count(),
            func.count().filter(skipped),
            func.count().filter(skipped, ~solved),
        )
        .where(Group.run_id == run.id, Group.purpose == "train")
        .group_by(Group.harness, Group.profile, Group.task_digest)
    )
    place = {task: index for index, task in enumerate(tasks)}
    turns: dict[tuple[str, str], list[int]] = {}
    for harness, profile, task, count, taught_nothing, failed in rows:
        of_harness = turns.setdefault((harness, profile), [0] * len(tasks))
        of_harness[place[task]] = turns_of(groups=count, skipped=taught_nothing, failed=failed)
    return turns


async def _dispatch(tx: Transaction, run: Run, file: RunFile) -> None:
    """Queue planned rollouts while fewer than ``concurrent`` are in flight: evaluations, then the oldest group first."""
    busy = await tx.session.scalar(select(func.count()).where(Rollout.run_id == run.id, Rollout.state.in_(BUSY)))
    free = file.rollouts.concurrent - (busy or 0)
    if free <= 0:
        return
    purpose = "train" if run.evaluating is None else "eval"
    rows = await tx.session.scalars(
        select(Rollout)
        .join(Group, Group.id == Rollout.group_id)
        .where(
            Rollout.run_id == run.id,
            Rollout.state == RolloutState.PLANNED,
            Group.purpose == purpose,
            func.coalesce(Rollout.not_before, Rollout.created_at) <= tx.now,
        )
        .order_by(Group.number, Rollout.number)
        .limit(free)
    )
    for rollout in rows:
        queue(tx, rollout, purpose)


async def _finish(tx: Transaction, run: Run) -> None:
    """Training and evaluations are over: the run is done when its last rollout has its outcome."""
    waiting = select(Rollout.id).where(Rollout.run_id == run.id, Rollout.outcome.is_(None))
    if await tx.session.scalar(waiting.limit(1)) is None:
        await end_run(tx, run, RunState.DONE, run.reason)


async def _tasks(tx: Transaction, run: Run, purpose: str) -> list[str]:
    rows = await tx.session.scalars(
        select(RunTask.task_digest).where(RunTask.run_id == run.id, RunTask.purpose == purpose).order_by(RunTask.position)
    )
    return list(rows)


async def _count(tx: Transaction, run: Run, purpose: str) -> int:
    found = await tx.session.scalar(select(func.count()).where(Group.run_id == run.id, Group.purpose == purpose))
    return found or 0
