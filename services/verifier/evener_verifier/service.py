"""A command is acknowledged when its score is published, so that a verifier that dies loses nothing.

One whose workspace is in hand already (the connection was lost, so that the broker delivered it again) is acknowledged and
dropped, and one whose tests take long is let go of before the broker takes it back: the ledger hears that they run (`heart`),
and asks again once it hears no more. A fault of ours is told after a pause: three in a row end the rollout, and a store that
restarts is away for longer than three tries take. Called by ``evener serve verifier`` and by the embedded stack, with resources
that they made.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from msgspec.structs import replace

from evener import log
from evener.api import ApiClient, Refused, ScoreOrder
from evener.blobs import Blobs
from evener.bus import Bus, Consumer, Delivery, publish_patiently
from evener.errors import CAUSES, Boundary, InfraError, InputError
from evener.health import Counts
from evener.ids import session_id
from evener.messages import WORKSPACES, RolloutScored, ScoreWorkspace
from evener.sandbox import cgroups
from evener.sandbox.folders import reap
from evener.settings import Settings
from evener_verifier.heart import Hearts
from evener_verifier.verifier import score

HELD_S = 1200.0
"""Longest that a command is held unacknowledged: RabbitMQ closes the channel of whoever holds one for 30 minutes."""

FAULT_S = 5.0
"""Pause before a fault of ours is told, which has the workspace scored again at once."""

_log = log.get("verifier")


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
    """Score workspaces until ``stop`` is set; ``name`` appears in the log.

    What is in hand then may be finished for ``drain_s`` seconds; the rest is handed back. Raises InputError where there is no
    folder of graders that the settings name: each scoring would fail.
    """
    for name, place in (("EVENER_GRADER_ROOT", settings.grader_root), ("EVENER_GRADER_IMAGES", settings.grader_images)):
        if place is not None and not place.is_dir():
            raise InputError("settings_invalid", f"{name}: {place} is no folder")
    await asyncio.to_thread(reap, settings.data / "sandboxes", remove_cgroup=cgroups.remove)
    _log.info("verifier started", name=name, slots=settings.verifier_slots)
    counts = counts or Counts()
    async with (
        ApiClient(settings.api, settings.api_token.get_secret_value()) as api,
        bus.consume(WORKSPACES, prefetch=settings.verifier_slots) as consumer,
    ):
        hearts = Hearts(api)
        in_hand: set[str] = set()
        slots = [_Slot(settings, api, hearts, bus, blobs, counts, in_hand) for _ in range(settings.verifier_slots)]
        works = {asyncio.create_task(slot.work(consumer)): slot for slot in slots}
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({stopped, *works}, return_when=asyncio.FIRST_COMPLETED)
            busy = {work for work, slot in works.items() if slot.close()}
            if stopped in done and busy and drain_s > 0:
                _log.info("draining", workspaces=len(busy), seconds=drain_s)
                await asyncio.wait(busy, timeout=drain_s)
        finally:
            for task in (stopped, *works):
                task.cancel()
            await asyncio.wait({stopped, *works})
            await hearts.stop()
        for task in done - {stopped}:
            task.result()  # a slot never ends by itself: this raises what ended it


@contextlib.asynccontextmanager
async def held(delivery: Delivery) -> AsyncGenerator[None]:
    """Hold a command for as long as the block takes, but not longer than `HELD_S`."""

    async def let_go() -> None:
        await asyncio.sleep(HELD_S)
        await delivery.ack()

    task = asyncio.create_task(let_go())
    try:
        yield
    finally:
        task.cancel()


class _Slot:
    """Scores one workspace after the other. ``in_hand``: the sessions whose workspaces are being scored in this process."""

    def __init__(
        self,
        settings: Settings,
        api: ApiClient,
        hearts: Hearts,
        bus: Bus,
        blobs: Blobs,
        counts: Counts,
        in_hand: set[str],
    ) -> None:
        self._sandboxes = settings.data / "sandboxes"
        self._settings = settings
        self._api = api
        self._hearts = hearts
        self._bus = bus
        self._blobs = blobs
        self._counts = counts
        self._in_hand = in_hand
        self._busy = False
        self._closed = False

    def close(self) -> bool:
        """Take nothing more; whether something is in hand."""
        self._closed = True
        return self._busy

    async def work(self, consumer: Consumer) -> None:
        """Work until closed or cancelled; a delivery in hand goes back where it is cancelled."""
        while not self._closed:
            delivery = await consumer.get()
            self._busy = True
            try:
                await self._score(delivery)
            except asyncio.CancelledError:
                with contextlib.suppress(asyncio.CancelledError):
                    await delivery.hand_back()
                raise
            except Exception as error:  # noqa: BLE001 - the supervisor: one message does not end the service
                _log.error("command failed", message_id=delivery.message.message_id, exc_info=error)
                await delivery.reject(f"{type(error).__name__}: {error}")
            finally:
                self._busy = False

    async def _score(self, delivery: Delivery) -> None:
        message = delivery.message
        if not isinstance(message, ScoreWorkspace):
            await delivery.reject(f"{type(message).__name__} is no command to a verifier")
            return
        session = session_id(message.rollout_id, message.attempt)
        if session in self._in_hand:
            _log.info("command dropped", session=session, reason="its workspace is being scored here")
            await delivery.ack()
            return
        self._in_hand.add(session)
        try:
            await self._score_once(delivery, message, session)
        finally:
            self._in_hand.discard(session)

    async def _score_once(self, delivery: Delivery, message: ScoreWorkspace, session: str) -> None:
        try:
            order = await self._api.scoring(session)
        except (Refused, InputError) as error:
            _log.info("command dropped", session=session, reason=str(error))
            await delivery.ack()
            return
        except InfraError as error:  # the API was away for long; that is no fault of the message
            _log.error("no order", session=session, error=str(error))
            await delivery.hand_back()
            return
        async with self._hearts.beating(order), held(delivery):
            scored = replace(await self._scored(order, message), regrade=order.regrade)
            if scored.cause is not None and CAUSES[scored.cause].boundary is Boundary.INFRA:
                await asyncio.sleep(FAULT_S)
            await self._report(scored)
        await delivery.ack()
        self._counts.add("verifier_scored", cause=scored.cause or "")
        _log.info("scored", session=session, scores=scored.scores, cause=scored.cause, seconds=round(scored.seconds, 3))

    async def _report(self, scored: RolloutScored) -> None:
        """Publish; what a broker does not take is told without what was seen, which is what can be long."""
        try:
            await publish_patiently(self._bus, scored)
        except InfraError as error:
            if error.cause != "bus_refused":
                raise
            _log.error("evidence left out", rollout_id=scored.rollout_id, error=str(error))
            await publish_patiently(self._bus, replace(scored, evidence={"left_out": error.detail}))

    async def _scored(self, order: ScoreOrder, message: ScoreWorkspace) -> RolloutScored:
        """The report; a fault that nobody foresaw is reported as ours, and tried again."""
        try:
            own = self._settings
            return await score(
                order, self._blobs, self._sandboxes, host=own.sandbox, root=own.grader_root, images=own.grader_images
            )
        except Exception as error:  # noqa: BLE001 - the supervisor of scorings
            _log.error("scoring failed", session=order.session_id, exc_info=error)
            fault = f"{type(error).__name__}: {error}"[:500]
            return RolloutScored(rollout_id=message.rollout_id, attempt=message.attempt, cause="verifier_failed", detail=fault)
