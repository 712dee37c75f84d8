"""Every table of the first version."""

import sqlalchemy as sa
from alembic import op

from evener_orchestrator.ledger.types import Document, Timestamp, Tokens

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = [
    "sequences",
    "scores",
    "calls",
    "attempts",
    "rollouts",
    "steps",
    "run_tasks",
    "policies",
    "groups",
    "texts",
    "tasks",
    "runs",
    "outbox",
]


def upgrade() -> None:
    """Create everything."""
    _create_tables()


def downgrade() -> None:
    """Drop everything."""
    for table in TABLES:
        op.drop_table(table)


def _create_tables() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        comment="Messages written with their cause, deleted when the bus has them",
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False, comment="of the run file; the newest run of a name is resumed"),
        sa.Column("kind", sa.String(length=8), nullable=False, comment="train or eval"),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column(
            "policy", sa.String(length=80), nullable=False, comment="the run's name; a later run of the name has a number"
        ),
        sa.Column("file", Document, nullable=False, comment="the run file"),
        sa.Column("trusted", sa.Boolean(), nullable=False, comment="the tasks are the user's own"),
        sa.Column("prompt_mode", sa.String(length=8), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False, comment="the last optimizer step recorded"),
        sa.Column("evaluating", sa.Integer(), nullable=True, comment="the policy version under evaluation"),
        sa.Column(
            "evaluated_step", sa.Integer(), nullable=False, comment="step of the last version whose evaluation was planned"
        ),
        sa.Column("epoch", sa.Integer(), nullable=False, comment="of the learner that may speak"),
        sa.Column("learner", sa.String(length=128), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False, comment="why it failed or was cancelled"),
        sa.Column("created_at", Timestamp(), nullable=False),
        sa.Column("ended_at", Timestamp(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("policy"),
        comment="One campaign; each trains or evaluates one policy",
    )
    op.create_index(op.f("ix_runs_name"), "runs", ["name"], unique=False)
    op.create_table(
        "tasks",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("task_id", sa.String(length=255), nullable=False, comment="the directory's name"),
        sa.Column("family", sa.String(length=255), nullable=False, comment="metadata.category of task.toml"),
        sa.Column("agent_bundle", sa.String(length=71), nullable=False, comment="blob in area agent"),
        sa.Column("grader_bundle", sa.String(length=71), nullable=False, comment="blob in area grader"),
        sa.Column("created_at", Timestamp(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_tasks")),
        comment="Tasks by the digest of both bundles",
    )
    op.create_index(op.f("ix_tasks_task_id"), "tasks", ["task_id"], unique=False)
    op.create_table(
        "texts",
        sa.Column("digest", sa.String(length=80), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_texts")),
        comment="System texts and tool lists that calls name by digest",
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("task_digest", sa.String(length=71), nullable=False),
        sa.Column("harness", sa.String(length=64), nullable=False),
        sa.Column("profile", sa.String(length=64), nullable=False),
        sa.Column("purpose", sa.String(length=8), nullable=False, comment="train or eval"),
        sa.Column("version", sa.Integer(), nullable=True, comment="the pinned policy version of an evaluation"),
        sa.Column("number", sa.Integer(), nullable=False, comment="0, 1, ... within run and purpose"),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False, comment="why it was skipped or rejected"),
        sa.Column("step", sa.Integer(), nullable=True, comment="the step that trained it"),
        sa.Column(
            "staleness",
            sa.Integer(),
            nullable=True,
            comment="the learner's version minus the oldest that sampled a trained token",
        ),
        sa.Column("issued_at", Timestamp(), nullable=True, comment="when its command was last sent"),
        sa.Column("created_at", Timestamp(), nullable=False),
        sa.Column("closed_at", Timestamp(), nullable=True),
        sa.Column("disposed_at", Timestamp(), nullable=True, comment="when it was trained, skipped or rejected"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_groups_run_id")),
        sa.ForeignKeyConstraint(["task_digest"], ["tasks.digest"], name=op.f("fk_groups_task_digest")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
        comment="The unit of GRPO: one task, one harness",
    )
    op.create_index(
        op.f("ix_groups_run_id_groups_purpose_groups_state"), "groups", ["run_id", "purpose", "state"], unique=False
    )
    op.create_table(
        "policies",
        sa.Column("policy", sa.String(length=80), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False, comment="of the learner it was allotted to; 0: the start policy"),
        sa.Column("step", sa.Integer(), nullable=False, comment="the step whose weights it is"),
        sa.Column("weights", sa.String(length=71), nullable=True, comment="blob in area weights"),
        sa.Column("allotted_at", Timestamp(), nullable=False),
        sa.Column("published_at", Timestamp(), nullable=True),
        sa.ForeignKeyConstraint(["policy"], ["runs.policy"], name=op.f("fk_policies_policy")),
        sa.PrimaryKeyConstraint("policy", "version", name=op.f("pk_policies")),
        comment="Policy versions; a number is never used again",
    )
    op.create_table(
        "run_tasks",
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("purpose", sa.String(length=8), nullable=False, comment="train or eval"),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("task_digest", sa.String(length=71), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_tasks_run_id")),
        sa.ForeignKeyConstraint(["task_digest"], ["tasks.digest"], name=op.f("fk_run_tasks_task_digest")),
        sa.PrimaryKeyConstraint("run_id", "purpose", "position", name=op.f("pk_run_tasks")),
        comment="The tasks of a run, in order",
    )
    op.create_table(
        "steps",
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, comment="allotted to the weights after this step"),
        sa.Column("groups", sa.Integer(), nullable=False, comment="how many groups it trained"),
        sa.Column("metrics", Document, nullable=False),
        sa.Column("staleness_mean", sa.Double(), nullable=True),
        sa.Column("staleness_max", sa.Integer(), nullable=True),
        sa.Column("checkpoint", sa.String(length=255), nullable=True, comment="what resumes after this step"),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("created_at", Timestamp(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_steps_run_id")),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_steps")),
        comment="Optimizer steps; the groups of a step name it",
    )
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("group_id", sa.String(length=36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, comment="0, 1, ... within the group"),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="the current attempt; 0: none yet"),
        sa.Column("not_before", Timestamp(), nullable=True, comment="back-off of the next attempt"),
        sa.Column("outcome", sa.String(16), nullable=True, comment="of its last attempt; null until nothing more can happen"),
        sa.Column("cause", sa.String(length=64), nullable=True, comment="name of the fault"),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True, comment="what the verifier measured, in [0, 1]"),
        sa.Column("reward", sa.Double(), nullable=True, comment="what the learner trains on"),
        sa.Column("calls", sa.Integer(), nullable=True, comment="committed calls"),
        sa.Column("sampled_tokens", sa.Integer(), nullable=True),
        sa.Column("version_min", sa.Integer(), nullable=True, comment="the oldest policy version that sampled a token"),
        sa.Column("version_max", sa.Integer(), nullable=True),
        sa.Column("scorings", sa.Integer(), nullable=False, comment="how often its scoring failed through a fault of ours"),
        sa.Column("issued_at", Timestamp(), nullable=True, comment="when the command it waits on was last sent"),
        sa.Column("created_at", Timestamp(), nullable=False),
        sa.Column("ended_at", Timestamp(), nullable=True, comment="when its outcome was recorded"),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_rollouts_group_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rollouts_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
        comment="One agent episode; a retry is a new attempt of it",
    )
    op.create_index(op.f("ix_rollouts_group_id"), "rollouts", ["group_id"], unique=False)
    op.create_index(op.f("ix_rollouts_run_id_rollouts_state"), "rollouts", ["run_id", "state"], unique=False)
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("rollout_id", sa.String(length=36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, comment="1, 2, ..."),
        sa.Column("runner", sa.String(length=128), nullable=True),
        sa.Column("lease_hash", sa.String(length=64), nullable=True, comment="sha256 of the lease, a secret"),
        sa.Column("lease_expires_at", Timestamp(), nullable=True, comment="null where nobody holds it"),
        sa.Column("outcome", sa.String(16), nullable=True),
        sa.Column("cause", sa.String(length=64), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("sandbox", sa.String(length=32), nullable=False),
        sa.Column("harness_version", sa.String(length=64), nullable=False),
        sa.Column("snapshot", sa.String(length=71), nullable=True, comment="blob in area snapshots"),
        sa.Column("logs", sa.String(length=71), nullable=True, comment="blob in area logs"),
        sa.Column("sealed", Document, nullable=True, comment="what the proxy counted at the seal"),
        sa.Column("created_at", Timestamp(), nullable=False),
        sa.Column("claimed_at", Timestamp(), nullable=True),
        sa.Column("started_at", Timestamp(), nullable=True, comment="the runner's clock"),
        sa.Column("ended_at", Timestamp(), nullable=True, comment="the ledger's clock"),
        sa.Column("released_at", Timestamp(), nullable=True, comment="when the proxy forgot its session"),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_attempts_rollout_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        comment="One try at a rollout; the id is the proxy's session",
    )
    op.create_index(op.f("ix_attempts_lease_expires_at"), "attempts", ["lease_expires_at"], unique=False)
    op.create_index(op.f("ix_attempts_rollout_id"), "attempts", ["rollout_id"], unique=False)
    op.create_table(
        "calls",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("attempt_id", sa.String(length=48), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column(
            "parent_id",
            sa.String(length=64),
            nullable=True,
            comment="the call whose prompt and completion is the longest token prefix of this prompt",
        ),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False, comment="length of the whole prompt"),
        sa.Column("context_ids", Tokens(), nullable=False, comment="the prompt after the parent's prompt and completion"),
        sa.Column("completion_ids", Tokens(), nullable=False),
        sa.Column("logprobs", Tokens(real=True), nullable=False, comment="of the completion"),
        sa.Column("version_runs", Document, nullable=False, comment="[start, end, version] over the completion"),
        sa.Column("version_dispatch", sa.Integer(), nullable=False),
        sa.Column("version_completion", sa.Integer(), nullable=False),
        sa.Column("request", Document, nullable=False),
        sa.Column("reply", Document, nullable=False),
        sa.Column("dialect", sa.String(length=16), nullable=False),
        sa.Column("delivered", sa.String(length=8), nullable=False, comment="yes, no or unknown"),
        sa.Column("level", sa.String(length=8), nullable=False, comment="tokens or text"),
        sa.Column("engine", sa.String(length=255), nullable=False),
        sa.Column("started_at", Timestamp(), nullable=False),
        sa.Column("ended_at", Timestamp(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_calls_attempt_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_calls")),
        comment="One model request of an agent and its reply",
    )
    op.create_index(op.f("ix_calls_attempt_id"), "calls", ["attempt_id"], unique=False)
    op.create_table(
        "scores",
        sa.Column("attempt_id", sa.String(length=48), nullable=False),
        sa.Column("rollout_id", sa.String(length=36), nullable=False),
        sa.Column("score", sa.Double(), nullable=True, comment="the task's own reward; null where a fault prevented it"),
        sa.Column("scores", Document, nullable=False, comment="every named score"),
        sa.Column("evidence", Document, nullable=False),
        sa.Column("cause", sa.String(length=64), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("created_at", Timestamp(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_scores_attempt_id")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_scores_rollout_id")),
        sa.PrimaryKeyConstraint("attempt_id", name=op.f("pk_scores")),
        comment="What the verifier measured",
    )
    op.create_index(op.f("ix_scores_rollout_id"), "scores", ["rollout_id"], unique=False)
    op.create_table(
        "sequences",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("attempt_id", sa.String(length=48), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("token_ids", Tokens(), nullable=False),
        sa.Column("logprobs", Tokens(real=True), nullable=False, comment="0 where the mask is 0"),
        sa.Column("mask_runs", Document, nullable=False, comment="[start, end] where the loss mask is 1"),
        sa.Column("version_runs", Document, nullable=False, comment="[start, end, version] where the loss mask is 1"),
        sa.Column("spans", Document, nullable=False, comment="provenance: start, end, call_id, kind"),
        sa.Column("trained_tokens", sa.Integer(), nullable=False, comment="sum of the mask"),
        sa.Column("digest", sa.String(length=80), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_sequences_attempt_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sequences")),
        comment="Training rows; all arrays are equally long",
    )
    op.create_index(op.f("ix_sequences_attempt_id"), "sequences", ["attempt_id"], unique=False)
