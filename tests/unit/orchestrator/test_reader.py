"""The role that only reads sees no secret and changes nothing, whoever made it."""

import asyncpg
import pytest

from evener_orchestrator.ledger import Ledger
from evener_orchestrator.ledger.migrate import migrate
from evener_orchestrator.ledger.models import Base
from evener_orchestrator.ledger.reader import MAKE, ROLE
from evener_orchestrator.views import VIEWS


def plain(url):
    return url.replace("+asyncpg", "")


@pytest.fixture
async def reader(fresh_database_url):
    ledger = Ledger(fresh_database_url)
    await migrate(ledger)
    await ledger.close()
    connection = await asyncpg.connect(plain(fresh_database_url), timeout=10)
    await connection.execute(f"SET ROLE {ROLE}")
    yield connection
    await connection.close()


async def test_it_reads_every_view_and_table(reader):
    for name in [*VIEWS, *(table.name for table in Base.metadata.sorted_tables if table.name != "attempts")]:
        await reader.fetch(f"SELECT * FROM {name}")
    await reader.fetch("SELECT id, rollout_id, outcome, cause FROM attempts")


async def test_it_reads_no_secret(reader):
    for query in ("SELECT lease_hash FROM attempts", "SELECT * FROM attempts", "SELECT attempts::text FROM attempts"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await reader.fetch(query)
    for view in VIEWS:
        columns = await reader.fetch("SELECT column_name FROM information_schema.columns WHERE table_name = $1", view)
        assert columns
        assert "lease_hash" not in {row["column_name"] for row in columns}
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await reader.fetch("SELECT * FROM alembic_version")


async def test_it_writes_nothing(reader):
    for table in Base.metadata.sorted_tables:
        column = next(iter(table.columns)).name
        for statement in (
            f"INSERT INTO {table.name} DEFAULT VALUES",
            f"UPDATE {table.name} SET {column} = {column}",
            f"DELETE FROM {table.name}",
            f"TRUNCATE {table.name} CASCADE",
            f"DROP TABLE {table.name} CASCADE",
            f"SELECT {column} FROM {table.name} FOR UPDATE",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await reader.execute(statement)
    for statement in ("CREATE TABLE mine (id int)", "DROP VIEW trajectories", f"CREATE ROLE other IN ROLE {ROLE}"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await reader.execute(statement)


async def test_it_logs_in_and_such_a_session_reads_only(reader, fresh_database_url):
    url = plain(fresh_database_url).replace("//evener@", f"//{ROLE}@")
    asking = await asyncpg.connect(url, timeout=10)
    assert await asking.fetchval("SELECT current_user") == ROLE
    assert await asking.fetch("SELECT * FROM trajectories") == []
    assert await asking.fetchval("SHOW statement_timeout") == "1min"
    with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
        await asking.execute("CREATE TEMPORARY TABLE mine (id int)")
    await asking.close()


async def test_a_role_made_without_log_in_gets_it(reader, fresh_database_url):
    await reader.execute(f"RESET ROLE; ALTER ROLE {ROLE} NOLOGIN")
    ledger = Ledger(fresh_database_url)
    await migrate(ledger)
    await ledger.close()
    assert await reader.fetchval("SELECT rolcanlogin FROM pg_roles WHERE rolname = $1", ROLE)


async def test_an_administrator_makes_it_where_the_ledgers_user_may_not(fresh_database_url, monkeypatch):
    role = "evener_read_test"  # the real one is the whole server's
    monkeypatch.setattr("evener_orchestrator.ledger.reader.ROLE", role)
    admin = await asyncpg.connect(plain(fresh_database_url), timeout=10)
    user = "evener_plain_user"
    name = await admin.fetchval("SELECT current_database()")
    await admin.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'x' NOCREATEROLE NOSUPERUSER")
    try:
        await admin.execute(f"GRANT CREATE ON DATABASE {name} TO {user}; GRANT ALL ON SCHEMA public TO {user}")
        host = plain(fresh_database_url).split("@")[1]
        ledger = Ledger(f"postgresql://{user}:x@{host}")
        await migrate(ledger)  # says what is missing, and goes on
        assert await admin.fetchval("SELECT count(*) FROM pg_roles WHERE rolname = $1", role) == 0
        await admin.execute(MAKE.replace(ROLE, role).format(user=user))
        await migrate(ledger)
        await ledger.close()
        asking = await asyncpg.connect(f"postgresql://{user}:x@{host}", timeout=10)
        await asking.execute(f"SET ROLE {role}")
        assert await asking.fetch("SELECT * FROM trajectories") == []
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await asking.fetch("SELECT lease_hash FROM attempts")
        await asking.close()
    finally:
        await admin.execute(f"DROP OWNED BY {user} CASCADE; DROP ROLE IF EXISTS {role}; DROP ROLE {user}")
        await admin.close()
