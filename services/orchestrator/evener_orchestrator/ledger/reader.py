"""The role ``evener_read`` may read every table and view but the secrets, and do nothing else.

It logs in without a password of its own, so only where the server lets it (the socket of compose's postgres) or after an
administrator gives it one; `evener sql` takes it on. Roles belong to the whole server and need a right that the ledger's user
may lack: then an administrator makes it once (`MAKE`), and the next start of an orchestrator grants it what it may read.
Called by `migrate`.
"""

from sqlalchemy import Connection

from evener import log
from evener_orchestrator.ledger.models import Base
from evener_orchestrator.views import VIEWS

ROLE = "evener_read"
LET_IN = "; ".join(
    f"ALTER ROLE {ROLE} {what}" for what in ("LOGIN", "SET default_transaction_read_only = on", "SET statement_timeout = '60s'")
)
"""The settings are those of a session that logs in as the role. Grants say what it may do; these end what somebody forgot."""
MAKE = f"CREATE ROLE {ROLE}; {LET_IN}; GRANT {ROLE} TO {{user}};"
_log = log.get("orchestrator")


def allow(connection: Connection, *, anew: bool) -> None:
    """Make the role where it lacks and we may, and grant it what it may read (again where ``anew``)."""
    if not _exists(connection) and not _make(connection):
        user = connection.exec_driver_sql("SELECT quote_ident(current_user)").scalar_one()
        _log.warning("no_reader", role=ROLE, remedy=f"as an administrator: {MAKE.format(user=user)}")
        return
    if not _lets_in(connection):
        _let_in(connection)
    granted = connection.exec_driver_sql(f"SELECT has_table_privilege('{ROLE}', 'runs', 'SELECT')").scalar_one()
    if anew or not granted:
        _grant(connection)


def _exists(connection: Connection) -> bool:
    found = connection.exec_driver_sql(f"SELECT count(*) FROM pg_roles WHERE rolname = '{ROLE}'")  # noqa: S608
    return found.scalar_one() == 1


def _make(connection: Connection) -> bool:
    may = "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user"
    if not connection.exec_driver_sql(may).scalar_one():
        return False
    # Another database's orchestrator may make it at the same time.
    made = MAKE.format(user="CURRENT_USER")
    connection.exec_driver_sql(f"DO $$ BEGIN {made} EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$")
    return True


def _lets_in(connection: Connection) -> bool:
    return connection.exec_driver_sql(f"SELECT rolcanlogin FROM pg_roles WHERE rolname = '{ROLE}'").scalar_one()  # noqa: S608


def _let_in(connection: Connection) -> None:
    """Earlier versions made the role without log-in; where it is not ours to alter, it stays so."""
    connection.exec_driver_sql(f"DO $$ BEGIN {LET_IN}; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$")


def _grant(connection: Connection) -> None:
    schema = connection.exec_driver_sql("SELECT quote_ident(current_schema())").scalar_one()
    connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {ROLE}")
    connection.exec_driver_sql(f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {ROLE}")
    for table in Base.metadata.sorted_tables:
        shown = [column.name for column in table.columns if not column.info.get("secret")]
        which = "" if len(shown) == len(table.columns) else f" ({', '.join(shown)})"
        connection.exec_driver_sql(f"GRANT SELECT{which} ON {table.name} TO {ROLE}")
    connection.exec_driver_sql(f"GRANT SELECT ON {', '.join(VIEWS)} TO {ROLE}")
