"""How fast traces are archived on Postgres by binary COPY, and by plain INSERT: prints JSON with rows/s and MB/s of token data.

``PYTHONPATH=.:services/orchestrator python bench/archive.py [--rollouts 200]``; the database as for `bench/sql.py`.
"""

import argparse
import asyncio
import json
import time
from functools import partial

import numpy as np
from sqlalchemy import insert, text

from bench.ledger import CALLS, archive, groups, head, with_database
from evener_orchestrator.ledger import Ledger, Transaction
from evener_orchestrator.ledger.copy import copy
from evener_orchestrator.ledger.migrate import migrate
from evener_orchestrator.ledger.models import Attempt, Call, Group, Rollout, Sequence
from tests.services import running_postgres


async def by_copy(tx: Transaction, calls: list, sequence: dict) -> None:
    """As `ledger.traces` does."""
    connection = await tx.session.connection()
    await copy(connection, Call, calls)
    await copy(connection, Sequence, [sequence])


async def by_insert(tx: Transaction, calls: list, sequence: dict) -> None:
    """As it is done on SQLite."""
    await tx.session.execute(insert(Call), calls)
    await tx.session.execute(insert(Sequence), [sequence])


async def measure(url: str, rollouts: int) -> dict[str, object]:
    """Archive the same rollouts both ways, a transaction each."""
    ledger = Ledger(url)
    await migrate(ledger)
    planned = list(groups(rollouts))
    attempts = [attempt["id"] for _, _, some in planned for attempt in some if attempt["cause"] is None]

    async def plan(tx: Transaction) -> None:
        await head(tx)
        connection = await tx.session.connection()
        await tx.session.flush()
        await copy(connection, Group, [group for group, _, _ in planned])
        await copy(connection, Rollout, [rollout for _, members, _ in planned for rollout in members])
        await copy(connection, Attempt, [attempt for _, _, some in planned for attempt in some])

    await ledger.write(plan)
    found = {}
    for name, way in (("insert", by_insert), ("copy", by_copy), ("insert again", by_insert), ("copy again", by_copy)):
        wall = cpu = 0.0
        for number, attempt in enumerate(attempts):
            calls, sequence = archive(attempt, number, 1)
            began, began_cpu = time.perf_counter(), time.process_time()
            await ledger.write(partial(way, calls=calls, sequence=sequence))
            wall += time.perf_counter() - began
            cpu += time.process_time() - began_cpu
        rows = len(attempts) * (CALLS + 1)
        arrays = [value.nbytes for row in (*calls, sequence) for value in row.values() if isinstance(value, np.ndarray)]
        megabytes = len(attempts) * sum(arrays) / 1e6
        found[name] = {
            "rows_s": round(rows / wall),
            "mb_s": round(megabytes / wall, 1),
            "client_cpu_ms_a_row": round(cpu * 1000 / rows, 3),
        }
        async with ledger.writer.begin() as connection:
            await connection.execute(text("TRUNCATE calls, sequences"))
    await ledger.close()
    return {"rollouts": len(attempts), "rows": rows, "token_mb": round(megabytes, 1), **found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=200)
    given = parser.parse_args()
    with running_postgres() as postgres:
        print(json.dumps(asyncio.run(with_database(postgres, lambda url: measure(url, given.rollouts))), indent=2))
