"""The service over its real stores: Postgres where there is one, and the trace store on Redis's stand-in."""

import asyncio

import aiohttp
import fakeredis

from evener.blobs import Blobs
from evener.bus import MemoryBus
from evener.settings import Settings
from evener_orchestrator.service import serve
from tests.ports import free_port
from tests.unit.orchestrator.world import TOKEN, World, everyone, run_file


async def test_it_serves_until_it_is_stopped(tmp_path):
    settings = Settings(data=tmp_path, api_port=free_port(), api_token=TOKEN, admin_token=TOKEN)
    stop, ready = asyncio.Event(), asyncio.Event()
    redis = fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer())
    service = asyncio.create_task(serve(settings, MemoryBus(), redis, Blobs(settings.blobs), stop=stop, ready=ready))
    async with asyncio.timeout(20), aiohttp.ClientSession(settings.api) as http:
        await ready.wait()
        reply = await http.get("/readyz")
        assert (reply.status, await reply.json()) == (200, {"ready": True, "missing": []})
    stop.set()
    async with asyncio.timeout(20):
        await service


async def test_a_run_on_postgres_ends_done_and_its_arrays_can_be_queried(fresh_database_url, tmp_path):
    world = World(tmp_path, database=fresh_database_url)
    await world.start()
    await world.submit(run_file(eval={"tasks": "./held-out", "every": 1, "group_size": 2}))
    async with everyone(world):
        state = await world.until_over()
    assert state["state"] == "done"
    assert state["rollouts"]["done"] == state["rollouts"]["total"]
    (row, *_) = await world.api.get("/v1/harnesses/matrix")
    assert (row["n"], row["pass_at_1"]) == (4, 0.5)
    async with world.context.ledger.read() as session:
        connection = await session.connection()
        total = await connection.exec_driver_sql(
            "SELECT sum(p), count(*) FROM sequences s, unnest(s.token_ids, s.logprobs) AS t(token, p)"
        )
        probability, tokens = total.one()
    assert (probability, tokens) == (-0.75 * tokens / 8, tokens)
    await world.restart()
    await world.close()
