"""The runner as a service: until it is stopped, agents run; when `serve` returns, none of its agents lives.

Called by ``evener serve runner`` and by the embedded stack, with resources that they made.
"""

import asyncio

from evener.api import ApiClient, RolloutLease
from evener.blobs import Blobs
from evener.bus.port import Bus
from evener.errors import InfraError
from evener.health import Counts
from evener.proxy_admin import ProxyAdmin, SessionConflict
from evener.settings import Settings
from evener.trace.session import SessionSpec
from evener_runner import reaper
from evener_runner.attempt import Tools
from evener_runner.furnish import sandboxes
from evener_runner.outcome import SessionState
from evener_runner.runner import Runner


async def serve(
    settings: Settings,
    bus: Bus,
    blobs: Blobs,
    *,
    stop: asyncio.Event,
    name: str,
    drain_s: float = 0.0,
    counts: Counts | None = None,
) -> None:
    """Run agents until ``stop`` is set; ``name`` is this runner's in the ledger.

    After the stop agents may end by themselves for ``drain_s`` seconds; the rest is then stopped, and tried again elsewhere.
    """
    api = ApiClient(settings.api, settings.api_token.get_secret_value())
    admin = ProxyAdmin(settings.admin, settings.admin_token.get_secret_value())
    async with api, admin, asyncio.TaskGroup() as tasks:
        tools = Tools(settings, api, ProxySessions(admin), blobs)
        tasks.create_task(reaper.run(sandboxes(settings), stop))
        runner = Runner(bus, tools, name=name, slots=settings.runner_slots, drain_s=drain_s, counts=counts or Counts())
        tasks.create_task(runner.run(stop))


class ProxySessions:
    """The proxy's admin client in the shape of `evener_runner.attempt.Sessions`."""

    def __init__(self, admin: ProxyAdmin) -> None:
        self._admin = admin

    async def open(self, lease: RolloutLease) -> str:
        """Open the attempt's session; returns its key. Raises InfraError."""
        spec = SessionSpec(
            session_id=lease.session_id,
            rollout_id=lease.rollout_id,
            attempt=lease.attempt,
            harness=lease.harness.name,
            policy=lease.policy,
            purpose=lease.purpose,
            version=lease.version,
            oldest_version=lease.oldest_version,
            sampling=lease.sampling,
            budget=lease.budget,
            prompt_mode=lease.prompt_mode,
            thinking=lease.thinking,
        )
        try:
            return await self._admin.open(spec)
        except SessionConflict as error:
            raise InfraError("session_lost", f"{lease.session_id} was opened before, and its key is gone") from error

    async def read(self, session_id: str) -> SessionState:
        """What is known of it. Raises InfraError."""
        return await self._admin.read(session_id)

    async def seal(self, session_id: str) -> SessionState:
        """Close it for good. Raises InfraError."""
        return await self._admin.seal(session_id)

    async def problem(self, *, oldest_version: int = 0) -> str | None:
        """Why no agent would be answered now, by ``oldest_version`` or a later one; None where one would be."""
        return await self._admin.problem(oldest_version=oldest_version)
