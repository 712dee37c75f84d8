"""Rows for tests of the ledger, with everything given that no default covers."""

from datetime import UTC, datetime, timedelta
from hashlib import sha256

from evener_orchestrator.ledger.models import Attempt, Group, Rollout, Run, Score, Task
from evener_orchestrator.states import GroupState, RolloutState, RunState
from tests.unit.orchestrator.world import run_file

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def a_run(name="r", **changes):
    given = {"id": name, "name": name, "kind": "train", "state": RunState.RUNNING, "policy": name, "file": run_file()}
    return Run(**given | {"trusted": True, "created_at": NOW} | changes)


def a_task(digest="sha256:a", **changes):
    given = {"digest": digest, "task_id": digest[-1], "family": "files", "agent_bundle": "x", "grader_bundle": "y"}
    return Task(**given | {"created_at": NOW} | changes)


def a_group(group, run="r", **changes):
    given = {"id": group, "run_id": run, "task_digest": "sha256:a", "harness": "pi", "profile": "default", "purpose": "train"}
    return Group(**given | {"number": 0, "size": 2, "state": GroupState.OPEN, "created_at": NOW} | changes)


def a_rollout(rollout, group, run="r", **changes):
    given = {"id": rollout, "run_id": run, "group_id": group, "number": 0, "attempt": 1, "state": RolloutState.QUEUED}
    return Rollout(**given | {"issued_at": NOW, "created_at": NOW} | changes)


def an_attempt(rollout, number=1, **changes):
    return Attempt(**{"id": f"{rollout}.{number}", "rollout_id": rollout, "number": number, "created_at": NOW} | changes)


def a_score(rollout, score, number=1, **changes):
    given = {"attempt_id": f"{rollout}.{number}", "rollout_id": rollout, "score": score, "scores": {"reward": score}}
    return Score(**given | {"evidence": {}, "seconds": 1.0, "created_at": NOW} | changes)


async def write(ledger, *layers):
    """Write rows; each list is flushed before the next, which may refer to it."""

    async def work(tx):
        for layer in layers:
            tx.session.add_all(layer)
            await tx.session.flush()

    await ledger.write(work)


async def a_claimed_run(ledger, *, groups=4, name="r", lease="x"):
    """A run whose every rollout (two a group) is running under a lease that has lapsed."""
    names = [f"{name}g{number}" for number in range(groups)]
    rollouts = [(f"{group}-{place}", group) for group in names for place in range(2)]
    lapsed = {
        "runner": "gone",
        "lease_hash": sha256(lease.encode()).hexdigest(),
        "lease_expires_at": NOW + timedelta(seconds=1),
    }
    await write(
        ledger,
        [a_run(name)],
        [a_group(group, name, number=number) for number, group in enumerate(names)],
        [a_rollout(rollout, group, name, state=RolloutState.RUNNING) for rollout, group in rollouts],
        [an_attempt(rollout, **lapsed) for rollout, _ in rollouts],
    )
    return [rollout for rollout, _ in rollouts]
