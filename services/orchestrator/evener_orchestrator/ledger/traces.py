"""An attempt's trace is written in the transaction that records the attempt's end: with it or not at all.

Token arrays go to Postgres by binary COPY, straight from numpy; SQLite takes plain inserts. Called by `attempts.finish`.
"""

from sqlalchemy import insert
from sqlalchemy.dialects import postgresql, sqlite

from evener_orchestrator.archive import Archive
from evener_orchestrator.ledger.copy import copy
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.models import Call, Sequence, SystemText
from evener_orchestrator.ledger.types import storable


async def store(tx: Transaction, archive: Archive) -> None:
    """Write the texts, calls and sequences of one attempt, which is in the ledger."""
    if tx.session.new:
        await tx.session.flush()
    with tx.session.no_autoflush:  # what else changed is written later, together
        if archive.texts:
            # In one order everywhere: two transactions that write the same texts wait for each other, never in a circle.
            texts = sorted(archive.texts, key=lambda row: row["digest"])
            upsert = postgresql.insert if tx.postgres else sqlite.insert
            rows = [{"digest": row["digest"], "body": storable(row["body"])} for row in texts]
            await tx.session.execute(upsert(SystemText).on_conflict_do_nothing(), rows)
        calls = [row | {name: _shown(row[name]) for name in ("fork_was", "fork_now")} for row in archive.calls]
        for model, rows in ((Call, calls), (Sequence, archive.sequences)):
            if rows and tx.postgres:
                await copy(await tx.session.connection(), model, rows)
            elif rows:
                await tx.session.execute(insert(model), rows)


def _shown(text: str | None) -> str | None:
    """A text of an agent's, which may hold what is no Unicode."""
    return None if text is None else storable(text.encode(errors="replace").decode())
