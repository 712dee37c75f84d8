"""How long the ten queries of docs/sql.md take on a large ledger: prints JSON with milliseconds each (best of three).

``PYTHONPATH=.:services/orchestrator python bench/sql.py [--rollouts 10000]`` starts a Postgres of its own with default
settings; ``EVENER_TEST_DATABASE_URL`` names another, in which a database is made and dropped.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from pathlib import Path

import asyncpg

from bench.ledger import CALLS, fill, with_database
from evener.cli.sql import ROLE
from evener_orchestrator.ledger import Ledger
from evener_orchestrator.ledger.migrate import migrate
from tests.services import running_postgres

DOC = Path(__file__).parents[1] / "docs" / "sql.md"
QUESTION = re.compile(r"^### (.*?)$.*?^```sql\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HERE = {"'first-run'": "'bench'", "version = 3": "version = 21", "'t5-0'": "'o00000042'"}
"""What the example run of the documentation is called, and here."""


def questions() -> list[tuple[str, str]]:
    """The questions and queries of the documentation."""
    found = []
    for question, query in QUESTION.findall(DOC.read_text()):
        for there, here in HERE.items():
            query = query.replace(there, here)
        found.append((question, query))
    return found


async def measure(url: str, rollouts: int) -> dict[str, object]:
    """Fill a database and time every query in it."""
    ledger = Ledger(url)
    await migrate(ledger)
    filled = await fill(ledger, rollouts)
    await ledger.close()
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    await connection.execute("VACUUM ANALYZE")
    size = await connection.fetchval("SELECT pg_database_size(current_database())")
    tokens = await connection.fetchval("SELECT sum(tokens) FROM sequences")
    await connection.execute(f"SET ROLE {ROLE}")
    queries = []
    for question, query in questions():
        times = []
        for _ in range(3):
            began = time.perf_counter()
            rows = await connection.fetch(query)
            times.append((time.perf_counter() - began) * 1000)
        queries.append({"question": question, "ms": round(min(times), 1), "first_ms": round(times[0], 1), "rows": len(rows)})
        print(json.dumps(queries[-1]), file=sys.stderr)
    await connection.close()
    return {
        "rollouts": rollouts,
        "calls": rollouts * CALLS,
        "tokens": tokens,
        "database_mb": size >> 20,
        "fill_s": round(filled, 1),
        "queries": queries,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    given = parser.parse_args()
    with running_postgres() as postgres:
        print(json.dumps(asyncio.run(with_database(postgres, lambda url: measure(url, given.rollouts))), indent=2))
