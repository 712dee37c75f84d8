"""The database is brought to this version's tables before anything else runs. Called once, at start.

The migrations lie in the package, so that an installed wheel has them. Several orchestrators may start at once: Postgres's
advisory lock and SQLite's write lock let one migrate and the others find nothing to do.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

from evener_orchestrator.ledger.engine import Ledger

MIGRATIONS = Path(__file__).parent.parent / "migrations"
ADVISORY_LOCK = 0x6576656E6572
"""``evener`` in ASCII."""


async def migrate(ledger: Ledger) -> None:
    """Run every migration that the database lacks."""
    async with ledger.writer.begin() as connection:
        if not ledger.sqlite:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
        await connection.run_sync(_upgrade)


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
