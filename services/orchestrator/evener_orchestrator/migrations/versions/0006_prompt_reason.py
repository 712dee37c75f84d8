"""A run says why its prompts are rendered although it asked for token-in prompts."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("runs", sa.Column("prompt_reason", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("runs", "prompt_reason")
