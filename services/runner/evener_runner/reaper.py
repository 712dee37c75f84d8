"""A sandbox whose owner is dead does not stay: its folder says who that was, and no other service is asked.

Run by `service.serve`, at the start and every minute.
"""

import asyncio
import contextlib
from pathlib import Path

from evener import log
from evener.sandbox import cgroups
from evener.sandbox.folders import reap

EVERY_S = 60.0
_log = log.get("runner")


async def run(root: Path, stop: asyncio.Event) -> None:
    """Remove what the dead left below ``root``, until ``stop`` is set."""
    while not stop.is_set():
        reaped = await asyncio.to_thread(reap, root, remove_cgroup=cgroups.remove)
        if reaped:
            _log.info("sandboxes of dead owners removed", sandboxes=reaped)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERY_S):
                await stop.wait()
