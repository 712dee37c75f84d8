"""The tables, by DESIGN's words. The ledger is the only truth: whatever a queue or a cache forgets is found again here.

Ids are UUIDv7 texts, so that the order of ids is the order of time. Comments are stored in the database where it can
(`migrate`); a column marked `SECRET` is not shown to the role that only reads (`reader`).
"""

from datetime import datetime
from typing import Any, ClassVar

from numpy.typing import NDArray
from sqlalchemy import BigInteger, ForeignKey, Index, Integer, MetaData, String, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeEngine

from evener.errors import Outcome
from evener_orchestrator.ledger.types import Document, Timestamp, Tokens, Word
from evener_orchestrator.states import GroupState, RolloutState, RunState, VersionState

Json = dict[str, Any]
Runs = list[list[int]]
"""Equal values side by side as ``[start, end, value]`` (half open), or ``[start, end]`` where a mask is 1."""

SECRET = {"secret": True}
FORKED = text("fork IS NOT NULL")
UNRELEASED = text("ended_at IS NOT NULL AND released_at IS NULL")


class Base(DeclarativeBase):
    """Every table."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_N_label)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, TypeEngine[Any]]] = {
        datetime: Timestamp(),
        Json: Document,
        Runs: Document,
        list[Json]: Document,
        Outcome: Word(Outcome),
        RunState: Word(RunState),
        GroupState: Word(GroupState),
        RolloutState: Word(RolloutState),
        VersionState: Word(VersionState),
    }


class Run(Base):
    """One campaign."""

    __tablename__ = "runs"
    __table_args__ = ({"comment": "One campaign; each trains or evaluates one policy"},)

    id: Mapped[str] = mapped_column(String(36), primary_key=True, comment="UUIDv7")
    name: Mapped[str] = mapped_column(String(64), index=True, comment="of the run file; the newest run of a name is resumed")
    kind: Mapped[str] = mapped_column(String(8), comment="train or eval")
    state: Mapped[RunState] = mapped_column(comment="running, paused, done, failed or cancelled")
    policy: Mapped[str] = mapped_column(String(80), unique=True, comment="the run's name; a later run of the name has a number")
    file: Mapped[Json] = mapped_column(comment="the run file")
    trusted: Mapped[bool] = mapped_column(comment="the tasks are the user's own")
    prompt_mode: Mapped[str] = mapped_column(
        String(8), default="render", comment="render or token_in; unknown until the engines were asked, before any rollout"
    )
    prompt_reason: Mapped[str] = mapped_column(
        Text, default="", server_default="", comment="why it is render although token_in was asked for"
    )
    step: Mapped[int] = mapped_column(default=0, comment="the last optimizer step recorded")
    evaluating: Mapped[int | None] = mapped_column(comment="the policy version under evaluation")
    evaluated_step: Mapped[int] = mapped_column(default=-1, comment="step of the last version whose evaluation was planned")
    epoch: Mapped[int] = mapped_column(default=0, comment="of the learner that may speak")
    learner: Mapped[str | None] = mapped_column(String(128), comment="name of the learner that may speak")
    learner_expires_at: Mapped[datetime | None] = mapped_column(comment="until then no other learner gets the policy")
    queue_deleted_at: Mapped[datetime | None] = mapped_column(comment="when the queue of its learner was deleted")
    reason: Mapped[str] = mapped_column(Text, default="", comment="why it failed or was cancelled")
    created_at: Mapped[datetime] = mapped_column(comment="when it was submitted")
    ended_at: Mapped[datetime | None] = mapped_column(comment="when it was done, failed or cancelled")


class Task(Base):
    """A task, as its two bundles."""

    __tablename__ = "tasks"
    __table_args__ = ({"comment": "Tasks by the digest of both bundles"},)

    digest: Mapped[str] = mapped_column(String(71), primary_key=True, comment="sha256 over both bundles")
    task_id: Mapped[str] = mapped_column(String(255), index=True, comment="the directory's name")
    family: Mapped[str] = mapped_column(String(255), comment="metadata.category of task.toml")
    agent_bundle: Mapped[str] = mapped_column(String(71), comment="blob in area agent")
    grader_bundle: Mapped[str] = mapped_column(String(71), comment="blob in area grader")
    created_at: Mapped[datetime] = mapped_column(comment="when it was first uploaded")


class RunTask(Base):
    """A task of a run."""

    __tablename__ = "run_tasks"
    __table_args__ = ({"comment": "The tasks of a run, in order"},)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True, comment="the run")
    purpose: Mapped[str] = mapped_column(String(8), primary_key=True, comment="train or eval")
    position: Mapped[int] = mapped_column(primary_key=True, comment="0, 1, ... within run and purpose")
    task_digest: Mapped[str] = mapped_column(ForeignKey("tasks.digest"), comment="the task")


class Group(Base):
    """One task under one harness, rolled out ``size`` times."""

    __tablename__ = "groups"
    __table_args__ = (Index(None, "run_id", "purpose", "state"), {"comment": "The unit of GRPO: one task, one harness"})

    id: Mapped[str] = mapped_column(String(36), primary_key=True, comment="UUIDv7")
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), comment="the run it belongs to")
    task_digest: Mapped[str] = mapped_column(ForeignKey("tasks.digest"), comment="its one task")
    harness: Mapped[str] = mapped_column(String(64), comment="the coding agent")
    profile: Mapped[str] = mapped_column(String(64), comment="a way to start the harness")
    purpose: Mapped[str] = mapped_column(String(8), comment="train or eval")
    version: Mapped[int | None] = mapped_column(comment="the pinned policy version of an evaluation")
    number: Mapped[int] = mapped_column(comment="0, 1, ... within run and purpose")
    size: Mapped[int] = mapped_column(comment="how many rollouts it has")
    state: Mapped[GroupState] = mapped_column(
        comment="open, closed, training, trained, skipped or rejected; an evaluation's group ends closed"
    )
    reason: Mapped[str] = mapped_column(Text, default="", comment="why it was skipped or rejected")
    step: Mapped[int | None] = mapped_column(comment="the step that trained it")
    staleness: Mapped[int | None] = mapped_column(comment="the learner's version minus the oldest that sampled a trained token")
    issued_at: Mapped[datetime | None] = mapped_column(comment="when its command was last sent")
    created_at: Mapped[datetime] = mapped_column(comment="when it was planned")
    closed_at: Mapped[datetime | None] = mapped_column(comment="when its last rollout had its outcome")
    disposed_at: Mapped[datetime | None] = mapped_column(comment="when it was trained, skipped or rejected")


class Rollout(Base):
    """One agent episode."""

    __tablename__ = "rollouts"
    __table_args__ = (Index(None, "run_id", "state"), {"comment": "One agent episode; a retry is a new attempt of it"})

    id: Mapped[str] = mapped_column(String(36), primary_key=True, comment="UUIDv7")
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), comment="the run it belongs to")
    group_id: Mapped[str] = mapped_column(ForeignKey("groups.id"), index=True, comment="the group it belongs to")
    number: Mapped[int] = mapped_column(comment="0, 1, ... within the group")
    state: Mapped[RolloutState] = mapped_column(comment="planned, queued, running, ended, archived or scored")
    attempt: Mapped[int] = mapped_column(default=0, comment="the current attempt; 0: none yet")
    not_before: Mapped[datetime | None] = mapped_column(comment="back-off of the next attempt")
    outcome: Mapped[Outcome | None] = mapped_column(comment="of its last attempt; null until nothing more can happen")
    cause: Mapped[str | None] = mapped_column(String(64), comment="name of the fault")
    detail: Mapped[str] = mapped_column(Text, default="", comment="what the fault said")
    score: Mapped[float | None] = mapped_column(comment="what the verifier measured, in [0, 1]")
    reward: Mapped[float | None] = mapped_column(comment="what the learner trains on")
    calls: Mapped[int | None] = mapped_column(comment="committed calls")
    sampled_tokens: Mapped[int | None] = mapped_column(comment="tokens that the policy sampled in all its calls")
    version_min: Mapped[int | None] = mapped_column(comment="the oldest policy version that sampled a token")
    version_max: Mapped[int | None] = mapped_column(comment="the newest policy version that sampled a token")
    scorings: Mapped[int] = mapped_column(default=0, comment="how often its scoring failed through a fault of ours")
    orders: Mapped[int] = mapped_column(default=0, comment="how often a verifier began to score it")
    issued_at: Mapped[datetime | None] = mapped_column(
        comment="when the command it waits on was last sent, or a verifier last heard of"
    )
    created_at: Mapped[datetime] = mapped_column(comment="when it was planned")
    ended_at: Mapped[datetime | None] = mapped_column(comment="when its outcome was recorded")


class Attempt(Base):
    """One try at a rollout; its id is the session's."""

    __tablename__ = "attempts"
    __table_args__ = (
        Index("ix_attempts_unreleased", "id", postgresql_where=UNRELEASED, sqlite_where=UNRELEASED),
        {"comment": "One try at a rollout; the id is the proxy's session"},
    )

    id: Mapped[str] = mapped_column(String(48), primary_key=True, comment="the session: {rollout_id}.{number}")
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id"), index=True, comment="the rollout it is a try at")
    number: Mapped[int] = mapped_column(comment="1, 2, ...")
    runner: Mapped[str | None] = mapped_column(String(128), comment="name of the runner that claimed it")
    lease_hash: Mapped[str | None] = mapped_column(String(64), comment="sha256 of the lease", info=SECRET)
    lease_expires_at: Mapped[datetime | None] = mapped_column(index=True, comment="null where nobody holds it")
    outcome: Mapped[Outcome | None] = mapped_column(comment="why it ended")
    cause: Mapped[str | None] = mapped_column(String(64), comment="name of the fault")
    detail: Mapped[str] = mapped_column(Text, default="", comment="what the fault said")
    exit_code: Mapped[int | None] = mapped_column(comment="the agent's")
    sandbox: Mapped[str] = mapped_column(String(32), default="", comment="kind of sandbox it ran in")
    harness_version: Mapped[str] = mapped_column(String(64), default="", comment="of the agent, as it says itself")
    snapshot: Mapped[str | None] = mapped_column(String(71), comment="blob in area snapshots")
    logs: Mapped[str | None] = mapped_column(String(71), comment="blob in area logs")
    sealed: Mapped[Json | None] = mapped_column(comment="what the proxy counted at the seal")
    created_at: Mapped[datetime] = mapped_column(comment="when it was queued")
    claimed_at: Mapped[datetime | None] = mapped_column(comment="when a runner claimed it")
    started_at: Mapped[datetime | None] = mapped_column(comment="the runner's clock")
    ended_at: Mapped[datetime | None] = mapped_column(comment="the ledger's clock")
    released_at: Mapped[datetime | None] = mapped_column(comment="when the proxy forgot its session")


