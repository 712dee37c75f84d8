"""The database is brought to this version's tables, views and comments before anything else runs. Called once, at start.

The migrations lie in the package, so that an installed wheel has them. Several orchestrators may start at once: Postgres's
advisory lock and SQLite's write lock let one migrate and the others find nothing to do. Views hold no data: they are dropped
before a revision and made anew after it, with the comments of `models`, `views` and `view_columns`.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text
from sqlalchemy.schema import SetColumnComment, SetTableComment

from evener_orchestrator.ledger import reader
from evener_orchestrator.ledger.engine import Ledger
from evener_orchestrator.ledger.models import Base
from evener_orchestrator.view_columns import column_comment
from evener_orchestrator.views import VIEWS, create_view

MIGRATIONS = Path(__file__).parent.parent / "migrations"
ADVISORY_LOCK = 0x6576656E6572
"""``evener`` in ASCII."""


async def migrate(ledger: Ledger) -> None:
    """Run every migration that the database lacks."""
    async with ledger.writer.begin() as connection:
        if not ledger.sqlite:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
        await connection.run_sync(_migrate)


def _migrate(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    current = MigrationContext.configure(connection).get_current_revision()
    changed = current != ScriptDirectory.from_config(config).get_current_head()
    if changed:
        _drop_views(connection)
        command.upgrade(config, "head")
        _create_views(connection)
    if connection.dialect.name == "postgresql":
        if changed:
            _comment(connection)
        reader.allow(connection, anew=changed)


def _drop_views(connection: Connection) -> None:
    for name in VIEWS:
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")


def _create_views(connection: Connection) -> None:
    for name in VIEWS:
        connection.exec_driver_sql(create_view(name, connection.dialect.name))


def _comment(connection: Connection) -> None:
    for table in Base.metadata.sorted_tables:
        connection.execute(SetTableComment(table))
        for column in table.columns:
            connection.execute(SetColumnComment(column))
    for name, view in VIEWS.items():
        connection.exec_driver_sql(f"COMMENT ON VIEW {name} IS {_quoted(view.comment)}")
        for column in inspect(connection).get_columns(name):
            comment = _quoted(column_comment(name, column["name"]))
            connection.exec_driver_sql(f'COMMENT ON COLUMN {name}."{column["name"]}" IS {comment}')


def _quoted(comment: str) -> str:
    return "'" + comment.replace("'", "''") + "'"
