"""What workers and the orchestrator say to each other over HTTP; one struct an answer.

Runner, verifier and learner hold no database password: all they know of the ledger is in these structs. Token arrays travel
as raw little-endian bytes in MessagePack (``int32`` ids and versions, ``float32`` log-probabilities, ``uint8`` masks).
"""

from typing import Literal

import msgspec

from evener.api.provenance import Provenance

REPORT_S = 600.0
"""How long a worker is heard of after its report, at most: one that was not read by then is lost or a dead letter, and its work
is to be done again."""

PromptMode = Literal["render", "token_in"]
"""How a prompt is made: by the engine's template from the agent's messages, or from the ids of the call it goes on from."""

Thinking = Literal["keep", "strip"]
"""What ``token_in`` does with thinking that the template strips from earlier turns: keep what was sampled, or do as it does."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the policy is sampled, whatever the agent asks for."""

    temperature: float = 1.0


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What one rollout may spend. ``context_tokens``: prompt + completion of one call; None: the engine's window."""

    calls: int = 50
    sampled_tokens: int = 32768
    context_tokens: int | None = None
    wall_s: float = 1800.0


class HarnessRef(msgspec.Struct, frozen=True, kw_only=True):
    """A harness and the way to start it."""

    name: str
    profile: str = "default"


class RolloutLease(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``POST /v1/attempts/{session}/claim``: all that a runner needs for one attempt.

    ``lease`` is the secret that fences this attempt: every later word of the runner carries it. ``agent_bundle`` is the
    blob (area ``agent``) with ``task.toml``, ``instruction.md`` and ``environment/``. ``version`` is the one that an evaluation
    pins; tokens older than ``oldest_version`` could not be trained any more.
    """

    session_id: str
    rollout_id: str
    attempt: int
    lease: str
    lease_s: float
    run_id: str
    group_id: str
    policy: str
    version: int | None
    oldest_version: int | None = None
    purpose: Literal["train", "eval"]
    harness: HarnessRef
    task_id: str
    agent_bundle: str
    trusted: bool
    sandbox: Literal["auto", "bubblewrap", "docker", "process"]
    sampling: Sampling
    budget: Budget
    prompt_mode: PromptMode = "render"
    thinking: Thinking = "keep"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a heartbeat of an attempt or of a learner: how long the lease now holds and what to do."""

    lease_s: float
    action: Literal["continue", "cancel", "pause"] = "continue"


class ScoreOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``POST /v1/attempts/{session}/scoring``: blobs of a snapshot, of the agent side and of the grader side.

    The command is issued again, to any verifier, where nobody has asked for ``again_s`` seconds. ``regrade``: the snapshot has
    its score already and is graded again under this id, which the report has to name.
    """

    session_id: str
    task_id: str
    snapshot: str
    agent_bundle: str
    grader_bundle: str
    trusted: bool
    sandbox: Literal["auto", "bubblewrap", "docker", "process"]
    again_s: float = 60.0
    regrade: str | None = None


class LearnerLease(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``POST /v1/policies/{policy}/learner``: the run to train and where it stands.

    ``epoch`` fences: a later learner gets a greater one, and the ledger refuses what carries a smaller one. Nobody else gets
    the policy for ``lease_s`` seconds, and again as long after each heartbeat. ``step`` and
    ``version`` are those of ``checkpoint`` (None: the start policy); ``train`` is the run file's ``[train]`` table.
    """

    policy: str
    epoch: int
    lease_s: float
    run_id: str
    step: int
    version: int
    weights: str
    checkpoint: str | None
    group_size: int
    temperature: float
    train: dict[str, float | int]


class VersionGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``POST /v1/policies/{policy}/versions``: the number of the next publication.

    ``wait_s`` > 0: not now (an evaluation holds the version); ask again after that many seconds.
    """

    version: int = 0
    wait_s: float = 0.0


class TrainedSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One training row: ``ids`` int32, ``mask`` uint8, ``logprobs`` float32, ``versions`` int32, equally many elements.

    ``digest`` is over the four; ``provenance`` None for rows that were archived before rows had one.
    """

    sequence_id: str
    ids: bytes
    mask: bytes
    logprobs: bytes
    versions: bytes
    digest: str
    provenance: Provenance | None


class TrainedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout with its score and reward, and its sequences."""

    rollout_id: str
    outcome: str
    score: float
    reward: float
    sequences: list[TrainedSequence]


class GroupOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``POST /v1/groups/{group}/claim``: a closed group, whole."""

    group_id: str
    run_id: str
    task_id: str
    harness: str
    temperature: float
    rollouts: list[TrainedRollout]
