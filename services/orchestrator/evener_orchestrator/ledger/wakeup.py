"""A message written by one orchestrator wakes the outbox of every other: a commit tells, `listen` hears.

Only a hint: a notification that is lost costs the outbox's period of polling, never a message. SQLite has one process, which
wakes itself. `announce` is called by `engine.Ledger`, `listen` is run by `loops`.
"""

import asyncio
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

CHANNEL = "evener_outbox"


async def announce(session: AsyncSession) -> None:
    """Tell, when the transaction commits, that the outbox has something."""
    await session.execute(text(f"NOTIFY {CHANNEL}"))


async def listen(engine: AsyncEngine, wake: asyncio.Event) -> None:
    """Set ``wake`` at each announcement, on a connection of its own; returns when that connection is lost."""
    async with engine.connect() as connection:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        lost = asyncio.Event()

        def end(_connection: object) -> None:
            lost.set()

        def heard(*_notification: object) -> None:
            wake.set()

        driver.add_termination_listener(end)
        try:
            await driver.add_listener(CHANNEL, heard)
            wake.set()  # for what was written while nobody listened
            await lost.wait()
        finally:
            await connection.invalidate()  # it must not serve others while it listens
