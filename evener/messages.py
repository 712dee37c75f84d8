"""What travels on the bus: ids and small facts, never tokens, files or truth.

A command asks for one effect and is idempotent on ``(rollout_id, attempt)`` or ``group_id``; an event reports one. The
ledger is the truth: a lost message is issued again, a repeated one changes nothing. Encoded as JSON with the type's name
in ``type``; an unknown field is ignored, so that services of neighbouring versions can talk.
"""

from typing import Any, Literal

import msgspec

from evener.errors import Outcome
from evener.ids import new_id

SCHEMA = 1


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """What the proxy said when a session was sealed: numbers of calls."""

    committed: int
    aborted: int
    lost: int
    undelivered: int


class Base(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Fields of every message. ``traceparent`` is the W3C trace context of the cause."""

    schema: int = SCHEMA
    message_id: str = msgspec.field(default_factory=new_id)
    traceparent: str | None = None


class RunRollout(Base, tag="RunRollout", frozen=True, kw_only=True):
    """Command to a runner: run this attempt. Queue ``rollouts.run``."""

    run_id: str
    rollout_id: str
    attempt: int


class ScoreWorkspace(Base, tag="ScoreWorkspace", frozen=True, kw_only=True):
    """Command to a verifier: score the snapshot of this attempt. Queue ``workspaces.score``."""

    run_id: str
    rollout_id: str
    attempt: int


class TrainGroup(Base, tag="TrainGroup", frozen=True, kw_only=True):
    """Command to the learner of a policy: train this closed group. Queue ``groups.train.{policy}``."""

    run_id: str
    policy: str
    group_id: str


class RolloutFinished(Base, tag="RolloutFinished", frozen=True, kw_only=True):
    """Event of a runner: an attempt ended. ``snapshot`` and ``logs`` are blob digests; times are Unix seconds."""

    rollout_id: str
    attempt: int
    lease: str
    outcome: Outcome
    cause: str | None = None
    detail: str = ""
    sealed: Sealed | None = None
    snapshot: str | None = None
    logs: str | None = None
    exit_code: int | None = None
    sandbox: str = ""
    harness_version: str = ""
    started: float = 0.0
    ended: float = 0.0


class RolloutScored(Base, tag="RolloutScored", frozen=True, kw_only=True):
    """Event of a verifier: scores in [0, 1] by name (``reward`` is the task's own), or the fault that prevented them.

    ``regrade``: the order's, where the snapshot was graded again.
    """

    rollout_id: str
    attempt: int
    scores: dict[str, float] = {}
    cause: str | None = None
    detail: str = ""
    evidence: dict[str, Any] = {}
    seconds: float = 0.0
    regrade: str | None = None


class GroupClosed(Base, tag="GroupClosed", frozen=True, kw_only=True):
    """Event of the learner: what became of a group that no step holds."""

    group_id: str
    epoch: int
    disposition: Literal["trained", "skipped", "rejected"]
    reason: str = ""


class StepFinished(Base, tag="StepFinished", frozen=True, kw_only=True):
    """Event of the learner: one optimizer step, the whole groups it trained, and the checkpoint that holds them.

    The engines serve ``version``, whose ``weights`` are a blob digest: the step alone publishes it, should `PolicyPublished`
    come later or never.
    """

    run_id: str
    policy: str
    epoch: int
    step: int
    version: int
    groups: list[str]
    metrics: dict[str, float] = {}
    checkpoint: str | None = None
    weights: str | None = None
    seconds: float = 0.0


class PolicyPublished(Base, tag="PolicyPublished", frozen=True, kw_only=True):
    """Event of the learner: every engine of the policy now serves ``version``; ``weights`` is a blob digest."""

    policy: str
    epoch: int
    version: int
    step: int
    weights: str


Command = RunRollout | ScoreWorkspace | TrainGroup
Event = RolloutFinished | RolloutScored | GroupClosed | StepFinished | PolicyPublished
Message = Command | Event

_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_encoder = msgspec.json.Encoder()

ROLLOUTS = "rollouts.run"
WORKSPACES = "workspaces.score"
EVENTS = "ledger.events"
DEAD = "evener.dead"


def train_queue(policy: str) -> str:
    """The queue of one policy's learner."""
    return f"groups.train.{policy}"


def queue_of(message: Message) -> str:
    """The queue that a message is for."""
    match message:
        case RunRollout():
            return ROLLOUTS
        case ScoreWorkspace():
            return WORKSPACES
        case TrainGroup(policy=policy):
            return train_queue(policy)
        case _:
            return EVENTS


def encode(message: Message) -> bytes:
    """A message as JSON. What is no Unicode in its texts, as the names of files may be, becomes ``?``."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(_readable(msgspec.to_builtins(message)))


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_readable(name): _readable(each) for name, each in value.items()}
    return [_readable(each) for each in value] if isinstance(value, list) else value


def decode(body: bytes) -> Message:
    """The message in ``body``. Raises msgspec.DecodeError (a poison message goes to the dead letters)."""
    return _decoder.decode(body)
