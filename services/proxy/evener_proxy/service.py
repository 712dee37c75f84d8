"""The proxy runs until it is told to stop: agent side and admin side in one event loop, watchers beside them.

Any number of replicas may run on one Redis; each has a name of its own and a lease that proves it alive. Called by
`evener serve proxy` and by the embedded stack.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

import uvicorn
from redis.asyncio import Redis

from evener import log
from evener.engines.vllm import VllmSampler
from evener.errors import InputError
from evener.settings import Settings
from evener.trace.store import TraceStore
from evener_proxy.admin import create_admin
from evener_proxy.app import create_app
from evener_proxy.calls import RETRY_S, Calls
from evener_proxy.delivery import Delivery, Patience
from evener_proxy.engines import Engines
from evener_proxy.metrics import Metrics
from evener_proxy.sessions import LEASE_S, Sessions
from evener_proxy.store_check import check_store

_BACKLOG = 4096
_log = log.get("proxy")


async def serve(
    settings: Settings,
    redis: Redis,
    *,
    stop: asyncio.Event,
    ready: asyncio.Event,
    patience: Patience | None = None,
    retry_s: float = RETRY_S,
) -> None:
    """Serve until ``stop`` is set, then drain. Sets ``ready`` once both ports answer.

    Calls in flight may then end for ``settings.drain_s``; longer ones are cut, and their agents ask another replica. Port 0 is
    any free port. ``redis`` is the caller's to close. Raises InputError ``port_occupied``, or ``redis_unsafe`` where a Redis of
    its own process (EVENER_REDIS_URL) could lose captures.
    """
    if settings.redis_url is not None:
        await check_store(redis)
    with _bind(settings.host, settings.proxy_port) as agents, _bind(settings.host, settings.admin_port) as admins:
        key = settings.engine_key.get_secret_value() if settings.engine_key is not None else None
        samplers = [VllmSampler(url, key=key, model=settings.engine_model) for url in settings.engines]
        metrics = Metrics()
        engines = Engines(list(samplers))
        sessions = Sessions(TraceStore(redis))
        calls = Calls(sessions, engines, metrics, retry_s=retry_s)
        delivery = Delivery(calls, sessions, metrics, patience or Patience())
        admin = create_admin(sessions, engines, metrics, redis, settings.admin_token.get_secret_value())
        agent_side, admin_side = (
            _Server(_config(app, drain_s=settings.drain_s)) for app in (create_app(sessions, delivery, calls, metrics), admin)
        )
        # The lease is there before the first call can be.
        await sessions.store.beat(sessions.replica, lease_s=LEASE_S, sessions=())
        watchers = [
            sessions.watch(),
            sessions.hear_seals(),
            sessions.flush_marks(),
            *(engine.watch() for engine in engines.all),
        ]
        try:
            await _run([(agent_side, agents), (admin_side, admins)], watchers, stop, ready)
        finally:
            await sessions.end()
            await asyncio.gather(*(sampler.close() for sampler in samplers))
            _log.info("stopped", calls=metrics.calls, sampled_tokens=metrics.sampled_tokens, in_flight=metrics.in_flight)


async def _run(
    servers: "list[tuple[_Server, socket.socket]]",
    watchers: Sequence[Coroutine[Any, Any, None]],
    stop: asyncio.Event,
    ready: asyncio.Event,
) -> None:
    watching = [asyncio.create_task(watcher) for watcher in watchers]
    serving = [asyncio.create_task(server.serve(sockets=[bound])) for server, bound in servers]
    try:
        while not all(server.started for server, _ in servers):
            await _any_of([*watching, *serving], timeout=0.01)
        ready.set()
        _log.info("serving", ports=[bound.getsockname()[1] for _, bound in servers])
        stopping = asyncio.create_task(stop.wait())
        await _any_of([stopping, *watching, *serving], timeout=None)
        stopping.cancel()
    finally:
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*serving, return_exceptions=True)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def _any_of(tasks: list[asyncio.Task[Any]], *, timeout: float | None) -> None:
    """Wait until one of ``tasks`` ends; raise what it raised."""
    done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


class _Server(uvicorn.Server):
    """Uvicorn inside a program that handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to the program."""
        yield


def _config(app: Callable[..., Any], *, drain_s: float) -> uvicorn.Config:
    # `access_log=False` takes the handlers away that are there now. A line of it may hold a key (``?key=``): none is ever made.
    logging.getLogger("uvicorn.access").disabled = True
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )


@contextlib.contextmanager
def _bind(host: str, port: int) -> Generator[socket.socket]:
    """A listening socket, for uvicorn. One that is only bound does not keep the port from another that reuses addresses."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
            bound.listen(_BACKLOG)
        except OSError as error:
            raise InputError("port_occupied", f"{host}:{port}: {error.strerror}") from error
        yield bound
    finally:
        bound.close()
