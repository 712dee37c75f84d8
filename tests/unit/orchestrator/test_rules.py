"""Small rules: rewards, intervals, schedule, states, evaluations due, runs of equal values, columns."""

import asyncio
import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import Outcome
from evener.runfile import Harness, RunFile
from evener_orchestrator import states
from evener_orchestrator.archive import runs_of
from evener_orchestrator.evaluation import wanted
from evener_orchestrator.interval import wilson
from evener_orchestrator.ledger import Ledger
from evener_orchestrator.ledger.groups import spread
from evener_orchestrator.ledger.migrate import migrate
from evener_orchestrator.ledger.progress import expected_groups
from evener_orchestrator.reward import reward
from evener_orchestrator.schedule import pick_harness, pick_task, turns_of
from evener_orchestrator.states import GroupState, IllegalTransition, RolloutState, moved, sources
from tests.unit.orchestrator.world import run_file


@pytest.mark.parametrize(
    ("score", "outcome", "calls", "expected"),
    [
        (1.0, Outcome.FINISHED, 1, 1.1),
        (1.0, Outcome.FINISHED, 6, 1.05),
        (1.0, Outcome.FINISHED, 11, 1.0),
        (1.0, Outcome.FINISHED, 99, 1.0),
        (0.5, Outcome.FINISHED, 1, 0.5),
        (1.0, Outcome.BUDGET, 1, 0.0),
        (1.0, Outcome.AGENT_ERROR, 1, 0.0),
    ],
)
def test_the_bonus_is_for_few_calls_on_solved_and_finished_tasks(score, outcome, calls, expected):
    assert reward(score=score, outcome=outcome, calls=calls, budget_calls=11, brevity=0.1) == pytest.approx(expected)


def test_a_budget_of_one_call_earns_the_whole_bonus():
    assert reward(score=1.0, outcome=Outcome.FINISHED, calls=1, budget_calls=1, brevity=0.1) == pytest.approx(1.1)


def test_wilson_has_the_textbook_values():
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 5) == pytest.approx((0.0, 0.4345), abs=1e-4)
    assert wilson(5, 5)[1] == pytest.approx(1.0)


@given(seed=st.integers(0, 99), tasks=st.integers(1, 9), passes=st.integers(1, 4))
def test_a_pass_is_every_task_once(seed, tasks, passes):
    turns = [0] * tasks
    for done in range(passes):
        picked = []
        for _ in range(tasks):
            picked.append(pick_task(turns, seed=seed))
            turns[picked[-1]] += 1
        assert sorted(picked) == list(range(tasks))
        assert turns == [done + 1] * tasks


@given(seed=st.integers(0, 99), skipped=st.sets(st.integers(0, 8), min_size=1))
def test_a_task_whose_group_was_skipped_sits_the_next_pass_out(seed, skipped):
    turns = [2 if task in skipped else 1 for task in range(9)]
    picked = []
    for _ in range(2 * 9 - len(skipped)):
        picked.append(pick_task(turns, seed=seed))
        turns[picked[-1]] += 1
    assert set(picked[: 9 - len(skipped)]) == set(range(9)) - skipped
    assert sorted(picked[9 - len(skipped) :]) == list(range(9))


@pytest.mark.parametrize(
    ("groups", "skipped", "failed", "turns"),
    [(0, 0, 0, 0), (2, 0, 0, 2), (2, 1, 0, 3), (1, 1, 1, 0), (2, 2, 2, 2), (3, 3, 3, 4), (3, 2, 1, 3)],
)
def test_a_task_that_was_failed_whole_has_a_second_chance_in_the_same_pass(groups, skipped, failed, turns):
    assert turns_of(groups=groups, skipped=skipped, failed=failed) == turns


