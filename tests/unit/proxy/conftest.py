"""A scripted engine and a real proxy in front of it, for each test its own."""

from collections.abc import AsyncIterator

import fakeredis
import pytest
from aiohttp import web

from evener_proxy.delivery import Patience
from tests.unit.proxy.stub import Proxy, StubEngine, free_port, running_proxy


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    stub = StubEngine()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", stub.chat)
    app.router.add_post("/tokenize", stub.tokenize)
    app.router.add_get("/v1/models", stub.models)
    app.router.add_get("/weight_info", stub.weight_info)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    stub.url = f"http://127.0.0.1:{port}"
    yield stub
    await runner.cleanup()


@pytest.fixture
def redis() -> fakeredis.FakeAsyncRedis:
    return fakeredis.FakeAsyncRedis()


@pytest.fixture
async def proxy(engine: StubEngine, redis: fakeredis.FakeAsyncRedis) -> AsyncIterator[Proxy]:
    async with running_proxy(engine, redis, retry_s=1.0) as running:
        yield running


@pytest.fixture
async def hasty(engine: StubEngine, redis: fakeredis.FakeAsyncRedis) -> AsyncIterator[Proxy]:
    """A proxy that holds a response head for 0.3 s only."""
    patience = Patience(grace_s=0.3, keep_alive_s=0.05)
    async with running_proxy(engine, redis, patience=patience, retry_s=1.0) as running:
        yield running
