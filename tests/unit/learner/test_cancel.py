"""A cancellation is never lost, whatever it coincides with (`asyncio.wait_for` of Python 3.11 swallows it, bpo-37658)."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evener.api import LearnerLease
from evener.bus import MemoryBus
from evener_learner.campaign import Campaign
from evener_learner.service import _end

TURNS = range(6)
"""Turns of the event loop between what is waited for and the cancellation: all that the wake-up of a waiter can take."""


def waiting_campaign(folder: Path) -> Campaign:
    """A campaign that has no group yet."""
    lease = LearnerLease(
        policy="tiny",
        epoch=1,
        lease_s=30.0,
        run_id="run",
        step=0,
        version=1,
        weights="",
        checkpoint=None,
        group_size=2,
        temperature=1.0,
        train={"steps": 1, "groups_per_step": 1},
    )
    nothing = cast("Any", None)
    made = Campaign(lease, api=nothing, bus=MemoryBus(), blobs=nothing, publisher=nothing, folder=folder)
    made._assembly = cast("Any", SimpleNamespace(sweep=lambda *_: [], take=lambda _: None))
    return made


@pytest.mark.parametrize("turns", TURNS)
async def test_a_learner_that_is_cancelled_as_a_group_arrives_ends(tmp_path: Path, turns: int) -> None:
    campaign = waiting_campaign(tmp_path)
    waiting = asyncio.create_task(campaign._next_step())
    await asyncio.sleep(0.01)
    campaign._arrived.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    done, _ = await asyncio.wait({waiting}, timeout=5)
    assert done
    assert waiting.cancelled()


async def test_the_end_of_a_service_passes_a_cancellation_on() -> None:
    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(60)

    async def wait_for_its_end() -> None:
        await _end(working)

    working = asyncio.create_task(slow_to_end())
    await asyncio.sleep(0)
    ending = asyncio.create_task(wait_for_its_end())
    await asyncio.sleep(0.01)
    ending.cancel()
    done, _ = await asyncio.wait({ending, working}, timeout=5)
    assert done == {ending, working}
    assert ending.cancelled()
    ended = asyncio.create_task(asyncio.sleep(60))
    await _end(ended)
    assert ended.cancelled()
