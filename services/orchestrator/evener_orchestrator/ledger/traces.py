"""An attempt's trace is written in the transaction that records the attempt's end: with it or not at all.

Traces of one transaction are written together, at its end: to begin and to end a COPY costs more than its rows. Token arrays
go to Postgres by binary COPY, straight from numpy; SQLite takes plain inserts. Called by `attempts.finish`.
"""

from collections.abc import Sequence as Many

from sqlalchemy import insert
from sqlalchemy.dialects import postgresql, sqlite

from evener_orchestrator.archive import Archive
from evener_orchestrator.ledger.copy import copy
from evener_orchestrator.ledger.engine import Transaction
from evener_orchestrator.ledger.models import Call, Sequence, SystemText
from evener_orchestrator.ledger.types import storable


def store(tx: Transaction, archive: Archive) -> None:
    """Have the texts, calls and sequences of one attempt written, which is in the ledger or new in this transaction."""
    tx.at_last(_write, archive)


async def _write(tx: Transaction, archives: Many[Archive]) -> None:
    await tx.session.flush()  # the attempts first
    # In one order everywhere: two transactions that write the same texts wait for each other, never in a circle.
    texts = dict(sorted((row["digest"], storable(row["body"])) for archive in archives for row in archive.texts))
    if texts:
        upsert = postgresql.insert if tx.postgres else sqlite.insert
        rows = [{"digest": digest, "body": body} for digest, body in texts.items()]
        await tx.session.execute(upsert(SystemText).on_conflict_do_nothing(), rows)
    calls = [
        row | {name: _shown(row[name]) for name in ("fork_was", "fork_now")} for archive in archives for row in archive.calls
    ]
    sequences = [row for archive in archives for row in archive.sequences]
    for model, rows in ((Call, calls), (Sequence, sequences)):
        if rows and tx.postgres:
            await copy(await tx.session.connection(), model, rows)
        elif rows:
            await tx.session.execute(insert(model), rows)


def _shown(text: str | None) -> str | None:
    """A text of an agent's, which may hold what is no Unicode."""
    return None if text is None else storable(text.encode(errors="replace").decode())
