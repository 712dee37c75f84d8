"""Invariants 1, 2, 10 and 11 at the learner's door."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.api import GroupOrder, TrainedSequence
from evener_learner.admission import Group, Reason, Refusal, admit, judge_versions
from tests.unit.learner.making import VOCABULARY, group, pair, proven, rollout, sequence


def verdict(order: GroupOrder, trained: set[str] | None = None) -> Group | Refusal:
    return admit(order, vocabulary=VOCABULARY, temperature=1.0, trained=trained or set())


def reason(order: GroupOrder, trained: set[str] | None = None) -> Reason:
    refusal = verdict(order, trained)
    assert isinstance(refusal, Refusal)
    assert refusal.group_id == order.group_id
    assert refusal.disposition == ("skipped" if refusal.reason == Reason.NO_SIGNAL else "rejected")
    return refusal.reason


def spoilt(**changes: bytes) -> GroupOrder:
    """A pair whose first sequence has other arrays, with a digest and a provenance that fit them."""
    order = pair()
    first = order.rollouts[0].sequences[0]
    arrays = {"ids": first.ids, "mask": first.mask, "logprobs": first.logprobs, "versions": first.versions} | changes
    bad = proven(first.sequence_id, **arrays)
    return msgspec.structs.replace(
        order, rollouts=[msgspec.structs.replace(order.rollouts[0], sequences=[bad]), order.rollouts[1]]
    )


def floats(*values: float) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def ints(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def test_exact_rows_are_the_engine_s_own_tokens() -> None:
    admitted = verdict(pair())
    assert isinstance(admitted, Group)
    assert [row.ids.tolist() for row in admitted.rows] == [[1, 2, 3], [1, 2, 4]]
    assert [row.mask.tolist() for row in admitted.rows] == [[0, 1, 1], [0, 1, 1]]
    assert [row.logprobs.tolist() for row in admitted.rows] == [[0, -1, -1], [0, -1, -1]]
    assert [round(row.advantage, 6) for row in admitted.rows] == [1, -1]
    assert admitted.versions == {1}


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (spoilt(logprobs=floats(0, math.nan, -1)), Reason.LOGPROB_INVALID),
        (spoilt(logprobs=floats(0, -math.inf, -1)), Reason.LOGPROB_INVALID),
        (spoilt(logprobs=floats(0, 0.5, -1)), Reason.LOGPROB_INVALID),
        (spoilt(logprobs=floats(-1, -1, -1)), Reason.LOGPROB_INVALID),
        (spoilt(ids=ints(1, 2)), Reason.LENGTHS_DIFFER),
        (spoilt(versions=ints(0, 1)), Reason.LENGTHS_DIFFER),
        (spoilt(ids=b"", mask=b"", logprobs=b"", versions=b""), Reason.LENGTHS_DIFFER),
        (spoilt(ids=ints(1, 2, VOCABULARY)), Reason.ID_OUT_OF_RANGE),
        (spoilt(ids=ints(1, -2, 3)), Reason.ID_OUT_OF_RANGE),
        (spoilt(mask=bytes([0, 1, 2])), Reason.MASK_INVALID),
        (spoilt(mask=bytes([1, 1, 1])), Reason.FIRST_IS_TRAINED),
        (group(rollout(1, sequence([1, 2], [0, 1]))), Reason.TOO_FEW_ROLLOUTS),
        (group(), Reason.TOO_FEW_ROLLOUTS),
        (group(rollout(1, sequence([1, 2], [0, 1])), rollout(1, sequence([1, 3], [0, 1]))), Reason.NO_SIGNAL),
        (group(rollout(1, sequence([1, 2], [0, 0])), rollout(0)), Reason.NOTHING_SAMPLED),
        (group(rollout(math.nan, sequence([1, 2], [0, 1])), rollout(0)), Reason.REWARD_NOT_FINITE),
        (group(rollout(1, name="a"), rollout(0, name="a")), Reason.DUPLICATE_ROLLOUT),
        (
            group(rollout(1, sequence([1, 2], [0, 1], name="s")), rollout(0, sequence([1, 3], [0, 1], name="s"))),
            Reason.DUPLICATE_SEQUENCE,
        ),
        (msgspec.structs.replace(pair(), temperature=0.7), Reason.OTHER_TEMPERATURE),
    ],
)
def test_whole_groups_are_refused_with_a_reason(order: GroupOrder, expected: Reason) -> None:
    assert reason(order) == expected


def test_a_damaged_sequence_is_refused() -> None:
    order = pair()
    order.rollouts[0].sequences[0] = msgspec.structs.replace(order.rollouts[0].sequences[0], ids=ints(1, 2, 5))
    assert reason(order) == Reason.DIGEST_MISMATCH


def says(provenance_changes: dict[str, object], **call_changes: object) -> GroupOrder:
    """A pair whose first sequence says something else of itself, or of its one call."""
    order = pair()
    first = order.rollouts[0].sequences[0]
    provenance = first.provenance
    assert provenance is not None
    (call,) = provenance.calls
    calls = [msgspec.structs.replace(call, **call_changes)]
    said = msgspec.structs.replace(provenance, **({"calls": calls} | provenance_changes))
    order.rollouts[0].sequences[0] = msgspec.structs.replace(first, provenance=said)
    return order


@pytest.mark.parametrize(
    ("order", "expected", "told"),
    [
        (says({}, start=0), Reason.PROVENANCE_UNTRUE, "outside the row"),
        (says({}, end=4), Reason.PROVENANCE_UNTRUE, "outside the row"),
        (says({}, start=2), Reason.PROVENANCE_UNTRUE, "given, sampled, trained"),
        (says({}, untrained="failed_checks"), Reason.PROVENANCE_UNTRUE, "given, sampled, trained"),
        (says({"calls": []}), Reason.PROVENANCE_UNTRUE, "given, sampled, trained"),
        (says({"trained": 3}), Reason.PROVENANCE_UNTRUE, "given, sampled, trained"),
        (says({}, prompt="00" * 16), Reason.PROVENANCE_UNTRUE, "another prompt"),
        (says({}, sample="00" * 32), Reason.PROVENANCE_UNTRUE, "other tokens"),
        (says({"versions": {"2": 2}}), Reason.PROVENANCE_UNTRUE, "versions"),
        (says({"engines": []}), Reason.PROVENANCE_UNTRUE, "engines"),
        (says({}, engine="http://another"), Reason.PROVENANCE_UNTRUE, "engines"),
        (says({"session_id": "another.1"}), Reason.PROVENANCE_UNTRUE, "session another.1"),
        (says({}, temperature=0.7), Reason.OTHER_TEMPERATURE, "0.7"),
        (says({}, temperature=None), Reason.OTHER_TEMPERATURE, "None"),
        (says({}, top_p=0.9), Reason.OTHER_SAMPLING, "top_p 0.9"),
        (says({}, top_k=20), Reason.OTHER_SAMPLING, "top_k 20"),
    ],
)
def test_a_provenance_that_does_not_hold_is_refused_and_says_why(order: GroupOrder, expected: Reason, told: str) -> None:
    refusal = verdict(order)
    assert isinstance(refusal, Refusal)
    assert (refusal.disposition, refusal.reason) == ("rejected", expected)
    assert refusal.detail.startswith(order.rollouts[0].sequences[0].sequence_id)
    assert told in refusal.detail


def test_a_row_without_provenance_is_refused() -> None:
    order = pair()
    order.rollouts[0].sequences[0] = msgspec.structs.replace(order.rollouts[0].sequences[0], provenance=None)
    assert reason(order) == Reason.PROVENANCE_MISSING


def test_a_mask_over_other_tokens_than_were_sampled_is_refused() -> None:
    """Two given and two sampled tokens, of which the mask trains a given and a sampled one."""
    honest = sequence([1, 2, 3, 4], [0, 0, 1, 1])
    mask = bytes([0, 1, 1, 0])
    logprobs, versions = floats(0, -1, -1, 0), ints(0, 1, 1, 0)
    moved = proven(honest.sequence_id, honest.ids, mask, logprobs, versions)
    order = group(rollout(1, msgspec.structs.replace(moved, provenance=honest.provenance)), rollout(0))
    refusal = verdict(order)
    assert isinstance(refusal, Refusal)
    assert "the mask" in refusal.detail


def test_once_a_call_in_two_rows_is_refused() -> None:
    first = sequence([1, 2, 3], [0, 1, 1])
    again = msgspec.structs.replace(first, sequence_id="again")
    assert reason(group(rollout(1, first, again), rollout(0))) == Reason.TRAINED_TWICE


def test_once_a_call_that_is_named_twice_in_a_row_is_refused() -> None:
    """Both places hold the same tokens, so that all else is borne out."""
    row = sequence([1, 2, 1, 2], [0, 1, 0, 1])
    provenance = row.provenance
    assert provenance is not None
    calls = [msgspec.structs.replace(call, call_id="one") for call in provenance.calls]
    again = msgspec.structs.replace(row, provenance=msgspec.structs.replace(provenance, calls=calls))
    refusal = verdict(group(rollout(1, again), rollout(0)))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, "named twice" in refusal.detail) == (Reason.PROVENANCE_UNTRUE, True)


def test_fenced_rows_of_two_attempts_are_refused() -> None:
    order = group(rollout(1, sequence([1, 2], [0, 1]), sequence([1, 3], [0, 1]), name="r"), rollout(0))
    second = order.rollouts[0].sequences[1]
    assert second.provenance is not None
    order.rollouts[0].sequences[1] = msgspec.structs.replace(
        second, provenance=msgspec.structs.replace(second.provenance, session_id="r.2")
    )
    refusal = verdict(order)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, "r.1, r.2" in refusal.detail) == (Reason.PROVENANCE_UNTRUE, True)


def test_once_a_rollout_of_another_group_is_refused() -> None:
    order = pair()
    assert reason(order, {order.rollouts[1].rollout_id}) == Reason.DUPLICATE_ROLLOUT


def test_a_sequence_without_trained_tokens_is_dropped_and_its_rollout_counts() -> None:
    admitted = verdict(
        group(
            rollout(1, sequence([1, 2], [0, 1]), sequence([5, 6, 7], [0, 1, 1])),
            rollout(0, sequence([1, 3], [0, 0])),
            rollout(0),
        )
    )
    assert isinstance(admitted, Group)
    assert [row.ids.tolist() for row in admitted.rows] == [[1, 2], [5, 6, 7]]
    assert admitted.rewards == [1, 0, 0]
    assert {round(row.advantage, 6) for row in admitted.rows} == {round(math.sqrt(2), 6)}


@given(st.sets(st.integers(0, 12), min_size=1), st.integers(0, 12), st.integers(0, 6), st.sets(st.integers(0, 12)))
def test_bounded_staleness(sampled: set[int], version: int, bound: int, published: set[int]) -> None:
    admitted = verdict(pair())
    assert isinstance(admitted, Group)
    refusal = judge_versions(
        replace(admitted, versions=frozenset(sampled)), version=version, published=published, max_staleness=bound
    )
    fit = all(version - bound <= one <= version and one in published for one in sampled)
    assert (refusal is None) == fit
    if refusal is not None and max(sampled) > version:
        assert refusal.reason == Reason.FUTURE_VERSION


arrays = st.lists(
    st.tuples(
        st.integers(-2, VOCABULARY + 1),
        st.integers(0, 2),
        st.one_of(st.just(0.0), st.floats(width=32)),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


def of(rows: list[tuple[int, int, float, int]]) -> TrainedSequence:
    ids, mask, logprobs, versions = zip(*rows, strict=True)
    parts = ints(*ids), bytes(mask), floats(*logprobs), ints(*versions)
    return proven("s", *parts)


@given(arrays)
def test_exact_whatever_is_admitted_is_trainable(rows: list[tuple[int, int, float, int]]) -> None:
    outcome = verdict(group(rollout(1, of(rows)), rollout(0, sequence([1, 2], [0, 1]))))
    valid = (
        all(0 <= token < VOCABULARY for token, *_ in rows)
        and all(mask < 2 for _, mask, *_ in rows)
        and rows[0][1] == 0
        and all(math.isfinite(logprob) and logprob <= 0 and (mask or logprob == 0) for _, mask, logprob, _ in rows)
    )
    assert isinstance(outcome, Group) == valid
    if isinstance(outcome, Group):
        for row in outcome.rows:
            assert row.ids.size == row.mask.size == row.logprobs.size
            assert row.mask.any()
            assert np.isfinite(row.logprobs).all()
