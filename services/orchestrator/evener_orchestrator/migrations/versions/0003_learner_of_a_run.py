"""A learner's lease ends when it falls silent, and its queue goes when the run is over."""

import sqlalchemy as sa
from alembic import op

from evener_orchestrator.ledger.types import Timestamp

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMNS = {
    "learner_expires_at": "until then no other learner gets the policy",
    "queue_deleted_at": "when the queue of its learner was deleted",
}


def upgrade() -> None:
    """Add the columns."""
    for name, comment in COLUMNS.items():
        op.add_column("runs", sa.Column(name, Timestamp(), nullable=True, comment=comment))


def downgrade() -> None:
    """Drop the columns."""
    for name in COLUMNS:
        op.drop_column("runs", name)
