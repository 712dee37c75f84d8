"""A scripted engine and a real proxy in front of it, for each test its own."""

from collections.abc import AsyncIterator

import fakeredis
import pytest

from evener_proxy.delivery import Patience
from tests.unit.proxy.stub import Proxy, StubEngine, running_proxy, serving


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    stub = StubEngine()
    async with serving(stub):
        yield stub


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
