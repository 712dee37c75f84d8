"""Each service runs by itself, twice where it scales, on real stores; whichever is stopped amid a run, nothing is lost."""

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest
import redis

from evener.bus import connect
from evener.messages import EVENTS, ROLLOUTS, WORKSPACES, train_queue
from tests.conftest import TEST_POLICY
from tests.e2e.place import run_file
from tests.e2e.processes import Stack, running_stack

pytestmark = pytest.mark.e2e

RUN_S = 900.0
"""Longest run; it takes a minute on two idle cores."""

RESTARTED = ("proxy-0", "orchestrator-0", "runner-0", "verifier-0", "engine", "learner")

STEPS = 4
TRAIN = f"[train]\nsteps = {STEPS}\ngroups_per_step = 4\nlearning_rate = 1e-3\nmax_staleness = 1"


@pytest.fixture
def stack(tmp_path: Path, fresh_amqp_url: str, fresh_redis_url: str, fresh_database_url: str) -> Iterator[Stack]:
    with running_stack(tmp_path, database=fresh_database_url, amqp=fresh_amqp_url, redis=fresh_redis_url) as stack:
        yield stack


def test_a_run_on_two_of_each_while_each_is_stopped_and_started_in_turn_loses_nothing(stack: Stack) -> None:
    with urllib.request.urlopen(stack.services["runner-0"].health, timeout=10) as response:
        assert json.loads(response.read()) == {"ready": True, "missing": []}
    run(stack)
    everything_is_accounted_for(stack)


def stop_each_in_turn(stack: Stack) -> None:
    """Once both of each have worked, stop and start every service; in between rollouts go on."""
    until(lambda: min(calls_of(stack, n) for n in (0, 1)) > 0)
    until(lambda: len(rows(stack, "SELECT DISTINCT runner FROM attempts WHERE runner IS NOT NULL")) == 2)
    for name in RESTARTED:
        before = stack.done()
        service = stack.services[name]
        started = time.monotonic()
        assert service.stop() == 0, name
        assert time.monotonic() - started < 30, name
        service.start()
        service.until_ready()
        until(lambda before=before: stack.done() > before, seconds=RUN_S / 2)


def run(stack: Stack) -> None:
    """Train four steps of four groups of four to their end, while every service is stopped and started."""
    changes = {"eval": "", "train": TRAIN, "rollouts": "[rollouts]\ngroup_size = 4\nconcurrent = 8"}
    child = stack.run(run_file(stack.folder, run=TEST_POLICY, **changes))
    deadline = time.monotonic() + RUN_S
    try:
        while stack.done() < 3:
            assert child.poll() is None, (stack.folder / "run.log").read_text()
            assert time.monotonic() < deadline, "no rollout ended"
            time.sleep(0.2)
        stop_each_in_turn(stack)
        assert child.poll() is None, "the run was over before every service had been stopped"
        code = child.wait(max(1.0, deadline - time.monotonic()))
    finally:
        child.kill()
        child.wait(10)
    assert code == 0, (stack.folder / "run.log").read_text()
    state = json.loads((stack.folder / "run.json").read_text())
    assert (state["state"], state["step"]) == ("done", STEPS)
    # A version that was allotted to a learner that was stopped before it could publish it is lost, and the next is greater.
    assert state["version"] >= 1 + STEPS
    assert state["groups"]["train"]["trained"] == 4 * STEPS, state["groups"]
    assert not list((stack.folder / "of-the-user").glob("*.db")), "an embedded stack was started"


def everything_is_accounted_for(stack: Stack) -> None:
    """Every rollout has one outcome, and it is no fault of ours; every call is in the ledger once; nothing is left behind."""
    assert rows(stack, "SELECT * FROM rollouts WHERE outcome IS NULL OR outcome = 'infra_error'") == []
    trained = (
        "SELECT count(*) AS n FROM rollouts JOIN groups ON groups.id = group_id AND groups.state = 'trained' GROUP BY groups.id"
    )
    assert [row["n"] for row in rows(stack, trained)] == [4] * (4 * STEPS)
    assert ask(stack, "SELECT count(*) FROM attempts WHERE ended_at IS NULL") == 0
    until(lambda: ask(stack, "SELECT count(*) FROM attempts WHERE released_at IS NULL") == 0)
    until(lambda: ask(stack, "SELECT count(*) FROM outbox") == 0)
    codes = stack.stop()
    assert set(codes.values()) == {0}, codes
    stopped = [line for n in (0, 1) for line in stack.services[f"proxy-{n}"].events("stopped")]
    calls, sampled = (sum(line[name] for line in stopped) for name in ("calls", "sampled_tokens"))
    assert calls == ask(stack, "SELECT count(*) FROM calls")
    assert sampled == ask(stack, "SELECT sum(cardinality(completion_ids)) FROM calls")
    assert left_in_redis(stack) == []
    assert asyncio.run(left_in_queues(stack.amqp)) == {}


def left_in_redis(stack: Stack) -> list[str]:
    """Keys that hold more than the word that a session was deleted, which keeps its late words out for a day."""
    with redis.Redis.from_url(stack.redis) as client:
        keys = [key for key in client.scan_iter("*") if not key.startswith(b"evener:replica:")]
        tombs = {key for key in keys if key.startswith(b"evener:session:") and client.hgetall(key) == {b"state": b"deleted"}}
        assert all(0 < client.ttl(key) <= 24 * 3600 for key in tombs)
        return [key.decode() for key in keys if key not in tombs]


async def left_in_queues(amqp: str) -> dict[str, int]:
    """Messages by queue, the dead letters among them."""
    bus = connect(amqp)
    try:
        depths = {queue: await bus.depth(queue) for queue in (ROLLOUTS, WORKSPACES, EVENTS, train_queue(TEST_POLICY))}
        depths["dead letters"] = len(await bus.dead_letters())
    finally:
        await bus.close()
    return {queue: depth for queue, depth in depths.items() if depth}


def calls_of(stack: Stack, n: int) -> int:
    """Calls that a proxy says it has committed."""
    url = stack.services[f"proxy-{n}"].health.replace("/readyz", "/metrics")
    with urllib.request.urlopen(url, timeout=10) as response:
        found = re.search(r"^evener_proxy_calls_total (\d+)$", response.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def rows(stack: Stack, query: str) -> list[asyncpg.Record]:
    async def fetch() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(stack.database.replace("+asyncpg", ""), timeout=10)
        try:
            return await connection.fetch(query, timeout=30)
        finally:
            await connection.close()

    return asyncio.run(fetch())


def ask(stack: Stack, query: str) -> int:
    return rows(stack, query)[0][0]


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)
