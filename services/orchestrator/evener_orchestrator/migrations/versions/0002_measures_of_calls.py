"""What people ask of a call without reading its tokens: length, summed log-probability, tools and the cause of a fork.

Of calls archived before, all is filled in but the causes of their forks, which are not known.
"""

import json

import numpy as np
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

FORKED = sa.text("fork IS NOT NULL")
ARRAYS = {"calls": ("context_ids", "completion_ids", "logprobs"), "sequences": ("token_ids", "logprobs")}

ON_POSTGRES = (
    """
    UPDATE calls SET sampled_tokens = cardinality(completion_ids),
        logprob_sum = coalesce((SELECT sum(CAST(p AS double precision)) FROM unnest(logprobs) AS p), 0),
        tools = CASE jsonb_typeof(reply -> 'tool_calls') WHEN 'array'
            THEN jsonb_array_length(reply -> 'tool_calls') ELSE 0 END""",
    "UPDATE sequences SET tokens = cardinality(token_ids)",
)


def upgrade() -> None:
    """Add the columns and fill them."""
    op.add_column("calls", sa.Column("fork", sa.String(16), nullable=True))
    for name, kind in (("sampled_tokens", sa.Integer()), ("logprob_sum", sa.Double()), ("tools", sa.Integer())):
        op.add_column("calls", sa.Column(name, kind, nullable=False, server_default="0"))
    op.add_column("sequences", sa.Column("tokens", sa.Integer(), nullable=False, server_default="0"))
    op.drop_index("ix_calls_attempt_id", "calls")
    op.create_index("ix_calls_measures", "calls", ["attempt_id", "tools", "sampled_tokens", "logprob_sum"])
    op.create_index("ix_calls_forks", "calls", ["attempt_id"], postgresql_where=FORKED, sqlite_where=FORKED)
    if op.get_bind().dialect.name == "postgresql":
        for statement in ON_POSTGRES:
            op.execute(statement)
        for table, columns in ARRAYS.items():
            for column in columns:  # compressing token ids costs time and gains nothing
                op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")
    else:
        _fill_on_sqlite(op.get_bind())


def downgrade() -> None:
    """Drop the indexes and columns."""
    for index in ("ix_calls_forks", "ix_calls_measures"):
        op.drop_index(index, "calls")
    op.create_index("ix_calls_attempt_id", "calls", ["attempt_id"])
    for table, columns in {"sequences": ("tokens",), "calls": ("tools", "logprob_sum", "sampled_tokens", "fork")}.items():
        for column in columns:
            op.drop_column(table, column)


def _fill_on_sqlite(connection: sa.Connection) -> None:
    connection.exec_driver_sql("UPDATE sequences SET tokens = length(token_ids) / 4")
    rows = connection.exec_driver_sql("SELECT id, logprobs, length(completion_ids) / 4, reply FROM calls").all()
    for key, logprobs, sampled, reply in rows:
        total = float(np.frombuffer(logprobs, "<f4").sum(dtype=float))
        values = (sampled, total, len(json.loads(reply).get("tool_calls") or ()), key)
        connection.exec_driver_sql("UPDATE calls SET sampled_tokens = ?, logprob_sum = ?, tools = ? WHERE id = ?", values)
