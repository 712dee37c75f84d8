"""Invariant 13 between the event loop and the training thread."""

import asyncio
import time
from pathlib import Path

import pytest

from evener_learner.worker import Feed, StepResult, Stopped, TrainerThread

RESULT = StepResult(Path("weights"), {"loss": 0.5}, None)


def echo(feed: Feed) -> None:
    feed.ready()
    while True:
        feed.next()
        feed.done(RESULT)


async def test_steps_come_back_in_turn() -> None:
    async with TrainerThread(echo) as trainer:
        for _ in range(3):
            assert await asyncio.wait_for(trainer.train([]), 5) is RESULT


async def test_it_stops_at_once_while_it_waits_for_a_step() -> None:
    async with asyncio.timeout(10), TrainerThread(echo):
        pass


async def test_it_stops_between_micro_batches_and_the_waiter_hears_it() -> None:
    def slow(feed: Feed) -> None:
        feed.ready()
        feed.next()
        while True:
            feed.check()
            time.sleep(0.01)

    async with TrainerThread(slow) as trainer:
        step = asyncio.create_task(trainer.train([]))
        await asyncio.sleep(0.05)
    with pytest.raises(Stopped):
        await asyncio.wait_for(step, 5)


async def test_live_a_failing_step_is_an_error_now_and_later() -> None:
    def failing(feed: Feed) -> None:
        feed.ready()
        feed.next()
        raise FloatingPointError("gradient norm is nan")

    async with TrainerThread(failing) as trainer:
        for _ in range(2):
            with pytest.raises(FloatingPointError):
                await asyncio.wait_for(trainer.train([]), 5)


async def test_live_a_policy_that_cannot_be_loaded_is_an_error() -> None:
    def unreadable(feed: Feed) -> None:
        raise OSError("no config.json")

    with pytest.raises(OSError, match=r"config\.json"):
        async with TrainerThread(unreadable):
            pass


async def test_a_cancelled_waiter_does_not_break_the_thread() -> None:
    async with TrainerThread(echo) as trainer:
        step = asyncio.create_task(trainer.train([]))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(trainer.train([]), 5) is RESULT