class SystemText(Base):
    """A system text or tool list, stored once."""

    __tablename__ = "texts"
    __table_args__ = ({"comment": "System texts and tool lists that calls name by digest"},)

    digest: Mapped[str] = mapped_column(String(80), primary_key=True, comment="named by calls.request")
    body: Mapped[str] = mapped_column(Text, comment="the text, or the tool list as JSON")


class Call(Base):
    """One model request and its reply."""

    __tablename__ = "calls"
    __table_args__ = (
        # What is asked of all calls at once, without their wide rows.
        Index("ix_calls_measures", "attempt_id", "tools", "sampled_tokens", "logprob_sum"),
        Index("ix_calls_forks", "attempt_id", postgresql_where=FORKED, sqlite_where=FORKED),
        {"comment": "One model request of an agent and its reply"},
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True, comment="UUIDv7")
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), comment="the attempt it belongs to")
    number: Mapped[int] = mapped_column(comment="1, 2, ... in order of arrival")
    parent_id: Mapped[str | None] = mapped_column(
        String(64), comment="the call whose prompt and completion is the longest token prefix of this prompt"
    )
    call_class: Mapped[str | None] = mapped_column(
        String(16), comment="agent, side, superseded or undelivered; null where it was archived before there were classes"
    )
    fork: Mapped[str | None] = mapped_column(
        String(16),
        comment="why it left its trace's line: template, retokenised, history_edited, thinking_dropped, compaction, subagent,"
        " retry or unknown",
    )
    fork_from: Mapped[str | None] = mapped_column(String(64), comment="the call that it is compared with")
    fork_position: Mapped[int | None] = mapped_column(comment="its first token that differs from that call's")
    fork_was: Mapped[str | None] = mapped_column(Text, comment="that call's text, or token ids, around the difference")
    fork_now: Mapped[str | None] = mapped_column(Text, comment="its own text, or token ids, around the difference")
    prompt_tokens: Mapped[int] = mapped_column(comment="length of the whole prompt")
    sampled_tokens: Mapped[int] = mapped_column(comment="length of the completion")
    logprob_sum: Mapped[float] = mapped_column(comment="of the completion: the sum of logprobs")
    tools: Mapped[int] = mapped_column(comment="how many tools the reply calls")
    context_ids: Mapped[NDArray[Any]] = mapped_column(Tokens(), comment="the prompt after the parent's prompt and completion")
    completion_ids: Mapped[NDArray[Any]] = mapped_column(Tokens(), comment="the tokens the policy sampled")
    logprobs: Mapped[NDArray[Any]] = mapped_column(Tokens(real=True), comment="of the completion")
    version_runs: Mapped[Runs] = mapped_column(comment="[start, end, version] over the completion")
    version_dispatch: Mapped[int] = mapped_column(comment="policy version when it was sent to the engine")
    version_completion: Mapped[int] = mapped_column(comment="policy version when the engine answered")
    request: Mapped[Json] = mapped_column(
        comment="digests of system texts and tools, the new messages, asked and used sampling"
    )
    reply: Mapped[Json] = mapped_column(comment="the canonical reply, with the ids we minted")
    dialect: Mapped[str] = mapped_column(String(16), comment="chat, responses, anthropic or gemini")
    delivered: Mapped[str] = mapped_column(String(8), comment="yes, no or unknown")
    level: Mapped[str] = mapped_column(String(8), comment="tokens or text")
    engine: Mapped[str] = mapped_column(String(255), comment="which engine answered")
    started_at: Mapped[datetime] = mapped_column(comment="when the request came")
    ended_at: Mapped[datetime] = mapped_column(comment="when the reply was complete")


