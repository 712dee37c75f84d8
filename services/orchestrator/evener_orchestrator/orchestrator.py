"""One orchestrator process: the API, the event consumer, the planner and the outbox over one ledger.

Nothing is started where the API's port is taken or the token is missing. Called by `service.serve`.
"""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Literal

import uvicorn

from evener import log
from evener.errors import InputError
from evener_orchestrator.api.app import create_app
from evener_orchestrator.context import Context
from evener_orchestrator.ledger.migrate import migrate
from evener_orchestrator.loops import run_loops, run_regrading

Work = Literal["all", "regrades", "none"]
"""What is done beside the API: all there is, what grades snapshots again, or nothing, for those who only read."""

_log = log.get("orchestrator")


class _Server(uvicorn.Server):
    """Leaves the process's signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def run(context: Context, *, stop: asyncio.Event, ready: asyncio.Event, work: Work = "all") -> None:
    """Serve until ``stop`` is set. Raises InputError where the port is taken or a token lacks."""
    settings = context.settings
    if not settings.api_token.get_secret_value():
        raise InputError("settings_invalid", "EVENER_API_TOKEN: is empty")
    listener = _listen(settings.host, settings.api_port)
    try:
        await migrate(context.ledger)
        server = _Server(
            uvicorn.Config(
                create_app(context), log_config=None, access_log=False, proxy_headers=False, timeout_graceful_shutdown=5
            )
        )
        http = asyncio.create_task(server.serve(sockets=[listener]))
        loops = asyncio.create_task(_loops(context, work, stop))
        stopping = asyncio.create_task(stop.wait())
        ready.set()
        _log.info("serving", port=settings.api_port)
        await asyncio.wait((http, loops, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        for task in (loops, stopping):
            task.cancel()
        await asyncio.gather(loops, stopping, return_exceptions=True)
        await http
        if not stop.is_set():
            loops.result()
    finally:
        listener.close()
        await context.close()


async def _loops(context: Context, work: Work, stop: asyncio.Event) -> None:
    match work:
        case "all":
            await run_loops(context)
        case "regrades":
            await run_regrading(context)
        case "none":
            await stop.wait()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise InputError("port_occupied", f"{host}:{port} (EVENER_API_PORT): {error.strerror}") from error
    listener.setblocking(False)
    return listener
