"""The one table of what may become what; a row's state changes through `moved` or a bulk update over `sources`, nowhere else.

A transition that the table lacks is a fault of ours, never silently applied. Used by every repository function.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class RunState(StrEnum):
    """Where a run stands."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class GroupState(StrEnum):
    """Where a group stands. An evaluation's group ends ``closed``; a training group is disposed of by the last three."""

    OPEN = "open"
    CLOSED = "closed"
    TRAINING = "training"
    TRAINED = "trained"
    SKIPPED = "skipped"
    REJECTED = "rejected"


class RolloutState(StrEnum):
    """Where a rollout stands: ``ended``: an attempt's end is recorded, ``archived``: its trace too, ``scored``: its score."""

    PLANNED = "planned"
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    ARCHIVED = "archived"
    SCORED = "scored"


class VersionState(StrEnum):
    """Where a policy version stands; a ``lost`` one died with its learner."""

    ALLOTTED = "allotted"
    PUBLISHED = "published"
    LOST = "lost"


S = TypeVar("S", RunState, GroupState, RolloutState, VersionState)

_R, _G, _O, _V = RunState, GroupState, RolloutState, VersionState

RUN: Mapping[RunState, frozenset[RunState]] = {
    _R.RUNNING: frozenset({_R.PAUSED, _R.DONE, _R.FAILED, _R.CANCELLED}),
    _R.PAUSED: frozenset({_R.RUNNING, _R.CANCELLED}),
    _R.DONE: frozenset(),
    _R.FAILED: frozenset(),
    _R.CANCELLED: frozenset(),
}
GROUP: Mapping[GroupState, frozenset[GroupState]] = {
    _G.OPEN: frozenset({_G.CLOSED, _G.REJECTED}),
    _G.CLOSED: frozenset({_G.TRAINING, _G.REJECTED}),
    _G.TRAINING: frozenset({_G.TRAINED, _G.SKIPPED, _G.REJECTED, _G.CLOSED}),
    _G.TRAINED: frozenset({_G.CLOSED}),  # its step died with a learner that had no checkpoint of it
    _G.SKIPPED: frozenset(),
    _G.REJECTED: frozenset(),
}
ROLLOUT: Mapping[RolloutState, frozenset[RolloutState]] = {
    _O.PLANNED: frozenset({_O.QUEUED, _O.ENDED}),
    _O.QUEUED: frozenset({_O.RUNNING, _O.ENDED}),
    _O.RUNNING: frozenset({_O.ENDED, _O.ARCHIVED}),
    _O.ENDED: frozenset({_O.PLANNED}),  # a new attempt
    _O.ARCHIVED: frozenset({_O.SCORED}),
    _O.SCORED: frozenset(),
}
VERSION: Mapping[VersionState, frozenset[VersionState]] = {
    _V.ALLOTTED: frozenset({_V.PUBLISHED, _V.LOST}),
    _V.PUBLISHED: frozenset({_V.LOST}),  # of a step that no checkpoint holds
    _V.LOST: frozenset(),
}


class IllegalTransition(Exception):
    """A state was about to change in a way that the table does not know."""


def moved(state: S, to: S) -> S:
    """``to``, where it may follow ``state``. Raises IllegalTransition where the table lacks the step."""
    if to not in _successors(state):
        raise IllegalTransition(f"{type(state).__name__}: {state} -> {to}")
    return to


def sources(to: S) -> list[S]:
    """The states from which ``to`` can be reached in one step, for bulk updates."""
    return [state for state in type(to) if to in _successors(state)]


def _successors(state: S) -> frozenset[S]:
    match state:
        case RunState():
            return RUN[state]
        case GroupState():
            return GROUP[state]
        case RolloutState():
            return ROLLOUT[state]
        case VersionState():
            return VERSION[state]