class Sequence(Base):
    """One training row."""

    __tablename__ = "sequences"
    __table_args__ = ({"comment": "Training rows; all arrays are equally long"},)

    id: Mapped[str] = mapped_column(String(64), primary_key=True, comment="the id of the call it ends with")
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), index=True, comment="the attempt it belongs to")
    number: Mapped[int] = mapped_column(comment="0, 1, ... within the attempt")
    tokens: Mapped[int] = mapped_column(comment="length of the arrays")
    token_ids: Mapped[NDArray[Any]] = mapped_column(Tokens(), comment="prompt and completion of every call of one branch")
    logprobs: Mapped[NDArray[Any]] = mapped_column(Tokens(real=True), comment="0 where the mask is 0")
    mask_runs: Mapped[Runs] = mapped_column(comment="[start, end] where the loss mask is 1")
    version_runs: Mapped[Runs] = mapped_column(comment="[start, end, version] where the loss mask is 1")
    spans: Mapped[list[Json]] = mapped_column(comment="start, end, call_id, kind")
    trained_tokens: Mapped[int] = mapped_column(comment="sum of the mask")
    provenance: Mapped[Json | None] = mapped_column(
        comment="where its tokens come from: counts, versions, and per call span, digests, engine, sampling, why untrained"
    )
    digest: Mapped[str] = mapped_column(String(80), comment="sha256 over ids, mask, log-probabilities and versions")


