"""A Redis that is out of memory takes no call and gives sessions up; when it has room again the same session goes on."""

import redis.asyncio

from tests.unit.proxy.stub import StubEngine, eventually, running_proxy, serving


async def test_a_redis_without_memory_costs_no_call_and_can_be_emptied(fresh_redis_url: str) -> None:
    engine = StubEngine()
    async with (
        redis.asyncio.from_url(fresh_redis_url) as client,
        serving(engine),
        running_proxy(engine, client, retry_s=1.0) as proxy,
    ):

        async def pauses() -> bool:
            return "maxmemory" in (await proxy.admin.problem() or "")

        async def goes_on() -> bool:
            return await proxy.admin.problem() is None

        await eventually(goes_on)
        session, key = await proxy.open()
        over, _ = await proxy.open()
        assert (await proxy.chat(key))[0] == 200
        await client.config_set("maxmemory", "1mb")
        try:
            assert (await proxy.chat(key))[0] == 503
            await eventually(pauses)
            await proxy.admin.delete(over)
            assert await client.hgetall(f"evener:session:{over}") == {b"state": b"deleted"}
            await proxy.admin.delete("never-opened.1")  # whose runner may be a zombie
            assert await client.hgetall("evener:session:never-opened.1") == {b"state": b"deleted"}
        finally:
            await client.config_set("maxmemory", "0")
        await eventually(goes_on)
        assert (await proxy.chat(key))[0] == 200
        state = await proxy.admin.seal(session)
        assert (state.calls, state.fault, len(await proxy.store.load(session))) == (2, None, 2)
