"""`evener sql`: one read-only query of the ledger. Nothing it runs can write, and nothing runs longer than `LIMIT_S`.

On SQLite the file is opened read-only; on Postgres the query runs in a read-only transaction, as the role ``evener_read``
where the user is a member of it. Called by the command line; rows are the same on both.
"""

import asyncio
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

from evener.errors import InputError
from evener.settings import Settings

LIMIT_S = 60
CONNECT_S = 10
ROLE = "evener_read"
STEPS = 100_000
"""Steps of SQLite's machine, about a millisecond, between two looks at the clock."""


def query(settings: Settings, text: str, *, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """The rows of a query. Raises InputError with the database's own message."""
    backend, _, place = settings.database.partition("://")
    if backend.partition("+")[0] == "sqlite":
        return _sqlite(settings, Path(place.removeprefix("/")), text, limit_s)
    return asyncio.run(_postgres(f"postgresql://{place}", text, limit_s))


def _sqlite(settings: Settings, path: Path, text: str, limit_s: float) -> list[dict[str, Any]]:
    if not path.exists() and settings.url is not None:
        there = "set EVENER_DATABASE_URL to its database (in compose: `docker compose exec orchestrator evener sql ...`)"
        raise InputError("settings_invalid", f"the ledger behind {settings.url} is not in this folder; {there}")
    if not path.exists():
        raise InputError("not_found", f"{path} is no ledger; start with `evener run FILE`")
    connection = sqlite3.connect(f"file:{path.absolute()}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    deadline = time.monotonic() + limit_s
    connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
    try:
        return [dict(row) for row in connection.execute(text)]
    except sqlite3.Error as error:
        late = time.monotonic() > deadline
        raise InputError("query_invalid", f"took longer than {limit_s:g} s" if late else str(error)) from error
    finally:
        connection.close()


async def _postgres(url: str, text: str, limit_s: float) -> list[dict[str, Any]]:
    try:
        import asyncpg
    except ImportError as error:
        raise InputError("settings_invalid", "EVENER_DATABASE_URL: needs `pip install 'evener[orchestrator]'`") from error
    try:
        connection: Any = await asyncpg.connect(url, timeout=CONNECT_S)
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise InputError("settings_invalid", f"EVENER_DATABASE_URL: {error or 'no answer'}") from error
    try:
        for name, decoder in {"jsonb": json.loads, "json": json.loads, "numeric": float}.items():
            await connection.set_type_codec(name, schema="pg_catalog", encoder=str, decoder=decoder)
        await connection.execute("BEGIN READ ONLY")  # never committed: Postgres 15 makes large objects even so
        await _confine(connection, limit_s)
        return [dict(row) for row in await connection.fetch(text)]
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise InputError("query_invalid", str(error)) from error
    finally:
        await connection.close()


async def _confine(connection: Any, limit_s: float) -> None:
    """Bound the transaction; it has read by then, so that no statement makes it a writing one (see SET TRANSACTION)."""
    if await connection.fetchval("SELECT pg_has_role(oid, 'MEMBER') FROM pg_roles WHERE rolname = $1", ROLE):
        await connection.execute(f"SET LOCAL ROLE {ROLE}")
    await connection.execute(f"SET LOCAL statement_timeout = {round(limit_s * 1000)}")