class Score(Base):
    """What the verifier said about one attempt."""

    __tablename__ = "scores"
    __table_args__ = ({"comment": "What the verifier measured"},)

    attempt_id: Mapped[str] = mapped_column(
        ForeignKey("attempts.id"), primary_key=True, comment="the attempt that left the snapshot"
    )
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id"), index=True, comment="its rollout")
    score: Mapped[float | None] = mapped_column(comment="the task's own reward; null where a fault prevented it")
    scores: Mapped[Json] = mapped_column(comment="every named score")
    evidence: Mapped[Json] = mapped_column(comment="what the verifier saw")
    cause: Mapped[str | None] = mapped_column(String(64), comment="name of the fault that prevented a score")
    detail: Mapped[str] = mapped_column(Text, default="", comment="what the fault said")
    seconds: Mapped[float] = mapped_column(comment="how long the scoring took")
    created_at: Mapped[datetime] = mapped_column(comment="when it was recorded")


class Regrade(Base):
    """What the verifier said when an attempt's snapshot was graded again."""

    __tablename__ = "regrades"
    __table_args__ = ({"comment": "Snapshots graded again; nothing was trained on these scores"},)

    id: Mapped[str] = mapped_column(String(36), primary_key=True, comment="UUIDv7")
    attempt_id: Mapped[str] = mapped_column(
        ForeignKey("attempts.id"), index=True, comment="the attempt that left the snapshot; its scores row is what counted"
    )
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id"), index=True, comment="its rollout")
    score: Mapped[float | None] = mapped_column(comment="the task's own reward; null until then, or where a fault prevented it")
    scores: Mapped[Json] = mapped_column(comment="every named score")
    evidence: Mapped[Json] = mapped_column(comment="what the verifier saw")
    cause: Mapped[str | None] = mapped_column(String(64), comment="name of the fault that prevented a score")
    detail: Mapped[str] = mapped_column(Text, default="", comment="what the fault said")
    seconds: Mapped[float | None] = mapped_column(comment="how long the scoring took")
    scorings: Mapped[int] = mapped_column(default=0, comment="how often its scoring failed through a fault of ours")
    orders: Mapped[int] = mapped_column(default=0, comment="how often a verifier began to score it")
    issued_at: Mapped[datetime] = mapped_column(comment="when its command was last sent, or a verifier last heard of")
    created_at: Mapped[datetime] = mapped_column(comment="when it was asked for")
    ended_at: Mapped[datetime | None] = mapped_column(comment="when it was graded; null while it waits")


