"""A row reaches the optimizer only if every token in it is proven trainable; a group is taken whole or refused with a reason.

The proof is the row's provenance (`evener.trace.provenance`): what each call was asked and sampled, by whom and how.

TRL guards none of this: one NaN log-probability silently makes every parameter non-finite, a version of the future is
accepted, an all-zero mask crashes, a duplicate is trained twice. The functions here are pure. `admit` judges what never
changes, as soon as a group is claimed; `judge_versions` judges what a publication changes, when a step is assembled.
Called by `evener_learner.steps`.
"""

import math
from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from evener.api import GroupOrder, Provenance, TrainedRollout, TrainedSequence
from evener.trace.provenance import row_digest, untrue
from evener_learner.advantages import advantages


class Reason(StrEnum):
    """Why a group is not trained."""

    NO_SIGNAL = "no_signal"  # every reward of the group is the same: its advantages are 0
    TOO_FEW_ROLLOUTS = "too_few_rollouts"  # fewer than two: there is nothing to compare with
    NOTHING_SAMPLED = "nothing_sampled"  # no sequence has a trained token
    DUPLICATE_ROLLOUT = "duplicate_rollout"
    DUPLICATE_SEQUENCE = "duplicate_sequence"
    REWARD_NOT_FINITE = "reward_not_finite"
    LENGTHS_DIFFER = "lengths_differ"
    DIGEST_MISMATCH = "digest_mismatch"
    MASK_INVALID = "mask_invalid"  # a mask is 0 or 1
    FIRST_IS_TRAINED = "first_is_trained"  # nothing predicts a sequence's first token
    ID_OUT_OF_RANGE = "id_out_of_range"
    LOGPROB_INVALID = "logprob_invalid"  # not finite, above 0, or not 0 where nothing is trained
    PROVENANCE_MISSING = "provenance_missing"  # archived before rows had one
    PROVENANCE_UNTRUE = "provenance_untrue"  # the arrays do not bear out what the row says of itself
    TRAINED_TWICE = "trained_twice"  # one call's tokens in two rows
    OTHER_TEMPERATURE = "other_temperature"  # the loss divides logits by the lease's temperature
    OTHER_SAMPLING = "other_sampling"  # from a part of the distribution: its log-probabilities are not the policy's
    FUTURE_VERSION = "future_version"
    LOST_VERSION = "lost_version"  # sampled by weights that died with a learner
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Row:
    """One admitted sequence: ``ids`` int64, ``mask`` int64 and ``logprobs`` float32 of one length, and its advantage."""

    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    advantage: float


