"""Invariant 10: a step is whole groups, each at most once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener_learner.admission import Reason
from evener_learner.steps import Assembly
from tests.unit.learner.making import VOCABULARY, group, pair, rollout, sequence


def assembly(groups_per_step: int = 2, max_staleness: int = 1) -> Assembly:
    return Assembly(groups_per_step=groups_per_step, max_staleness=max_staleness, vocabulary=VOCABULARY, temperature=1.0)


def test_a_step_is_the_oldest_whole_groups() -> None:
    waiting = assembly()
    assert waiting.add(pair(name="a")) is None
    assert waiting.take(1) is None
    for name in "bc":
        assert waiting.add(pair(name=name)) is None
    step = waiting.take(1)
    assert step is not None
    assert [one.group_id for one in step.groups] == ["a", "b"]
    assert len(step.rows) == 4
    assert len(waiting) == 1


def test_a_stale_group_is_refused_when_the_step_is_assembled() -> None:
    waiting = assembly()
    waiting.add(pair(version=1, name="old"))
    waiting.add(pair(version=2, name="new"))
    assert waiting.sweep(2, {1, 2}) == []
    (refusal,) = waiting.sweep(3, {1, 2, 3})
    assert (refusal.group_id, refusal.reason) == ("old", Reason.STALE)
    assert waiting.take(3) is None


def test_a_future_and_a_lost_version_are_refused() -> None:
    waiting = assembly()
    waiting.add(pair(version=4, name="future"))
    waiting.add(pair(version=2, name="lost"))
    refusals = {refusal.group_id: refusal.reason for refusal in waiting.sweep(3, {1, 3})}
    assert refusals == {"future": Reason.FUTURE_VERSION, "lost": Reason.LOST_VERSION}


def test_once_a_group_or_a_rollout_comes_again() -> None:
    waiting = assembly()
    first = pair(name="a")
    assert waiting.add(first) is None
    assert waiting.knows("a")
    refusal = waiting.add(group(*first.rollouts, name="b"))
    assert refusal is not None
    assert refusal.reason == Reason.DUPLICATE_ROLLOUT


def test_metrics_count_rollouts_and_tokens() -> None:
    waiting = assembly(groups_per_step=1)
    waiting.add(group(rollout(1, sequence([1, 2, 3], [0, 1, 1], versions=2), sequence([4, 5], [0, 1], versions=3)), rollout(0)))
    step = waiting.take(3)
    assert step is not None
    metrics = step.metrics()
    assert metrics["reward_mean"] == pytest.approx(0.5)
    assert (metrics["rollouts"], metrics["rows"], metrics["trained_tokens"], metrics["row_tokens"]) == (2, 2, 3, 5)
    assert metrics["staleness_max"] == 1


@given(st.lists(st.integers(0, 4), max_size=20), st.integers(1, 3), st.integers(0, 3))
def test_every_group_is_trained_or_refused_once(versions: list[int], groups_per_step: int, bound: int) -> None:
    waiting = assembly(groups_per_step, bound)
    fates: list[str] = []
    current = 0
    for number, version in enumerate(versions):
        waiting.add(pair(version=version, name=str(number)))
        fates += [refusal.group_id for refusal in waiting.sweep(current, set(range(current + 1)))]
        step = waiting.take(current)
        if step is not None:
            assert len(step.groups) == groups_per_step
            assert all(current - bound <= min(one.versions) and max(one.versions) <= current for one in step.groups)
            fates += [one.group_id for one in step.groups]
            current += 1
    assert len(fates) == len(set(fates))
    assert len(fates) + len(waiting) == len(versions)
