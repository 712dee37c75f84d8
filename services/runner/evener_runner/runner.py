"""No command is held for a rollout's life, and no claimed attempt is forgotten: each ends in a report, or its lease is lost.

A runner takes a command only while it has a free slot and proxy and engines answer, claims the attempt, acknowledges at once,
and runs it in a task of its own: an engine that is down pauses dispatch, and no attempt is wasted on it. A refused claim means
that another has it: acknowledged and dropped. An attempt that was reported needs no slot, but is heard of until the ledger has
read the report (`heart`). A host on which attempts fail for a reason of its own (a full blob store, a broken sandbox) takes
ever fewer, so that it does not spend every rollout's attempts while others could run them. Built by `service.serve`.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from evener import log
from evener.api import REPORT_S, Refused, RolloutLease
from evener.bus import Bus, Delivery, publish_patiently
from evener.errors import EvenerError, InfraError, InputError, Outcome
from evener.health import Counts
from evener.ids import session_id
from evener.messages import ROLLOUTS, RolloutFinished, RunRollout
from evener_runner import rest
from evener_runner.attempt import Attempt, Tools
from evener_runner.harnesses import HARNESSES, Harness, find
from evener_runner.heart import Heart
from evener_runner.outcome import Stop

STOP_S = 3.5
"""After this long a stopped attempt is abandoned; its lease expires. Ctrl-C has to be over within 5 s."""
_RETRY_S = 1.0
_CLAIM_S = 0.5
"""How long a stop waits for the answer to a claim: a lease that nobody knows of would have to expire first."""

T = TypeVar("T")
_log = log.get("runner")


@dataclass(slots=True)
class _Held:
    """A claimed attempt; None where its harness is not known."""

    attempt: Attempt | None = None
    reported: bool = False

    def stop(self, why: Stop) -> None:
        if self.attempt is not None:
            self.attempt.stop(why)


class Runner:
    """Runs at most ``slots`` attempts at once; a stop waits ``drain_s`` for those that run."""

    def __init__(
        self,
        bus: Bus,
        tools: Tools,
        *,
        name: str,
        slots: int,
        harnesses: dict[str, Harness] = HARNESSES,
        drain_s: float = 0.0,
        counts: Counts | None = None,
    ) -> None:
        self._bus = bus
        self._tools = tools
        self._name = name
        self._slots = slots
        self._harnesses = harnesses
        self._drain_s = drain_s
        self._counts = counts or Counts()
        self._rest = rest.Rest()
        self._held: dict[asyncio.Task[None], _Held] = {}
        self._freed = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Take commands until ``stop`` is set, let attempts end for ``drain_s``, then stop the rest within `STOP_S`."""
        try:
            while not stop.is_set():
                await unless(stop, self._rest.over())
                await self._until_served(stop)
                await self._fill_slots(stop)
                self._freed.clear()
                if len(self._running()) >= self._slots:
                    await unless(stop, self._freed.wait())
            await self._drain()
        finally:
            await self._end_all()

    async def _fill_slots(self, stop: asyncio.Event) -> None:
        """Take commands until every slot is taken, or nothing answers agents any more."""
        # Closed while every slot is taken, so that a waiting command goes to another runner.
        async with self._bus.consume(ROLLOUTS, prefetch=1) as consumer:
            while len(self._running()) < self._slots and self._rest.left_s <= 0 and not stop.is_set():
                delivery = await unless(stop, consumer.get())
                if delivery is None:
                    return
                if self._rest.left_s > 0 or await self._tools.sessions.problem() is not None:
                    await delivery.hand_back()
                    return
                await self._take(delivery, stop)

    async def _until_served(self, stop: asyncio.Event) -> None:
        """Wait while agents would find no proxy or no engine. No command is held meanwhile: RabbitMQ counts what comes back."""
        said = False
        while not stop.is_set() and (problem := await self._tools.sessions.problem()) is not None:
            if not said:
                _log.warning("dispatch paused", problem=problem)
            said = True
            await unless(stop, asyncio.sleep(_RETRY_S))
        if said:
            _log.info("dispatch goes on")

    async def _take(self, delivery: Delivery, stop: asyncio.Event) -> None:
        message = delivery.message
        if not isinstance(message, RunRollout):
            await delivery.reject(f"{type(message).__name__} is no command to a runner")
            return
        session = session_id(message.rollout_id, message.attempt)
        try:
            lease = await unless(stop, self._tools.api.claim_rollout(session, runner=self._name), grace_s=_CLAIM_S)
        except (Refused, InputError) as error:
            _log.info("command dropped", session=session, reason=str(error))
            await delivery.ack()
        except InfraError as error:
            _log.error("no claim", session=session, error=str(error))
            await delivery.hand_back()
            await unless(stop, asyncio.sleep(_RETRY_S))
        else:
            if lease is None:
                await delivery.hand_back()
                return
            await delivery.ack()
            self._start(lease)

    def _start(self, lease: RolloutLease) -> None:
        held = _Held()
        task = asyncio.create_task(self._attempt(lease, held), name=lease.session_id)
        self._held[task] = held
        self._count()
        task.add_done_callback(self._done)

    def _running(self) -> set[asyncio.Task[None]]:
        """The attempts that take a slot."""
        return {task for task, held in self._held.items() if not held.reported}

    def _count(self) -> None:
        self._counts.set("runner_attempts", len(self._running()))

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._held[task]
        self._count()
        self._freed.set()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("attempt without a report", session=task.get_name(), exc_info=error)

    async def _attempt(self, lease: RolloutLease, held: _Held) -> None:
        """Run one attempt, report it, and stay until the ledger has the report."""
        heart = Heart(self._tools.api, lease, held.stop)
        async with heart.beating():
            report = await self._run(lease, held)
            if report is None:
                _log.info("lease lost", session=lease.session_id)
                return
            await publish_patiently(self._bus, report)
            self._counts.add("runner_attempts_ended", outcome=report.outcome)
            _log.info("attempt ended", session=lease.session_id, outcome=report.outcome, cause=report.cause)
            held.reported = True
            self._rest.note(report.cause)
            self._count()
            self._freed.set()
            await heart.until_read(REPORT_S)

    async def _run(self, lease: RolloutLease, held: _Held) -> RolloutFinished | None:
        """What to report of an attempt. A fault that nobody foresaw is reported as ours."""
        try:
            held.attempt = Attempt(lease, find(lease.harness, self._harnesses), self._tools)
            return await held.attempt.run()
        except EvenerError as error:
            return _fault(lease, error.cause, error.detail)
        except Exception as error:  # noqa: BLE001 - the supervisor of attempts
            _log.error("attempt failed", session=lease.session_id, exc_info=error)
            return _fault(lease, "internal", f"{type(error).__name__}: {error}")

    async def _drain(self) -> None:
        """Let what runs be reported; what is reported is not waited for."""
        deadline = asyncio.get_running_loop().time() + self._drain_s
        if self._running() and self._drain_s > 0:
            _log.info("draining", attempts=len(self._running()), seconds=self._drain_s)
        await self._until_reported(deadline)

    async def _end_all(self) -> None:
        await asyncio.sleep(0)  # an attempt that was claimed this moment has to begin before it can be stopped
        for held in self._held.values():
            held.stop("service")
        await self._until_reported(asyncio.get_running_loop().time() + STOP_S)
        left = set(self._held)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)

    async def _until_reported(self, deadline: float) -> None:
        """Wait, until ``deadline`` on the loop's clock, for the last report."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._running():
                    self._freed.clear()
                    await self._freed.wait()


def _fault(lease: RolloutLease, cause: str, detail: str) -> RolloutFinished:
    return RolloutFinished(
        rollout_id=lease.rollout_id,
        attempt=lease.attempt,
        lease=lease.lease,
        outcome=Outcome.INFRA_ERROR,
        cause=cause,
        detail=detail[:500],
    )


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T], *, grace_s: float = 0.0) -> T | None:
    """The result of ``work``; None where it is not there ``grace_s`` seconds after ``stop`` was set."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and grace_s > 0:
            await asyncio.wait({task}, timeout=grace_s)
        if task.done():
            return task.result()
    finally:
        stopped.cancel()
        task.cancel()
        await asyncio.wait({task})
    return None
