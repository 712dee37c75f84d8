"""A thread that writes has ended before its caller, cancelled, cleans up."""

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from evener.sandbox.threads import in_thread


async def test_a_cancelled_caller_waits_for_its_thread(tmp_path: Path):
    folder, going, go_on = tmp_path / "folder", threading.Event(), threading.Event()

    def write() -> None:
        going.set()
        go_on.wait(20)
        (folder / "late").mkdir(parents=True)
        raise ValueError

    async def work() -> None:
        try:
            await in_thread(write)
        finally:
            shutil.rmtree(folder)

    working = asyncio.create_task(work())
    await asyncio.to_thread(going.wait, 20)
    for _ in range(2):
        working.cancel()
        await asyncio.sleep(0.01)
        assert not working.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(working), 20)
    assert not folder.exists()


async def test_results_and_errors_come_through():
    assert await in_thread(lambda a, *, b: a + b, 1, b=2) == 3
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)
