"""`evener doctor` names what is wrong with a store and what to do."""

import asyncio
import sqlite3
from contextlib import closing

import pytest

from evener.blobs import Blobs
from evener.cli.stores import examine_stores, redis_fault
from evener.settings import Settings
from tests.ports import free_port
from tests.unit.orchestrator.world import migrated_ledger

HEALTHY = {"maxmemory_policy": "noeviction", "used_memory": 1 << 20, "maxmemory": 0, "aof_last_write_status": "ok"}


@pytest.mark.parametrize(
    ("info", "state", "says"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, "missing", "set noeviction"),
        ({"maxmemory": 1 << 20}, "missing", "out of memory"),
        ({"maxmemory": (1 << 20) + 1000}, "note", "raise maxmemory"),
        ({"aof_last_write_status": "err"}, "missing", "cannot write to its disk"),
        ({"rdb_last_bgsave_status": "err"}, "missing", "cannot write to its disk"),
        ({"loading": 1}, "missing", "wait"),
    ],
)
def test_faults_of_redis(info, state, says):
    found = redis_fault(HEALTHY | info)
    assert found is not None
    assert found[0] == state
    assert says in found[1]


def test_a_healthy_redis_has_no_fault():
    assert redis_fault(HEALTHY) is None


def test_stores_that_do_not_answer_are_named(tmp_path):
    port = free_port()
    settings = Settings(
        data=tmp_path,
        amqp_url=f"amqp://evener:hidden@127.0.0.1:{port}/",
        redis_url=f"redis://127.0.0.1:{port}/0",
        database_url=f"postgresql+asyncpg://evener:hidden@127.0.0.1:{port}/x",
    )
    lines = {line.name: line for line in examine_stores(settings)}
    for name, variable in (("rabbitmq", "AMQP"), ("redis", "REDIS"), ("postgres", "DATABASE")):
        assert lines[name].state == "missing"
        assert f"EVENER_{variable}_URL" in lines[name].detail
        assert "hidden" not in lines[name].detail
    assert lines["blobs"].state == "ok"


def test_a_blob_store_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "blobs").write_text("a file where a folder should be")
    (line,) = examine_stores(Settings(data=tmp_path))
    assert (line.name, line.state) == ("blobs", "missing")
    assert "EVENER_BLOBS_URL" in line.detail


def test_nothing_of_the_question_stays(tmp_path):
    Blobs(tmp_path / "blobs").put("logs", b"kept")
    examine_stores(Settings(data=tmp_path))
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_a_blob_that_an_unfinished_run_needs_is_missed(tmp_path):
    (tmp_path / "ledger.db").write_bytes(asyncio.run(migrated_ledger()))
    settings, lost = Settings(data=tmp_path), "sha256:" + "0" * 64
    kept = Blobs(settings.blobs).put("agent", b"kept")
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        insert(database, "runs", id="r", name="r", kind="eval", state="running", policy="p", file="{}", trusted=1)
        insert(database, "tasks", digest="t", task_id="t", family="f", agent_bundle=kept, grader_bundle=lost)
        insert(database, "run_tasks", run_id="r", purpose="eval", position=0, task_digest="t")
        (line,) = examine_stores(settings)
        assert (line.state, f"1 that an unfinished run needs are gone, grader/{lost} first" in line.detail) == ("missing", True)
        database.execute("UPDATE runs SET state = 'done'")
        database.commit()
    (line,) = examine_stores(settings)
    assert line.state == "ok"


def insert(database, table, **given):
    """A row with every column that must have a value."""
    columns = {
        row[1]: "2026-01-01 00:00:00" if row[1].endswith("_at") else "" if "CHAR" in row[2] or "TEXT" in row[2] else 0
        for row in database.execute(f"PRAGMA table_info({table})")
        if row[3] and row[4] is None
    } | given
    database.execute(
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", [*columns.values()]
    )
    database.commit()
