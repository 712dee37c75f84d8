"""Scores of snapshots that were graded again, beside those that counted."""

import sqlalchemy as sa
from alembic import op

from evener_orchestrator.ledger.types import Document, Timestamp

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "regrades",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("attempt_id", sa.String(length=48), nullable=False),
        sa.Column("rollout_id", sa.String(length=36), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("scores", Document, nullable=False),
        sa.Column("evidence", Document, nullable=False),
        sa.Column("cause", sa.String(length=64), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("scorings", sa.Integer(), nullable=False),
        sa.Column("issued_at", Timestamp(), nullable=False),
        sa.Column("created_at", Timestamp(), nullable=False),
        sa.Column("ended_at", Timestamp(), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_regrades_attempt_id")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_regrades_rollout_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_regrades")),
    )
    op.create_index(op.f("ix_regrades_attempt_id"), "regrades", ["attempt_id"])
    op.create_index(op.f("ix_regrades_rollout_id"), "regrades", ["rollout_id"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("regrades")
