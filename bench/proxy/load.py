"""Agents in parallel, each asking again as soon as it is answered, and what that costs the proxy before them."""

import asyncio
import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from bench.proxy.client import Connection
from bench.proxy.conversation import PATHS, Dialect, bodies
from bench.proxy.processes import Process, module, python_env
from bench.proxy.sides import Refused, Side

TURNS = {500: 10, 8000: 20}
WARM_S = 1.0
WARM_MAX_S = 60.0
THROUGH_CLIENTS = 32  # 256 conversations of 20 turns would take a slow proxy minutes
THROUGH_MAX_S = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked of a proxy."""

    clients: int
    tokens: int
    dialect: Dialect

    def __str__(self) -> str:
        return f"{self.clients:>3} clients, {self.tokens:>4} tokens, {self.dialect}"


class Load:
    """Agents at work: each opens a session, talks it through, closes it, and begins another.

    ``keep``: sessions stay open, and ``replies`` holds the bodies that each session's agent got whole.
    """

    def __init__(self, side: Side, case: Case, *, keep: bool = False) -> None:
        self._side = side
        self._path = PATHS[case.dialect]
        self._bodies = bodies(case.dialect, case.tokens, TURNS[case.tokens])
        self._keep = keep
        self.replies: dict[str, list[bytes]] = {}
        self.waits: list[float] = []
        self.failures: dict[str, int] = {}
        self._agents = [asyncio.create_task(self._work()) for _ in range(case.clients)]

    async def warm(self) -> None:
        """Wait until every agent has been answered once on the average, which a slow proxy needs longer for."""
        began = time.monotonic()
        await asyncio.sleep(WARM_S)
        while len(self.waits) < len(self._agents) and time.monotonic() - began < WARM_MAX_S:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def through(self, before: int) -> None:
        """Wait until as many calls came after the first ``before`` as all conversations have turns, at most `THROUGH_MAX_S`."""
        began = time.monotonic()
        whole = before + len(self._agents) * len(self._bodies)
        while len(self.waits) < whole and time.monotonic() - began < THROUGH_MAX_S:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """End all agents. Raises what one of them ended with before."""
        for agent in self._agents:
            agent.cancel()
        for error in await self.ended():
            raise error

    async def ended(self) -> list[BaseException]:
        """Wait until all agents have ended: the errors that ended them."""
        ends = await asyncio.gather(*self._agents, return_exceptions=True)
        return [end for end in ends if end is not None and not isinstance(end, asyncio.CancelledError)]

    async def _work(self) -> None:
        calls, admin = Connection(self._side.port), Connection(self._side.admin_port)
        try:
            while True:
                try:
                    await self._talk(calls, admin)
                except Refused as error:
                    self._failed(str(error))
        finally:
            calls.close()
            admin.close()

    async def _talk(self, calls: Connection, admin: Connection) -> None:
        session, key = await self._side.open(admin)
        for body in self._bodies:
            answer = await self._call(calls, body, key)
            if self._keep and answer is not None:
                self.replies.setdefault(session, []).append(answer)
        if not self._keep:
            await self._side.close(admin, session)

    async def _call(self, calls: Connection, body: bytes, key: str) -> bytes | None:
        began = time.perf_counter()
        status, answer = await calls.request("POST", self._path, body, key)
        if is_sample(status, answer):
            self.waits.append(time.perf_counter() - began)
            return answer
        self._failed(f"{status} {answer[:200]!r}")
        return None

    def _failed(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1


def is_sample(status: int, answer: bytes) -> bool:
    """Whether an answer is the engine's sample, and not an error or a last reply of the proxy."""
    return status == 200 and b"ls -la" in answer


async def measure(side: Side, case: Case, seconds: float, beside: Process | None = None) -> dict[str, Any]:
    """One row: what ``case`` costs ``side`` in ``seconds`` after warming up; CPU of ``beside`` is told too.

    Up to `THROUGH_CLIENTS` it goes on for whole conversations: of a slow proxy only their first, cheap turns would be seen.
    """
    load = Load(side, case)
    try:
        await load.warm()
        probe = await _probe(side, seconds)
        before, began = len(load.waits), time.perf_counter()
        cpu, other = side.proxy.cpu_s, beside.cpu_s if beside else 0.0
        await asyncio.sleep(seconds)
        if case.clients <= THROUGH_CLIENTS:
            await load.through(before)
        took = time.perf_counter() - began
        cpu, other = side.proxy.cpu_s - cpu, (beside.cpu_s if beside else 0.0) - other
        waits = sorted(load.waits[before:])
        health, _ = await probe.communicate()
    finally:
        await load.stop()
    calls = max(1, len(waits))
    return {
        "side": side.name,
        **asdict(case),
        "calls": len(waits),
        "seconds": round(took, 2),
        "calls_s": round(len(waits) / took, 1),
        "cpu_ms": round(1000 * cpu / calls, 3),
        "redis_cpu_ms": round(1000 * other / calls, 3) if beside else None,
        "wait_p50_ms": round(1000 * at(waits, 0.5), 1),
        "wait_p99_ms": round(1000 * at(waits, 0.99), 1),
        "health_p99_ms": round(at(sorted(json.loads(health)), 0.99), 1),
        "rss_mb": round(side.proxy.rss_mb, 1),
        "failures": load.failures,
    }


async def _probe(side: Side, seconds: float) -> asyncio.subprocess.Process:
    argv = module("bench.proxy.probe", side.port, side.health, seconds)
    return await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, env=os.environ | python_env())


def at(ordered: list[float], share: float) -> float:
    """The value below which ``share`` of an ascending list lies; 0 where it is empty."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
