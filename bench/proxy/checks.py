"""What a load alone does not show: calls in flight at once, memory of many open sessions, and what a kill loses."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from redis.asyncio import Redis as Client

from bench.proxy.client import Connection
from bench.proxy.conversation import PATHS, bodies
from bench.proxy.load import Case, Load, is_sample
from bench.proxy.sides import Engine, Ours, Redis
from evener.trace.store import TraceStore

IN_FLIGHT = 2000
HELD_S = 20.0  # a busy machine needs this long to have all of them in flight at once
SESSIONS = 10_000
_AT_ONCE = 64
_REPLY = re.compile(rb'"id":"chatcmpl-([0-9a-f]{24})"')


async def inflight(folder: Path, redis: Redis) -> dict[str, Any]:
    """`IN_FLIGHT` agents ask at the same time: the most calls that the engine had at once, and how many were refused."""
    engine = Engine(folder, HELD_S)
    side = Ours(folder, engine, redis)
    try:
        await engine.ready()
        await side.ready()
        keys = await _open(side, IN_FLIGHT)
        refused = await _ask(side, keys, asyncio.Semaphore(IN_FLIGHT))
        control = Connection(engine.port)
        _, answer = await control.request("GET", "/peak")
        control.close()
        return {"peak": json.loads(answer)["peak"], "refused": refused, "rss_mb": round(side.proxy.rss_mb, 1)}
    finally:
        side.proxy.stop()
        engine.process.kill()


async def open_sessions(folder: Path, engine: Engine, redis: Redis) -> dict[str, Any]:
    """Memory of a proxy with `SESSIONS` open sessions of one call each, and of the same proxy before."""
    side = Ours(folder, engine, redis)
    try:
        await side.ready()
        before = side.proxy.rss_mb
        refused = await _ask(side, await _open(side, SESSIONS), asyncio.Semaphore(_AT_ONCE))
        after = side.proxy.rss_mb
        return {"sessions": SESSIONS, "rss_mb": round(after, 1), "rss_mb_before": round(before, 1), "refused": refused}
    finally:
        side.proxy.stop()


async def killed(folder: Path, engine: Engine, redis: Redis, seconds: float) -> dict[str, Any]:
    """Kill the proxy in mid-load: how many replies agents got whole, and how many of those Redis does not have."""
    side = Ours(folder, engine, redis)
    await side.ready()
    load = Load(side, Case(32, 500, "chat"), keep=True)
    await asyncio.sleep(seconds)
    side.proxy.kill()
    await load.ended()
    client = Client.from_url(redis.url)
    store = TraceStore(client)
    whole = lost = 0
    for session, answers in load.replies.items():
        got = {match[1].decode() for answer in answers if (match := _REPLY.search(answer))}
        kept = {record.reply["id"] for record in await store.load(session)}
        whole += len(got)
        lost += len(got - kept)
    await client.aclose()
    return {"whole": whole, "lost": lost}


async def _open(side: Ours, count: int) -> list[str]:
    """The keys of fresh sessions."""
    keys: list[str] = []

    async def open_some(some: int) -> None:
        admin = Connection(side.admin_port)
        for _ in range(some):
            keys.append((await side.open(admin))[1])
        admin.close()

    await asyncio.gather(*(open_some(count // 20) for _ in range(20)))
    return keys


async def _ask(side: Ours, keys: list[str], turns: asyncio.Semaphore) -> int:
    """One call of each key; how many were not answered with a sample."""
    body = bodies("chat", 500, 1)[0]

    async def ask(key: str) -> bool:
        async with turns:
            calls = Connection(side.port)
            try:
                return is_sample(*await calls.request("POST", PATHS["chat"], body, key))
            except (OSError, EOFError):
                return False
            finally:
                calls.close()

    return (await asyncio.gather(*map(ask, keys))).count(False)
