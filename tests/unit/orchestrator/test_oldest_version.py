"""Bounded staleness begins at the claim: lease and session name the oldest version that could still be trained."""

import asyncio

import msgspec
import pytest

from evener.api import RolloutLease
from evener.ids import session_id
from evener.messages import ROLLOUTS, PolicyPublished
from evener.trace.session import SessionSpec
from evener_runner.service import ProxySessions
from tests.unit.orchestrator.world import World, run_file


async def a_lease(world: World) -> RolloutLease:
    async with world.bus.consume(ROLLOUTS) as commands, asyncio.timeout(10):
        delivery = await commands.get()
        await delivery.ack()
    command = delivery.message
    return await world.api.claim_rollout(session_id(command.rollout_id, command.attempt), runner="r")


async def publish(world: World, epoch: int, *, step: int) -> int:
    """The learner publishes the next version; its number."""
    version = (await world.api.allot_version("first-run", epoch=epoch, step=step)).version
    weights = world.blobs.put("weights", f"step {step}".encode())
    await world.bus.publish(PolicyPublished(policy="first-run", epoch=epoch, step=step, version=version, weights=weights))
    await world.until(lambda state: state["version"] == version)
    return version


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_bounded_staleness_a_claim_names_the_oldest_version_that_can_be_trained(world, max_staleness):
    train = {"steps": 9, "groups_per_step": 2, "max_staleness": max_staleness}
    await world.submit(run_file(train=train, rollouts={"group_size": 2, "concurrent": 16}))
    assert (await a_lease(world)).oldest_version == 1, "version 0 is no version of a policy"
    learner = await world.api.claim_policy("first-run", learner="l")
    for step in (1, 2, 3):
        newest = await publish(world, learner.epoch, step=step)
    lease = await a_lease(world)
    assert newest == 4
    assert (lease.oldest_version, lease.version) == (newest - max_staleness, None)


async def test_an_evaluation_is_pinned_and_has_no_oldest_version(world):
    document = run_file()
    del document["train"]
    await world.submit(document)
    lease = await a_lease(world)
    assert (lease.purpose, lease.version, lease.oldest_version) == ("eval", 1, None)


async def test_the_runner_opens_the_session_with_the_leases_oldest_version(world):
    opened: list[SessionSpec] = []

    class Admin:
        async def open(self, spec: SessionSpec) -> str:
            opened.append(spec)
            return "key"

    await world.submit()
    lease = msgspec.structs.replace(await a_lease(world), oldest_version=3)
    assert await ProxySessions(Admin()).open(lease) == "key"
    assert (opened[0].oldest_version, opened[0].version, opened[0].session_id) == (3, None, lease.session_id)
