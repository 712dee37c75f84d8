"""What a screen shows of a run, in a handful of statements. Called by the API."""

import math
from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from evener.errors import Outcome
from evener.runfile import RunFile
from evener_orchestrator.interval import wilson
from evener_orchestrator.ledger.models import Attempt, Group, Rollout, Run, RunTask, Task
from evener_orchestrator.ledger.versions import latest
from evener_orchestrator.states import GroupState, RolloutState, RunState


def summary(run: Run) -> dict[str, Any]:
    """A run in one line of a listing."""
    file = RunFile.model_validate(run.file)
    return {
        "run_id": run.id,
        "name": run.name,
        "kind": run.kind,
        "policy": run.policy,
        "state": run.state,
        "phase": _phase(run, file),
        "step": run.step,
        "steps": file.train.steps if file.train else 0,
        "reason": run.reason,
        "prompt": run.prompt_mode,
        "prompt_reason": run.prompt_reason,
        "started": run.created_at.timestamp(),
        "ended": run.ended_at.timestamp() if run.ended_at else None,
    }


async def progress(session: AsyncSession, run: Run) -> dict[str, Any]:
    """Everything that is counted about a run."""
    stale = await session.execute(select(func.avg(Group.staleness), func.max(Group.staleness)).where(Group.run_id == run.id))
    mean, greatest = stale.one()
    version = await latest(session, run.policy)
    file = RunFile.model_validate(run.file)
    groups = await _groups(session, run)
    return summary(run) | {
        "harnesses": [harness.name for harness in file.harness],
        "sandboxes": await _sandboxes(session, run),
        "expected": await _expected(session, run, file, groups["train"]),
        "version": version.version,
        "weights": version.weights,
        "evaluating": run.evaluating,
        "rollouts": await _rollouts(session, run),
        "groups": groups,
        "pass1": await _pass1(session, run),
        "staleness": {"mean": None if mean is None else float(mean), "max": greatest},
        "sampled_tokens": await session.scalar(
            select(func.coalesce(func.sum(Rollout.sampled_tokens), 0)).where(Rollout.run_id == run.id)
        ),
        "file": run.file,
    }


def _phase(run: Run, file: RunFile) -> str:
    if run.state not in (RunState.RUNNING, RunState.PAUSED):
        return run.state
    if run.evaluating is not None or (run.evaluated_step < 0 and (file.eval or not file.train)):
        return "eval"
    return "train"


async def _sandboxes(session: AsyncSession, run: Run) -> list[str]:
    rows = await session.scalars(
        select(Attempt.sandbox)
        .join(Rollout, Rollout.id == Attempt.rollout_id)
        .where(Rollout.run_id == run.id, Attempt.sandbox != "")
        .distinct()
    )
    return sorted(rows)


async def _expected(session: AsyncSession, run: Run, file: RunFile, groups: dict[str, int]) -> int:
    """How many rollouts the whole run is thought to take: evaluations, and groups of which as many are trained as so far."""
    rows = await session.execute(
        select(RunTask.purpose, func.count()).where(RunTask.run_id == run.id).group_by(RunTask.purpose)
    )
    tasks = dict(rows.all())
    if file.train is None:
        return tasks.get("eval", 0) * len(file.harness) * file.rollouts.group_size
    expected = expected_groups(file.train.steps * file.train.groups_per_step, groups) * file.rollouts.group_size
    if file.eval is not None:
        between = (file.train.steps - 1) // file.eval.every if file.eval.every else 0
        expected += (2 + between) * tasks.get("eval", 0) * len(file.harness) * file.eval.group_size
    return expected


def expected_groups(wanted: int, groups: dict[str, int]) -> int:
    """Groups that are made until ``wanted`` are trained: a group without signal is skipped, and one more is made for it."""
    trained = groups[GroupState.TRAINED]
    disposed = trained + groups[GroupState.SKIPPED] + groups[GroupState.REJECTED]
    if not trained:
        return max(wanted, disposed)
    return disposed + math.ceil((wanted - trained) * disposed / trained)


async def _rollouts(session: AsyncSession, run: Run) -> dict[str, Any]:
    rows = await session.execute(
        select(Rollout.state, Rollout.outcome, func.count())
        .where(Rollout.run_id == run.id)
        .group_by(Rollout.state, Rollout.outcome)
    )
    counts: dict[str, int] = dict.fromkeys(("planned", "queued", "running", "scoring", "done"), 0)
    outcomes = dict.fromkeys((str(outcome) for outcome in Outcome), 0)
    for state, outcome, number in rows:
        if outcome is not None:
            counts["done"] += number
            outcomes[outcome] += number
        else:
            counts["scoring" if state in (RolloutState.ARCHIVED, RolloutState.ENDED) else state] += number
    return counts | {"total": sum(counts.values()), "outcomes": outcomes}


async def _groups(session: AsyncSession, run: Run) -> dict[str, dict[str, int]]:
    rows = await session.execute(
        select(Group.purpose, Group.state, func.count()).where(Group.run_id == run.id).group_by(Group.purpose, Group.state)
    )
    counts = {purpose: dict.fromkeys((str(state) for state in GroupState), 0) for purpose in ("train", "eval")}
    for purpose, state, number in rows:
        counts[purpose][state] = number
    return counts


async def _pass1(session: AsyncSession, run: Run) -> list[dict[str, Any]]:
    """Pass@1 by purpose, version and harness: over all families (``family`` null) and in each."""
    version = func.coalesce(Group.version, Rollout.version_min)
    rows = await session.execute(
        select(
            Group.purpose, version, Group.harness, Task.family, func.count(), func.sum(case((Rollout.score >= 1, 1), else_=0))
        )
        .join(Group, Group.id == Rollout.group_id)
        .join(Task, Task.digest == Group.task_digest)
        .where(Rollout.run_id == run.id, Rollout.state == RolloutState.SCORED)
        .group_by(Group.purpose, version, Group.harness, Task.family)
    )
    cells: dict[tuple[str, int, str | None, str | None], list[int]] = {}
    for purpose, at, harness, family, n, solved in rows:
        for key in ((purpose, at or 0, None, None), (purpose, at or 0, None, family), (purpose, at or 0, harness, None)):
            cell = cells.setdefault(key, [0, 0])
            cell[0] += n
            cell[1] += int(solved)
    return [
        _cell(key, n, solved)
        for key, (n, solved) in sorted(cells.items(), key=lambda item: tuple(str(part) for part in _order(item[0])))
    ]


def _order(key: tuple[str, int, str | None, str | None]) -> tuple[str, str, str, str]:
    purpose, version, harness, family = key
    return purpose, f"{version:09}", harness or "", family or ""


def _cell(key: tuple[str, int, str | None, str | None], n: int, solved: int) -> dict[str, Any]:
    purpose, version, harness, family = key
    low, high = wilson(solved, n)
    return {
        "purpose": purpose,
        "version": version,
        "harness": harness,
        "family": family,
        "n": n,
        "solved": solved,
        "pass1": solved / n,
        "low": low,
        "high": high,
    }
