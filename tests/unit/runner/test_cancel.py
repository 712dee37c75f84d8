"""A runner that is cancelled while it stops is cancelled."""

import asyncio

import pytest

from evener_runner.runner import unless


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_cancellation_is_not_taken_for_a_stop(stopped: bool) -> None:
    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)

    stop = asyncio.Event()
    waiting = asyncio.create_task(unless(stop, slow_to_end()))
    await asyncio.sleep(0.02)
    if stopped:
        stop.set()
        await asyncio.sleep(0.02)
    waiting.cancel()
    done, _ = await asyncio.wait({waiting}, timeout=5)
    assert done
    assert waiting.cancelled()
