"""`evener serve NAME`: one service as one process, on the stores that its settings name, until SIGTERM or SIGINT.

A process that lacks a setting does not start; one whose stores are away waits, and says for which. A stop takes nothing new
and lets what is in hand end for `Settings.drain_s`; `STOP_S` later the process is gone whatever happens. Beside the embedded
stack the only module that imports services.
"""

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import aiohttp

from evener import health, log
from evener.blobs import Blobs
from evener.bus import Bus, connect
from evener.cli.embedded import on_signals
from evener.errors import InputError
from evener.health import Check, Counts
from evener.messages import EVENTS
from evener.sandbox import choose
from evener.settings import Settings

if TYPE_CHECKING:
    from redis.asyncio import Redis

Service = Literal["proxy", "orchestrator", "runner", "verifier", "learner"]

NEEDS: dict[Service, tuple[str, ...]] = {
    "proxy": ("redis_url", "admin_token"),
    "orchestrator": ("database_url", "amqp_url", "redis_url", "api_token", "admin_token"),
    "runner": ("amqp_url", "api_token", "admin_token"),
    "verifier": ("amqp_url", "api_token"),
    "learner": ("amqp_url", "api_token"),
}
"""Settings without a usable default: a store of this process alone would be of no use to the others."""

STOP_S: dict[Service, float] = {"proxy": 3.0, "orchestrator": 5.0, "runner": 5.0, "verifier": 3.0, "learner": 45.0}
"""Longest end of a process after `Settings.drain_s`: the runner seals and reports what it stops, the orchestrator answers
requests, and the learner ends the update of one engine (`evener_learner.publisher.FINISH_S`) and its micro-batch."""

REDIS_CONNECTIONS = 64
_log = log.get("stack")


@dataclass
class Process:
    """One process: its settings, and what it opened, which is closed in reverse when it ends."""

    settings: Settings
    name: str
    stop: asyncio.Event
    exits: contextlib.AsyncExitStack
    counts: Counts = field(default_factory=Counts)

    def bus(self) -> Bus:
        """The broker of EVENER_AMQP_URL."""
        bus = connect(self.settings.amqp_url)
        self.exits.push_async_callback(bus.close)
        return bus

    def redis(self) -> "Redis":
        """A client of EVENER_REDIS_URL."""
        from redis.asyncio import BlockingConnectionPool, Redis

        try:
            # A pool that raises when it is full would fail the calls of a busy moment.
            pool = BlockingConnectionPool.from_url(
                self.settings.redis_url or "", max_connections=REDIS_CONNECTIONS, timeout=None
            )
        except ValueError as error:
            raise InputError("settings_invalid", "EVENER_REDIS_URL: must begin with redis:// or rediss://") from error
        client = Redis.from_pool(pool)
        self.exits.push_async_callback(client.aclose)
        return client

    def blobs(self) -> Blobs:
        """The blob store of EVENER_BLOBS_URL."""
        return Blobs(self.settings.blobs)

    async def reaches(self, *urls: str) -> list[Check]:
        """Checks that each of ``urls`` answers 200."""
        http = await self.exits.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=health.CHECK_S)))
        return [health.answers(http, url) for url in urls]

    @contextlib.asynccontextmanager
    async def ready(self, checks: Mapping[str, Check]) -> AsyncGenerator[bool]:
        """Health on the port of a worker, for its whole life; True once it has what it needs, False where it is to stop."""
        async with contextlib.AsyncExitStack() as health_server:
            if self.settings.health_port:
                await health_server.enter_async_context(self._health(self.settings.health_port, checks))
            yield await health.wait_for(checks, self.stop)

    async def waited(self, port: int, checks: Mapping[str, Check]) -> bool:
        """The same on the port where the service itself answers later."""
        async with self._health(port, checks):
            return await health.wait_for(checks, self.stop)

    def _health(self, port: int, checks: Mapping[str, Check]) -> contextlib.AbstractAsyncContextManager[None]:
        return health.serving(self.settings.host, port, checks, self.counts)


async def serve(settings: Settings, service: Service, *, name: str | None = None) -> int:
    """Run ``service`` until it is told to stop; the exit code. Raises InputError for a missing setting, and its faults."""
    check_settings(settings, service)
    stop = asyncio.Event()
    on_signals(stop)
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    async with contextlib.AsyncExitStack() as exits:
        run = SERVICES[service](Process(settings, name, stop, exits))
        return await _until_stopped(run, stop, patience_s=settings.drain_s + STOP_S[service])