@dataclass(frozen=True, slots=True)
class Group:
    """An admitted group: its rows, the rewards of all its rollouts, the versions that sampled its trained tokens."""

    group_id: str
    rollout_ids: frozenset[str]
    rows: list[Row]
    rewards: list[float]
    versions: frozenset[int]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a group is not trained; ``detail`` names the sequence, for the log."""

    group_id: str
    disposition: Literal["skipped", "rejected"]
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Arrays:
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]


class _Refused(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(reason)


def admit(order: GroupOrder, *, vocabulary: int, temperature: float, trained: Set[str]) -> Group | Refusal:
    """The group of ``order``, or why it is refused; versions are left to `judge_versions`.

    ``vocabulary``: token ids are below it. ``trained``: rollouts that other groups hold. A sequence without a trained
    token is dropped, its rollout still counts in the group's mean.
    """
    try:
        return _admit(order, vocabulary, temperature, trained)
    except _Refused as refused:
        disposition = "skipped" if refused.reason == Reason.NO_SIGNAL else "rejected"
        return Refusal(order.group_id, disposition, refused.reason, refused.detail)


def judge_versions(group: Group, *, version: int, published: Set[int], max_staleness: int) -> Refusal | None:
    """Why ``group`` must not be trained by the weights of ``version``, or None.

    ``published``: versions of this line of weights. Staleness is ``version`` minus the oldest version of a trained token.
    """
    newest, oldest = max(group.versions), min(group.versions)
    if newest > version:
        return Refusal(group.group_id, "rejected", Reason.FUTURE_VERSION, f"sampled by {newest}, the learner is at {version}")
    if version - oldest > max_staleness:
        return Refusal(group.group_id, "rejected", Reason.STALE, f"sampled by {oldest}, the learner is at {version}")
    lost = group.versions - published
    if lost:
        return Refusal(group.group_id, "rejected", Reason.LOST_VERSION, f"sampled by {min(lost)}")
    return None


def _admit(order: GroupOrder, vocabulary: int, temperature: float, trained: Set[str]) -> Group:
    _check_group(order, temperature, trained)
    rewards = [rollout.reward for rollout in order.rollouts]
    rows: list[Row] = []
    versions: set[int] = set()
    for rollout, advantage in zip(order.rollouts, advantages(rewards), strict=True):
        for sequence in rollout.sequences:
            arrays = _checked(sequence, vocabulary)
            _check_provenance(rollout.rollout_id, sequence, arrays, temperature)
            sampled = arrays.mask != 0
            if not sampled.any():
                continue
            versions.update(arrays.versions[sampled].tolist())
            rows.append(Row(arrays.ids.astype(np.int64), arrays.mask.astype(np.int64), arrays.logprobs, advantage))
    if not rows:
        raise _Refused(Reason.NOTHING_SAMPLED, "")
    _check_trained_once(order.rollouts)
    _check_one_attempt(order.rollouts)
    return Group(order.group_id, frozenset(r.rollout_id for r in order.rollouts), rows, rewards, frozenset(versions))


def _check_group(order: GroupOrder, temperature: float, trained: Set[str]) -> None:
    ids = [rollout.rollout_id for rollout in order.rollouts]
    again = trained & set(ids) or {one for one in ids if ids.count(one) > 1}
    if again:
        raise _Refused(Reason.DUPLICATE_ROLLOUT, min(again))
    if len(ids) < 2:
        raise _Refused(Reason.TOO_FEW_ROLLOUTS, f"{len(ids)}")
    for rollout in order.rollouts:
        if not math.isfinite(rollout.reward):
            raise _Refused(Reason.REWARD_NOT_FINITE, rollout.rollout_id)
    if order.temperature != temperature:
        raise _Refused(Reason.OTHER_TEMPERATURE, f"{order.temperature}, the lease says {temperature}")
    _check_sequences_unique(order.rollouts)
    if all(rollout.reward == order.rollouts[0].reward for rollout in order.rollouts):
        raise _Refused(Reason.NO_SIGNAL, f"every reward is {order.rollouts[0].reward}")


def _check_sequences_unique(rollouts: list[TrainedRollout]) -> None:
    seen: set[str] = set()
    for rollout in rollouts:
        for sequence in rollout.sequences:
            if sequence.sequence_id in seen:
                raise _Refused(Reason.DUPLICATE_SEQUENCE, sequence.sequence_id)
            seen.add(sequence.sequence_id)


def _checked(sequence: TrainedSequence, vocabulary: int) -> _Arrays:
    arrays = _decoded(sequence)
    name = sequence.sequence_id
    if sequence.digest != row_digest(sequence.ids, sequence.mask, sequence.logprobs, sequence.versions):
        raise _Refused(Reason.DIGEST_MISMATCH, name)
    if arrays.mask.max() > 1:
        raise _Refused(Reason.MASK_INVALID, name)
    if arrays.mask[0]:
        raise _Refused(Reason.FIRST_IS_TRAINED, name)
    if arrays.ids.min() < 0 or arrays.ids.max() >= vocabulary:
        raise _Refused(Reason.ID_OUT_OF_RANGE, name)
    finite = bool(np.isfinite(arrays.logprobs).all())
    if not finite or arrays.logprobs.max() > 0 or arrays.logprobs[arrays.mask == 0].any():
        raise _Refused(Reason.LOGPROB_INVALID, name)
    return arrays


def _check_provenance(rollout_id: str, sequence: TrainedSequence, arrays: _Arrays, temperature: float) -> None:
    name, provenance = sequence.sequence_id, sequence.provenance
    if provenance is None:
        raise _Refused(Reason.PROVENANCE_MISSING, name)
    if provenance.session_id.rpartition(".")[0] != rollout_id:
        raise _Refused(Reason.PROVENANCE_UNTRUE, f"{name}: session {provenance.session_id} is not of rollout {rollout_id}")
    flaw = untrue(provenance, arrays.ids, arrays.mask, arrays.logprobs, arrays.versions)
    if flaw is not None:
        raise _Refused(Reason.PROVENANCE_UNTRUE, f"{name}: {flaw}")
    for call in provenance.calls:
        if call.untrained is not None:
            continue
        if call.temperature != temperature:
            detail = f"{name}: call {call.call_id} was sampled at {call.temperature}, the lease says {temperature}"
            raise _Refused(Reason.OTHER_TEMPERATURE, detail)
        if call.top_p != 1 or call.top_k not in _ALL:
            detail = f"{name}: call {call.call_id} was sampled with top_p {call.top_p}, top_k {call.top_k}"
            raise _Refused(Reason.OTHER_SAMPLING, detail)


_ALL = (-1, 0)
"""Both mean to an engine that no token is left out."""


def _check_trained_once(rollouts: list[TrainedRollout]) -> None:
    seen: set[str] = set()
    for rollout in rollouts:
        for sequence in rollout.sequences:
            again = seen & (trained := _trained(sequence.provenance))
            if again:
                raise _Refused(Reason.TRAINED_TWICE, f"{sequence.sequence_id}: call {min(again)}")
            seen |= trained


def _check_one_attempt(rollouts: list[TrainedRollout]) -> None:
    """A rollout's reward is of its last attempt alone."""
    for rollout in rollouts:
        sessions = sorted({each.provenance.session_id for each in rollout.sequences if each.provenance is not None})
        if len(sessions) > 1:
            raise _Refused(Reason.PROVENANCE_UNTRUE, f"{rollout.rollout_id}: rows of several sessions, {', '.join(sessions)}")


def _trained(provenance: Provenance | None) -> set[str]:
    return {call.call_id for call in provenance.calls if call.untrained is None} if provenance else set()


def _decoded(sequence: TrainedSequence) -> _Arrays:
    count = len(sequence.mask)
    sizes = (len(sequence.ids), len(sequence.logprobs), len(sequence.versions))
    if count == 0 or sizes != (4 * count, 4 * count, 4 * count):
        raise _Refused(
            Reason.LENGTHS_DIFFER, f"{sequence.sequence_id}: bytes of ids, log-probabilities, versions {sizes}, mask {count}"
        )
    return _Arrays(
        np.frombuffer(sequence.ids, "<i4"),
        np.frombuffer(sequence.mask, np.uint8),
        np.frombuffer(sequence.logprobs, "<f4"),
        np.frombuffer(sequence.versions, "<i4"),
    )
