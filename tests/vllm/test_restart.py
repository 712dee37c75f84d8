"""Weights of a policy with a head of its own, and an engine that dies and comes back with the weights it was started with."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from evener.engines.sampler import EngineUnavailable
from evener_learner import publisher
from evener_proxy.engines import Engines
from tests.unit.proxy.stub import session_spec
from tests.vllm.engine import Engine, Policies, ask, check_exact, connected
from tests.vllm.process import EngineProcess

pytestmark = pytest.mark.torch


@pytest.fixture
async def engine(untied: EngineProcess) -> AsyncIterator[Engine]:
    async with connected(untied) as engine:
        yield engine


async def test_a_head_of_its_own_is_replaced(engine: Engine, policies: Policies) -> None:
    for version, seed in ((5, 2), (6, 1)):
        await engine.serve(policies.random(seed, "llama"), version)
        check_exact(policies.random(seed, "llama"), await engine.sampler.sample(ask()))


async def test_a_restart_with_its_first_weights_is_noticed_and_mended(
    engine: Engine, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "WATCH_S", 0.2)
    newest = policies.random(2, "llama")
    learner, proxy = publisher.Publisher([engine.sink]), Engines([engine.sampler])
    session = session_spec(oldest_version=9)
    await learner.publish(9, newest)
    assert (await proxy.pick(session, attempt=0))[1].version == 9

    engine.process.kill()
    with pytest.raises(EngineUnavailable):
        await proxy.all[0].refresh()
    await asyncio.to_thread(engine.process.start)
    assert await engine.sink.version() != 9
    with pytest.raises(EngineUnavailable, match="it waits for the policy's weights"):
        await Engines([engine.sampler]).pick(session, attempt=0)
    check_exact(policies.random(1, "llama"), await engine.sampler.sample(ask()))

    watch = asyncio.create_task(learner.watch())
    async with asyncio.timeout(60):
        while await engine.sink.version() != 9:
            await asyncio.sleep(0.1)
    watch.cancel()
    assert (await Engines([engine.sampler]).pick(session, attempt=0))[1].version == 9
    check_exact(newest, await engine.sampler.sample(ask()))