@given(seed=st.integers(0, 99), run=st.integers(1, 9), kinds=st.sampled_from([2, 4, 16]))
def test_neighbours_of_the_folder_are_spread_over_a_pass(seed, run, kinds):
    """Tasks of one kind lie side by side in the folder: each kind comes once before one comes again."""
    turns = [0] * (run * kinds)
    picked = []
    for _ in turns:
        picked.append(pick_task(turns, seed=seed))
        turns[picked[-1]] += 1
    for start in range(0, len(turns), kinds):
        assert sorted(task // run for task in picked[start : start + kinds]) == list(range(kinds))


def test_harnesses_share_by_weight():
    harnesses = [Harness(name="pi", weight=3), Harness(name="codex", weight=1)]
    picked = [pick_harness(number, seed=0, harnesses=harnesses).name for number in range(400)]
    assert picked.count("pi") == pytest.approx(300, abs=40)


def test_a_state_moves_only_along_the_table():
    assert moved(RolloutState.PLANNED, RolloutState.QUEUED) is RolloutState.QUEUED
    with pytest.raises(IllegalTransition):
        moved(RolloutState.SCORED, RolloutState.PLANNED)
    assert set(sources(GroupState.REJECTED)) == {GroupState.OPEN, GroupState.CLOSED, GroupState.TRAINING}


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (states.RunState, states.RUN),
        (GroupState, states.GROUP),
        (RolloutState, states.ROLLOUT),
        (states.VersionState, states.VERSION),
    ],
)
def test_the_table_knows_every_state_and_lets_nothing_else_happen(kind, table):
    assert set(table) == set(kind)
    for before in kind:
        for after in kind:
            if after in table[before]:
                assert moved(before, after) is after
                assert before in sources(after)
            else:
                with pytest.raises(IllegalTransition, match=f"{before} -> {after}"):
                    moved(before, after)
                assert before not in sources(after)


def test_no_state_is_assigned_past_the_table():
    """In the whole service a state of a row that exists is set by `moved` or by a bulk update."""
    package = Path(states.__file__).parent
    assignments = [
        (path.name, line.strip())
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r"\s+[\w.]+\.state = ", line)
    ]
    assert assignments
    assert [each for each in assignments if " = moved(" not in each[1]] == []


@pytest.mark.parametrize(
    ("evaluated", "published", "recorded", "due"),
    [
        (-1, 0, 0, True),
        (0, 1, 1, False),
        (0, 10, 10, True),
        (0, 11, 11, True),
        (11, 19, 19, False),
        (11, 20, 20, True),
        (20, 25, 24, False),
        (20, 25, 25, True),
        (25, 25, 25, False),
    ],
)
def test_evaluations_are_due_before_between_and_after(evaluated, published, recorded, due):
    file = RunFile.model_validate(run_file(train={"steps": 25}, eval={"tasks": "x", "every": 10}))
    assert wanted(file, evaluated=evaluated, published=published, recorded=recorded) is due


@given(st.lists(st.integers(0, 2)))
def test_runs_spread_back_to_what_they_were(values):
    array = np.array(values, np.int32)
    runs = runs_of(array)
    masked = [[start, end] for start, end, value in runs if value]
    mask, versions = spread(masked, runs, len(values))
    assert versions.tolist() == values
    assert mask.tolist() == [int(value > 0) for value in values]


async def test_a_writer_waits_for_another_process_without_blocking(tmp_path):
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    await migrate(ledger)
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async def now(tx):
        return tx.now

    writing = asyncio.create_task(ledger.write(now))
    await asyncio.sleep(0.3)
    assert not writing.done()
    other.execute("COMMIT")
    async with asyncio.timeout(5):
        assert (await writing).tzinfo is not None
    other.close()
    await ledger.close()


@pytest.mark.parametrize(
    ("trained", "skipped", "rejected", "groups"),
    [(0, 0, 0, 72), (0, 80, 0, 80), (8, 0, 0, 72), (36, 36, 0, 144), (36, 6, 3, 90), (72, 30, 0, 102)],
)
def test_groups_that_were_skipped_are_expected_to_be_skipped_again(trained, skipped, rejected, groups):
    counts = {"open": 2, "trained": trained, "skipped": skipped, "rejected": rejected}
    assert expected_groups(72, counts) == groups
