"""`evener serve orchestrator`: the orchestrator over the real trace store and the proxy's admin side.

Called by the command line and by the embedded stack, with the resources they made.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from sqlalchemy.exc import ArgumentError

from evener.blobs import Blobs
from evener.bus import Bus
from evener.errors import InputError
from evener.health import Check
from evener.proxy_admin import ProxyAdmin
from evener.settings import Settings
from evener.trace.store import TraceStore
from evener_orchestrator.api.health import ping
from evener_orchestrator.archive import Archiver
from evener_orchestrator.context import Context
from evener_orchestrator.ledger import Ledger
from evener_orchestrator.orchestrator import Work, run

if TYPE_CHECKING:
    from redis.asyncio import Redis


async def serve(
    settings: Settings,
    bus: Bus,
    redis: "Redis",
    blobs: Blobs,
    *,
    stop: asyncio.Event,
    ready: asyncio.Event,
    work: Work = "all",
) -> None:
    """Serve until ``stop`` is set.

    Raises InputError where the API's port is taken or the token is missing.
    """
    async with ProxyAdmin(settings.admin, settings.admin_token.get_secret_value()) as sessions:
        archiver = Archiver(TraceStore(redis))
        context = Context(settings, bus, blobs, archiver, sessions, ping_redis=redis.ping)
        await run(context, stop=stop, ready=ready, work=work)


@contextlib.asynccontextmanager
async def database_check(url: str) -> AsyncGenerator[Check]:
    """A check that the database at ``url`` answers, for whoever waits for it. Raises InputError for a URL of no database."""
    try:
        ledger = Ledger(url)
    except (ArgumentError, ImportError) as error:  # ImportError: a driver that is not installed
        raise InputError("settings_invalid", "EVENER_DATABASE_URL: must begin with postgresql+asyncpg://") from error
    try:
        yield lambda: ping(ledger)
    finally:
        await ledger.close()
