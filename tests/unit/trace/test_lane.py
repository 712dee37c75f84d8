"""A lane leaves nobody waiting, however it ends."""

import asyncio

import fakeredis
import pytest
from redis.exceptions import RedisError

from evener.trace.lane import Lane


@pytest.mark.parametrize("first", ["caller", "lane"])
async def test_when_the_event_loop_ends_nobody_waits_for_ever(first):
    """It cancels callers and the lane in any order, and waits for both; a caller may clean up by another script."""
    lane = Lane(fakeredis.FakeAsyncRedis())
    trip, begun, said = lane._trip, asyncio.Event(), []

    async def endless(_):
        begun.set()
        await asyncio.Event().wait()

    async def cleans_up():
        try:
            await lane.run("return 1", [], [])
        finally:
            said.append(await lane.run("return 2", [], []))

    async def hears():
        with pytest.raises(RedisError):
            await lane.run("return 1", [], [])

    lane._trip = endless
    caller, other = asyncio.create_task(cleans_up()), asyncio.create_task(hears())
    await begun.wait()
    lane._trip = trip
    ending = [caller, lane._sending]
    for task in ending if first == "caller" else ending[::-1]:
        task.cancel()
    done, _ = await asyncio.wait({caller, other}, timeout=10)
    assert done == {caller, other}
    await other
    assert said == [2]
