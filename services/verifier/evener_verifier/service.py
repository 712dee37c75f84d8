"""A command is acknowledged when its score is published, and not before: a verifier that dies loses nothing.

Called by ``evener serve verifier`` and by the embedded stack, with resources that they made.
"""

import asyncio
import contextlib

from evener import log
from evener.api import ApiClient, Refused
from evener.blobs import Blobs
from evener.bus.port import Bus, Consumer, Delivery
from evener.errors import InfraError, InputError
from evener.ids import session_id
from evener.messages import WORKSPACES, RolloutScored, ScoreWorkspace
from evener.sandbox import cgroups
from evener.sandbox.folders import reap
from evener.settings import Settings
from evener_verifier.verifier import score

_log = log.get("verifier")


async def serve(settings: Settings, bus: Bus, blobs: Blobs, *, stop: asyncio.Event, name: str) -> None:
    """Score workspaces until ``stop`` is set; what is unfinished then is handed back. ``name`` appears in the log."""
    await asyncio.to_thread(reap, settings.data / "sandboxes", remove_cgroup=cgroups.remove)
    _log.info("verifier started", name=name, slots=settings.verifier_slots)
    async with (
        ApiClient(settings.api, settings.api_token.get_secret_value()) as api,
        bus.consume(WORKSPACES, prefetch=settings.verifier_slots) as consumer,
    ):
        slots = [asyncio.create_task(_Slot(settings, api, bus, blobs).work(consumer)) for _ in range(settings.verifier_slots)]
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait({stopped, *slots}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, *slots):
            task.cancel()
        await asyncio.wait({stopped, *slots})
        for task in done - {stopped}:
            task.result()  # a slot never ends by itself: this raises what ended it


class _Slot:
    """Scores one workspace after the other."""

    def __init__(self, settings: Settings, api: ApiClient, bus: Bus, blobs: Blobs) -> None:
        self._sandboxes = settings.data / "sandboxes"
        self._api = api
        self._bus = bus
        self._blobs = blobs

    async def work(self, consumer: Consumer) -> None:
        """Work until cancelled; a delivery in hand goes back."""
        while True:
            delivery = await consumer.get()
            try:
                await self._score(delivery)
            except asyncio.CancelledError:
                with contextlib.suppress(asyncio.CancelledError):
                    await delivery.hand_back()
                raise
            except Exception as error:  # noqa: BLE001 - the supervisor: one message does not end the service
                _log.error("command failed", message_id=delivery.message.message_id, exc_info=error)
                await delivery.reject(f"{type(error).__name__}: {error}")

    async def _score(self, delivery: Delivery) -> None:
        message = delivery.message
        if not isinstance(message, ScoreWorkspace):
            await delivery.reject(f"{type(message).__name__} is no command to a verifier")
            return
        session = session_id(message.rollout_id, message.attempt)
        try:
            order = await self._api.scoring(session)
        except (Refused, InputError) as error:
            _log.info("command dropped", session=session, reason=str(error))
            await delivery.ack()
            return
        except InfraError as error:
            await delivery.reject(str(error))
            return
        try:
            scored = await score(order, self._blobs, self._sandboxes)
        except Exception as error:  # noqa: BLE001 - a fault that nobody foresaw is reported as ours, and tried again
            _log.error("scoring failed", session=session, exc_info=error)
            fault = f"{type(error).__name__}: {error}"[:500]
            scored = RolloutScored(
                rollout_id=message.rollout_id, attempt=message.attempt, cause="verifier_failed", detail=fault
            )
        await self._bus.publish(scored)
        await delivery.ack()
        _log.info("scored", session=session, scores=scored.scores, cause=scored.cause, seconds=round(scored.seconds, 3))
