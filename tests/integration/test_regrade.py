"""`evener rollouts regrade` on RabbitMQ and Postgres: two verifiers, one that died with a command, and one score for each."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pydantic import SecretStr
from rich.console import Console

from evener.archive import tar_of_files
from evener.bus import Bus, connect
from evener.cli import regrade
from evener.errors import Outcome
from evener.messages import EVENTS, WORKSPACES
from evener.settings import Settings
from evener_orchestrator.states import GroupState, RolloutState, RunState
from evener_verifier import service
from tests.unit.orchestrator.rows import a_group, a_rollout, a_run, a_score, a_task, an_attempt, write
from tests.unit.orchestrator.world import TOKEN, World, run_file

TEST = b"[ -f /workspace/done ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
RUN, GROUP = "00000000-0000-7000-8000-00000000000a", "00000000-0000-7000-8000-0000000000b0"
ROLLOUTS = [f"00000000-0000-7000-8000-0000000000c{number}" for number in range(4)]


@pytest.fixture
async def world(tmp_path: Path, fresh_amqp_url: str, fresh_database_url: str) -> AsyncIterator[World]:
    """An orchestrator on both stores, with a run that is over: a trained group of four, all given 0, two of them wrongly."""
    world = World(tmp_path, database=fresh_database_url)
    world.bus = bus = connect(fresh_amqp_url)
    await world.start()
    agent = world.blobs.put(
        "agent", tar_of_files({"task.toml": b"", "instruction.md": b"Do it.", "environment/workspace/given": b""})
    )
    grader = world.blobs.put("grader", tar_of_files({"task.toml": b"", "tests/test.sh": TEST}))
    left = [world.blobs.put("snapshots", tar_of_files({name: b""})) for name in ("done", "other", "done", "other")]
    scored = {"state": RolloutState.SCORED, "outcome": Outcome.FINISHED, "score": 0.0, "reward": 0.0}
    await write(
        world.context.ledger,
        [
            a_run(id=RUN, state=RunState.DONE, file=run_file(rollouts={"sandbox": "process"})),
            a_task(agent_bundle=agent, grader_bundle=grader),
        ],
        [a_group(GROUP, RUN, state=GroupState.TRAINED, size=4)],
        [a_rollout(name, GROUP, RUN, number=number, **scored) for number, name in enumerate(ROLLOUTS)],
        [an_attempt(name, snapshot=snapshot) for name, snapshot in zip(ROLLOUTS, left, strict=True)],
        [a_score(name, 0.0) for name in ROLLOUTS],
    )
    yield world
    await world.close()
    await bus.close()


async def dies_with_a_command(bus: Bus) -> None:
    """A verifier takes a command and is gone."""
    async with bus.consume(WORKSPACES, prefetch=1) as consumer:
        await consumer.get()


async def rows(url: str, query: str) -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(url.replace("+asyncpg", ""), timeout=10)
    try:
        return [tuple(row) for row in await connection.fetch(query)]
    finally:
        await connection.close()


async def test_each_snapshot_is_graded_again_once(
    world: World, tmp_path: Path, fresh_amqp_url: str, fresh_database_url: str
) -> None:
    stop = asyncio.Event()
    user = Settings(url=world.settings.api, api_token=SecretStr(TOKEN), data=tmp_path / "of-the-user")
    async with asyncio.timeout(60), AsyncExitStack() as ends:
        asked = asyncio.create_task(regrade.regrade(user, GROUP, Console(file=io.StringIO())))
        buses = [connect(fresh_amqp_url) for _ in range(3)]
        for bus in buses:
            ends.push_async_callback(bus.close)
        await dies_with_a_command(buses[0])
        own = world.settings.model_copy(update={"verifier_slots": 1})
        serving = [
            asyncio.create_task(
                service.serve(own.model_copy(update={"data": tmp_path / name}), bus, world.blobs, stop=stop, name=name)
            )
            for name, bus in zip(("one", "two"), buses[1:], strict=True)
        ]
        document = await asked
        while await world.bus.depth(WORKSPACES) or await world.bus.depth(EVENTS):
            await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(*serving)
    found = {row["rollout_id"]: (row["old"]["score"], row["new"]["score"], row["trained"]) for row in document["regrades"]}
    assert found == dict(zip(ROLLOUTS, [(0.0, 1.0, True), (0.0, 0.0, True)] * 2, strict=True))
    assert (document["kind"], document["rollouts"], document["left_out"]) == ("group", 4, 0)
    kept = await rows(fresh_database_url, "SELECT rollout_id, score, evidence ->> 'tier' FROM regrades ORDER BY rollout_id")
    assert kept == [(name, score, "in_process") for name, score in zip(ROLLOUTS, [1.0, 0.0] * 2, strict=True)]
    assert await rows(fresh_database_url, "SELECT DISTINCT score, reward FROM rollouts") == [(0.0, 0.0)]
    assert await rows(fresh_database_url, "SELECT DISTINCT score FROM scores") == [(0.0,)]
    assert await rows(fresh_database_url, "SELECT count(*) FROM outbox") == [(0,)]
