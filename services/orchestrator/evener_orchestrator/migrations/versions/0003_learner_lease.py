"""A learner's lease ends when it falls silent."""

import sqlalchemy as sa
from alembic import op

from evener_orchestrator.ledger.types import Timestamp

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    comment = "until then no other learner gets the policy"
    op.add_column("runs", sa.Column("learner_expires_at", Timestamp(), nullable=True, comment=comment))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("runs", "learner_expires_at")