class PolicyVersion(Base):
    """One publication of a policy."""

    __tablename__ = "policies"
    __table_args__ = ({"comment": "Policy versions; a number is never used again"},)

    policy: Mapped[str] = mapped_column(ForeignKey("runs.policy"), primary_key=True, comment="the policy's name")
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="1, 2, ...; 1 is the start policy")
    state: Mapped[VersionState] = mapped_column(comment="allotted, published or lost (it died with its learner)")
    epoch: Mapped[int] = mapped_column(comment="of the learner it was allotted to; 0: the start policy")
    step: Mapped[int] = mapped_column(comment="the step whose weights it is")
    weights: Mapped[str | None] = mapped_column(String(71), comment="blob in area weights")
    allotted_at: Mapped[datetime] = mapped_column(comment="when the number was given")
    published_at: Mapped[datetime | None] = mapped_column(comment="when the engines had it")


class Step(Base):
    """One optimizer step."""

    __tablename__ = "steps"
    __table_args__ = ({"comment": "Optimizer steps; the groups of a step name it"},)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True, comment="the run")
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="1, 2, ...")
    epoch: Mapped[int] = mapped_column(comment="of the learner that made it")
    version: Mapped[int] = mapped_column(comment="allotted to the weights after this step")
    groups: Mapped[int] = mapped_column(comment="how many groups it trained")
    metrics: Mapped[Json] = mapped_column(comment="what the trainer reported")
    staleness_mean: Mapped[float | None] = mapped_column(comment="mean staleness of its groups")
    staleness_max: Mapped[int | None] = mapped_column(comment="greatest staleness of its groups")
    checkpoint: Mapped[str | None] = mapped_column(String(255), comment="what resumes after this step")
    seconds: Mapped[float] = mapped_column(comment="how long it took")
    created_at: Mapped[datetime] = mapped_column(comment="when it was recorded")


class Outgoing(Base):
    """A message that was decided on and is not yet confirmed by the bus."""

    __tablename__ = "outbox"
    __table_args__ = ({"comment": "Messages written with their cause, deleted when the bus has them"},)

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, comment="order of decision")
    body: Mapped[str] = mapped_column(Text, comment="the message as JSON")
    priority: Mapped[int] = mapped_column(default=0, comment="0 to 9, greater goes first")
