"""Two learners on one policy, over the real orchestrator: one trains, the other stands by until the first is silent."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from accelerate.state import AcceleratorState
from sqlalchemy import text

from evener.messages import StepFinished
from evener.settings import Settings
from evener_learner import lease, publisher, service
from evener_learner.folders import pack_folder
from tests.relay import Relay
from tests.unit.learner.engines import StubEngine, serving
from tests.unit.learner.making import tiny_policy
from tests.unit.orchestrator.world import TOKEN, Workers, World, run_file, runner, verifier

pytestmark = pytest.mark.torch

LEASE_S = 600.0
"""Longer than the test: no lease ends because the machine is busy, only when a test ends it."""
STEPS = 3


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEATS", LEASE_S / 0.2)
    monkeypatch.setattr(service, "POLL_S", 0.1)
    monkeypatch.setattr(publisher, "FIRST_PAUSE_S", 0.05)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, lease_s=LEASE_S)
    await made.start()
    yield made
    await made.close()


async def expires(world: World) -> str:
    """When the learner's lease ends."""
    async with world.context.ledger.read() as session:
        return (await session.execute(text("SELECT learner_expires_at FROM runs"))).scalar_one()


async def let_it_expire(world: World) -> None:
    """As if the first learner had not been heard of for a lease's time; a heartbeat that was under way may still count."""
    expire = text("UPDATE runs SET learner_expires_at = '2020-01-01 00:00:00.000000' WHERE learner = 'first'")
    async with asyncio.timeout(240):
        while await _learner(world) == "first":
            await world.context.ledger.write(lambda tx: tx.session.execute(expire))
            await asyncio.sleep(0.5)


async def _learner(world: World) -> str:
    async with world.context.ledger.read() as session:
        return (await session.execute(text("SELECT learner FROM runs"))).scalar_one()


def record_steps(world: World) -> list[StepFinished]:
    """Every step that any learner reports, whether or not the ledger takes it."""
    steps: list[StepFinished] = []
    publish = world.bus.publish

    async def watched(message: Any, *, priority: int = 0) -> None:
        if isinstance(message, StepFinished):
            steps.append(message)
        await publish(message, priority=priority)

    world.bus.publish = watched
    return steps


async def served_version(world: World, engine: StubEngine) -> None:
    """Let the agents be sampled by what the engine serves."""
    while True:
        world.engine_version = int(engine.version) if engine.version.isdigit() else 1
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("end", ["killed", "cut off"])
async def test_once_the_second_learner_waits_and_takes_over_when_the_first_is_silent(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    # Two learners are two processes. Here they are one, whose state transformers has forgotten for each new trainer.
    monkeypatch.setattr(AcceleratorState, "_reset_state", staticmethod(lambda *_, **__: None))
    policy, engine, stop = tiny_policy(tmp_path / "policy"), StubEngine(), asyncio.Event()
    steps = record_steps(world)
    async with serving(engine.handle) as url, Relay(urlsplit(world.settings.api).port or 0) as relay:

        def learner(name: str, api: str) -> asyncio.Task[None]:
            here = Settings(url=api, api_token=TOKEN, engine_urls=[url], data=tmp_path / name)
            return asyncio.create_task(service.serve(here, world.bus, world.blobs, policy="first-run", stop=stop, name=name))

        file = run_file(train={"steps": STEPS, "groups_per_step": 2, "max_staleness": 1})
        await world.submit(file, weights=world.blobs.put("weights", pack_folder(policy)))
        first = learner("first", f"http://127.0.0.1:{relay.port}")
        await world.until(lambda _: engine.version == "1", timeout=240)
        second = learner("second", world.settings.api)
        try:
            until = await expires(world)
            async with asyncio.timeout(240):
                while await expires(world) == until:
                    await asyncio.sleep(0.1)
            async with Workers(lambda: runner(world), lambda: verifier(world), lambda: served_version(world, engine)):
                await world.until(lambda state: state["step"] >= 1, timeout=240)
                assert {step.epoch for step in steps} == {1}
                relay.refusing = True
                relay.cut()
                if end == "killed":
                    first.cancel()
                    await asyncio.wait({first}, timeout=20)
                await let_it_expire(world)
                await world.until(lambda _: any(step.epoch == 2 for step in steps), timeout=240)
                relay.refusing = False  # the first hears that it is no longer the learner
                state = await world.until_over(timeout=240)
        finally:
            stop.set()
            await asyncio.wait({first, second}, timeout=20)
    assert state["state"] == "done"
    assert state["groups"]["train"]["trained"] == 2 * STEPS
    assert {step.epoch for step in steps} == {1, 2}
    async with world.context.ledger.read() as session:
        rows = (await session.execute(text("SELECT step, epoch FROM steps ORDER BY step"))).all()
    held = {tuple(row) for row in rows}
    taken = list({step.step: step for step in steps if (step.step, step.epoch) in held}.values())  # a word may be said again
    groups = [group for step in taken for group in step.groups]
    assert [step.step for step in taken] == list(range(1, STEPS + 1))
    assert len(groups) == len(set(groups)) == 2 * STEPS
    if end == "cut off":
        assert not first.cancelled()
        first.result()
