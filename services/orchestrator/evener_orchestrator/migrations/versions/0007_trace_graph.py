"""Calls have a class and show where they left the line, in the words of `evener.trace`; training rows have a provenance.

Of forks archived before, the words are changed where a new one says the same, and else are unknown.
"""

import sqlalchemy as sa
from alembic import op

from evener_orchestrator.ledger.types import Document

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

CALLS = {
    "call_class": sa.String(16),
    "fork_from": sa.String(64),
    "fork_position": sa.Integer(),
    "fork_was": sa.Text(),
    "fork_now": sa.Text(),
}
SAME = {
    "repeated": "retry",
    "other_prompt": "subagent",
    "branched": "history_edited",
    "rewritten": "unknown",
    "restarted": "unknown",
}


def upgrade() -> None:
    """Add the columns and change the words."""
    for name, kind in CALLS.items():
        op.add_column("calls", sa.Column(name, kind, nullable=True))
    op.add_column("sequences", sa.Column("provenance", Document, nullable=True))
    for before, after in SAME.items():
        op.execute(f"UPDATE calls SET fork = '{after}' WHERE fork = '{before}'")  # noqa: S608 - constants only


def downgrade() -> None:
    """Drop the columns."""
    op.drop_column("sequences", "provenance")
    for name in CALLS:
        op.drop_column("calls", name)
