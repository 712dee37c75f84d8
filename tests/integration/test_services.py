"""The fixtures for real services give what they promise: something empty, every time, whoever runs the tests."""

import os
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
import redis.asyncio

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("turn", [1, 2])
async def test_redis_is_empty(fresh_redis_url: str, turn: int) -> None:
    async with redis.asyncio.from_url(fresh_redis_url) as client:
        assert await client.dbsize() == 0
        await client.set("key", turn)


@pytest.mark.parametrize("turn", [1, 2])
async def test_the_database_is_empty(fresh_database_url: str, turn: int) -> None:
    connection = await asyncpg.connect(fresh_database_url.replace("+asyncpg", ""), timeout=10)
    try:
        assert await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
        await connection.execute("CREATE TABLE things (id int)")
    finally:
        await connection.close()


def inner_run(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one test that needs Redis where there is no program on the path."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_redis_is_empty"]
    kept = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("EVENER_TEST_")}
    env = {**kept, "PATH": str(tmp_path), **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_a_missing_service_skips_loudly(tmp_path: Path) -> None:
    done = inner_run(tmp_path)
    assert done.returncode == 0
    assert "2 skipped" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("NOT TESTED")]
    assert "2 tests need redis" in line
    assert "apt-get install redis-server" in line


def test_a_missing_service_fails_on_ci(tmp_path: Path) -> None:
    done = inner_run(tmp_path, CI="true")
    assert done.returncode == 1
    assert "needs redis: apt-get install redis-server" in done.stdout
