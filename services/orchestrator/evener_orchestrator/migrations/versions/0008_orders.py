"""A scoring that no verifier survives ends: how often one began is counted."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns."""
    for table in ("rollouts", "regrades"):
        op.add_column(table, sa.Column("orders", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Drop the columns."""
    for table in ("rollouts", "regrades"):
        op.drop_column(table, "orders")