def check_settings(settings: Settings, service: Service) -> None:
    """Raise InputError that names the first variable that ``service`` lacks."""
    for name in NEEDS[service]:
        value = getattr(settings, name)
        if not (value.get_secret_value() if name.endswith("_token") else value):
            raise InputError("settings_invalid", f"EVENER_{name.upper()}: is missing, and `evener serve {service}` needs it")


async def _until_stopped(run: Awaitable[None], stop: asyncio.Event, *, patience_s: float) -> int:
    """0 where the service ended within ``patience_s`` of the stop, 1 where it was cut. Raises what it ended with."""
    task, stopped = asyncio.ensure_future(run), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            _log.info("stopping", patience_s=patience_s)
            await asyncio.wait({task}, timeout=patience_s)
        if task.done():
            task.result()
            return 0
        _log.error("not drained in time", patience_s=patience_s)
        return 1
    finally:
        for left in (task, stopped):
            left.cancel()
        await asyncio.wait({task, stopped}, timeout=1.0)


async def _proxy(process: Process) -> None:
    from evener_proxy import service

    redis = process.redis()
    # What was imported lives for ever, and a call leaves few cycles: looking for them every 700 objects costs 6 % of its CPU.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    if await process.waited(process.settings.admin_port, {"redis": redis.ping}):
        await service.serve(process.settings, redis, stop=process.stop, ready=asyncio.Event())


async def _orchestrator(process: Process) -> None:
    from evener_orchestrator import service

    settings, bus, redis = process.settings, process.bus(), process.redis()
    database = await process.exits.enter_async_context(service.database_check(settings.database))
    checks = {"database": database, "bus": _answers(bus), "redis": redis.ping}
    if await process.waited(settings.api_port, checks):
        await service.serve(settings, bus, redis, process.blobs(), stop=process.stop, ready=asyncio.Event())


async def _runner(process: Process) -> None:
    from evener_runner import service

    await choose(process.settings.sandbox, trusted=True)  # a sandbox that is insisted on works, or nothing starts
    settings, bus = process.settings, process.bus()
    api, proxy = await process.reaches(f"{settings.api}/readyz", f"{settings.admin}/readyz")
    await _work(process, service.serve, bus, {"bus": _answers(bus), "api": api, "proxy": proxy})


async def _verifier(process: Process) -> None:
    from evener_verifier import service

    await choose(process.settings.sandbox, trusted=True)
    settings, bus = process.settings, process.bus()
    (api,) = await process.reaches(f"{settings.api}/readyz")
    await _work(process, service.serve, bus, {"bus": _answers(bus), "api": api})


class _Worker(Protocol):
    """`serve` of a runner or verifier."""

    async def __call__(
        self, settings: Settings, bus: Bus, blobs: Blobs, *, stop: asyncio.Event, name: str, drain_s: float, counts: Counts
    ) -> None: ...


async def _work(process: Process, work: _Worker, bus: Bus, checks: Mapping[str, Check]) -> None:
    """Let a worker work once it has what it needs."""
    settings = process.settings
    async with process.ready(checks) as ready:
        if ready:
            await work(
                settings,
                bus,
                process.blobs(),
                stop=process.stop,
                name=process.name,
                drain_s=settings.drain_s,
                counts=process.counts,
            )


async def _learner(process: Process) -> None:
    from evener_learner import service

    settings, bus = process.settings, process.bus()
    api, *engines = await process.reaches(f"{settings.api}/readyz", *(f"{url}/health" for url in settings.engines))
    checks = {"bus": _answers(bus), "api": api}
    checks |= {f"engine {url}": check for url, check in zip(settings.engines, engines, strict=True)}
    async with process.ready(checks) as ready:
        if ready:
            policy = settings.policy or None
            await service.serve(settings, bus, process.blobs(), policy=policy, stop=process.stop, name=process.name)


def _answers(bus: Bus) -> Check:
    return lambda: bus.depth(EVENTS)


SERVICES: dict[Service, Callable[[Process], Awaitable[None]]] = {
    "proxy": _proxy,
    "orchestrator": _orchestrator,
    "runner": _runner,
    "verifier": _verifier,
    "learner": _learner,
}


def serve_engine(settings: Settings, *, policy: Path | None, name: str) -> None:
    """Run the CPU engine in this process until it is told to stop. Raises InputError without a policy folder."""
    if policy is None:
        raise InputError("settings_invalid", "--policy: is missing, and `evener serve engine` needs it")
    from evener_engine.service import serve

    serve(policy, settings.host, settings.engine_port, name=name)
