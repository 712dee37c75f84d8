import asyncio

import aiohttp

from evener import health
from evener.health import Counts
from tests.ports import free_port


async def answers() -> None:
    pass


async def refuses() -> None:
    raise ConnectionRefusedError("nobody at 10.0.0.1\nsecond line")


async def test_each_dependency_that_is_away_is_one_line(monkeypatch) -> None:
    monkeypatch.setattr(health, "CHECK_S", 0.05)
    checks = {"redis": answers, "bus": refuses, "api": lambda: asyncio.sleep(60)}
    assert await health.missing(checks) == ["bus: nobody at 10.0.0.1", "api: no answer within 0.05 s"]


async def test_it_is_ready_once_everything_answers() -> None:
    tried = 0

    async def at_the_second_try() -> None:
        nonlocal tried
        tried += 1
        if tried < 2:
            raise ConnectionRefusedError

    port, counts = free_port(), Counts()
    counts.add("runner_attempts_ended", outcome="finished")
    counts.add("runner_attempts_ended", outcome="finished")
    counts.set("runner_attempts", 3)
    async with (
        asyncio.timeout(20),
        health.serving("127.0.0.1", port, {"bus": at_the_second_try}, counts),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        for status, ready in ((503, False), (200, True)):
            reply = await http.get("/readyz")
            assert (reply.status, (await reply.json())["ready"]) == (status, ready)
        lines = (await (await http.get("/metrics")).text()).splitlines()
    assert 'evener_runner_attempts_ended_total{outcome="finished"} 2' in lines
    assert "evener_runner_attempts 3" in lines
    assert lines.count("# TYPE evener_runner_attempts_ended_total counter") == 1


async def test_a_stop_ends_the_wait() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stop.set)
    assert await asyncio.wait_for(health.wait_for({"bus": refuses}, stop), 5) is False
    assert await health.wait_for({"bus": answers}, asyncio.Event()) is True


async def test_an_url_that_answers_otherwise_is_named() -> None:
    async with (
        asyncio.timeout(20),
        health.serving("127.0.0.1", port := free_port(), {"bus": refuses}, Counts()),
        aiohttp.ClientSession() as http,
    ):
        check = health.answers(http, f"http://127.0.0.1:{port}/readyz")
        (line,) = await health.missing({"api": check})
    assert f"{port}/readyz: 503" in line
    assert "nobody at 10.0.0.1" in line
