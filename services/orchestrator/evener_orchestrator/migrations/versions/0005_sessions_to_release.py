"""Sessions that wait for their release are found without a look at all that were released."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

UNRELEASED = sa.text("ended_at IS NOT NULL AND released_at IS NULL")


def upgrade() -> None:
    """Add the index."""
    op.create_index("ix_attempts_unreleased", "attempts", ["id"], postgresql_where=UNRELEASED, sqlite_where=UNRELEASED)


def downgrade() -> None:
    """Drop the index."""
    op.drop_index("ix_attempts_unreleased", "attempts")
