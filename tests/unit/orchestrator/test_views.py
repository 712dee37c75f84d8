"""The views answer known questions on a ledger whose rows are known."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from evener.errors import Outcome
from evener_orchestrator.interval import wilson
from evener_orchestrator.ledger.models import Attempt, Group, Rollout, Run, Step, Task
from evener_orchestrator.states import GroupState, RolloutState, RunState
from evener_orchestrator.views import VIEWS

NOW = datetime(2026, 1, 1, tzinfo=UTC)

GROUPS = [
    # id, task, harness, purpose, version, scores (None: a fault of ours)
    ("e1", "sha256:a", "pi", "eval", 1, [1.0, 0.0, 0.5, None]),
    ("e2", "sha256:b", "pi", "eval", 1, [1.0, 1.0]),
    ("e3", "sha256:a", "codex", "eval", 1, [0.0, 0.0]),
    ("e4", "sha256:a", "pi", "eval", 7, [1.0, 1.0]),
    ("t1", "sha256:a", "pi", "train", None, [1.0, 0.0]),
]


@pytest.fixture
async def ledger(ledgers):
    await ledgers[0].write(seed)
    return ledgers[0]


async def seed(tx):
    tx.session.add(
        Run(id="r", name="first-run", kind="train", state=RunState.DONE, policy="p", file={}, trusted=True, created_at=NOW)
    )
    for digest, family in (("sha256:a", "files"), ("sha256:b", "flags")):
        tx.session.add(
            Task(digest=digest, task_id=digest[-1], family=family, agent_bundle="x", grader_bundle="y", created_at=NOW)
        )
    await tx.session.flush()
    for number, (group, task, harness, purpose, version, scores) in enumerate(GROUPS):
        tx.session.add(
            Group(
                id=group,
                run_id="r",
                task_digest=task,
                harness=harness,
                profile="default",
                purpose=purpose,
                version=version,
                number=number,
                size=len(scores),
                state=GroupState.TRAINED if purpose == "train" else GroupState.CLOSED,
                step=1 if purpose == "train" else None,
                staleness=1 if purpose == "train" else None,
                created_at=NOW,
            )
        )
        await tx.session.flush()
        for place, score in enumerate(scores):
            tx.session.add(a_rollout(group, place, score))
            await tx.session.flush()
            tx.session.add(Attempt(id=f"{group}-{place}.1", rollout_id=f"{group}-{place}", number=1, created_at=NOW))
    tx.session.add(
        Step(run_id="r", step=1, epoch=1, version=4, groups=1, metrics={}, staleness_max=1, seconds=2.0, created_at=NOW)
    )


def a_rollout(group, place, score):
    graded = score is not None
    return Rollout(
        id=f"{group}-{place}",
        run_id="r",
        group_id=group,
        number=place,
        attempt=1,
        state=RolloutState.SCORED if graded else RolloutState.ENDED,
        outcome=Outcome.FINISHED if graded else Outcome.INFRA_ERROR,
        cause=None if graded else "lease_expired",
        score=score,
        reward=score,
        version_min=3 if group == "t1" else None,
        created_at=NOW,
    )


async def ask(ledger, sql):
    async with ledger.read() as session:
        return [tuple(row) for row in await session.execute(text(sql))]


async def test_harness_matrix_counts_by_purpose_version_and_harness(ledger):
    rows = await ask(
        ledger,
        "SELECT run, purpose, version, harness, n, solved, pass_at_1, low, high FROM harness_matrix"
        " ORDER BY purpose, version, harness",
    )
    expected = [
        ("eval", 1, "codex", 2, 0),
        ("eval", 1, "pi", 5, 3),
        ("eval", 7, "pi", 2, 2),
        ("train", 3, "pi", 2, 1),
    ]
    assert [(row[1], row[2], row[3], row[4], row[5]) for row in rows] == expected
    for run, _, _, _, n, solved, rate, low, high in rows:
        assert run == "first-run"
        assert float(rate) == pytest.approx(solved / n)
        assert (float(low), float(high)) == pytest.approx(wilson(solved, n))


async def test_family_matrix_parts_the_families(ledger):
    sql = "SELECT family, n, solved FROM family_matrix WHERE version = 1 AND harness = 'pi' ORDER BY family"
    assert await ask(ledger, sql) == [("files", 3, 1), ("flags", 2, 2)]


async def test_the_other_views_answer(ledger):
    failures = await ask(ledger, "SELECT harness, outcome, cause, rollouts, latest_rollout FROM failures")
    assert failures == [("pi", "infra_error", "lease_expired", 1, "e1-3")]
    (signal,) = await ask(ledger, "SELECT group_id, scored, reward_mean, reward_range FROM group_signal")
    assert signal == ("t1", 2, 0.5, 1.0)
    (curve,) = await ask(ledger, "SELECT step, version, rollouts, reward FROM reward_curve")
    assert curve == (1, 4, 2, 0.5)
    assert await ask(ledger, "SELECT step, staleness_max FROM staleness") == [(1, 1)]
    assert await ask(ledger, "SELECT count(*) FROM trajectories") == [(12,)]
    for view in VIEWS:
        await ask(ledger, f"SELECT * FROM {view}")
