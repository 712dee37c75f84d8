"""Under one lease: groups are claimed, whole steps are trained, each step is one version, and nothing of a step is told
before all of it is true.

The order after a step: a number from the ledger, the weights in the blob store, the weights in every engine, then
`PolicyPublished` and `StepFinished`. A learner that dies in between leaves a version that no step holds; what it sampled is
refused as lost, and the ledger gives the groups out again. In the other order a step could name weights that nobody has.
Called by `evener_learner.service`, which ends a campaign by cancelling it.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from evener.api import REPORT_S, ApiClient, GroupOrder, LearnerLease, Refused
from evener.blobs import Blobs
from evener.bus import Bus, Delivery, publish_patiently
from evener.errors import InfraError, InputError
from evener.log import get
from evener.messages import GroupClosed, PolicyPublished, StepFinished, TrainGroup, train_queue
from evener_learner.admission import Refusal
from evener_learner.folders import LINEAGE, Position, pack_folder, read_position, unpack_folder, write_position
from evener_learner.lease import LeaseOver, held
from evener_learner.publisher import Publisher
from evener_learner.steps import Assembly, Step
from evener_learner.worker import Feed, StepResult, TrainerThread

T = TypeVar("T")
log = get("learner")

LOOK_S = 10.0
"""How long the learner waits for a group before it asks whether the run still trains."""
RETRY_S = 2.0
CLAIM_S = 5.0
"""Longest that a group is held for an API that does not answer."""
OVER = frozenset({"done", "failed", "cancelled"})
"""States of a run that trains no more."""


class Campaign:
    """One lease from its claim to its last step."""

    def __init__(
        self,
        lease: LearnerLease,
        *,
        api: ApiClient,
        bus: Bus,
        blobs: Blobs,
        publisher: Publisher,
        folder: Path,
        new_policy: bool = False,
    ) -> None:
        self._lease = lease
        self._api = api
        self._bus = bus
        self._blobs = blobs
        self._publisher = publisher
        self._folder = folder
        self._new_policy = new_policy  # what the engines serve under our version's number may be another policy's
        self._step = lease.step
        self._steps = int(lease.train["steps"])
        self._groups_per_step = int(lease.train["groups_per_step"])
        self._version = lease.version
        self._published = {lease.version}
        self._told: dict[str, GroupClosed | StepFinished] = {}
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._assembly: Assembly

    async def run(self) -> None:
        """Train until the run's last step. Raises Refused when the epoch is old, LeaseOver when the run has ended."""
        await held(self._api, self._lease, self._train_steps(), step=lambda: self._step)

    async def _train_steps(self) -> None:
        policy, checkpoint = await asyncio.to_thread(self._fetch)
        await self._publisher.publish(self._version, policy, force=self._new_policy)
        await asyncio.to_thread(self._remove_older)
        async with TrainerThread(lambda feed: self._train(policy, checkpoint, feed)) as trainer:
            self._assembly = await asyncio.to_thread(self._make_assembly, policy)
            collector = asyncio.create_task(self._collect())
            try:
                while self._step < self._steps:
                    step = await self._or_failure(collector, self._next_step())
                    started = time.monotonic()
                    result = await trainer.train(step.rows)
                    await self._finish(step, result, time.monotonic() - started)
                self._room.set()  # what the ledger asks again is answered until it has the last step
                await self._or_failure(collector, self._settle())
            finally:
                collector.cancel()
                await asyncio.gather(collector, return_exceptions=True)

    def _fetch(self) -> tuple[Path, Path | None]:
        lease, folder = self._lease, self._folder
        shutil.rmtree(folder, ignore_errors=True)
        policy = unpack_folder(self._blobs.get("weights", lease.weights), folder / "policy")
        if lease.checkpoint is None:
            return policy, None
        checkpoint = unpack_folder(self._blobs.get("checkpoints", lease.checkpoint), folder / "resume")
        position = read_position(checkpoint)
        self._published.update(version for version in position.published if version < lease.version)
        return policy, checkpoint

    def _remove_older(self) -> None:
        """The files of earlier leases: no engine reads them any more."""
        for folder in self._folder.parent.iterdir():
            if folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _train(self, policy: Path, checkpoint: Path | None, feed: Feed) -> None:
        from evener_learner import trainer  # in the training thread: torch and TRL take seconds to import

        train = self._lease.train
        options = trainer.TrainOptions(
            policy=policy,
            folder=self._folder,
            checkpoint=checkpoint,
            learning_rate=float(train["learning_rate"]),
            warmup_steps=int(train["warmup_steps"]),
            temperature=self._lease.temperature,
            seed=int(train["seed"]),
        )
        trainer.run(options, feed)

    def _make_assembly(self, policy: Path) -> Assembly:
        from evener_learner.trainer import policy_vocabulary

        return Assembly(
            groups_per_step=self._groups_per_step,
            max_staleness=int(self._lease.train["max_staleness"]),
            vocabulary=policy_vocabulary(policy),
            temperature=self._lease.temperature,
        )

    async def _collect(self) -> None:
        """Claim groups while there is room for two steps' worth; the rest waits in the broker.

        Without room, and while the API does not answer, no message is held, not even a prefetched one: the API may answer
        another learner, to which the groups then belong.
        """
        while True:
            while not self._has_room():
                self._room.clear()
                await self._room.wait()
            answers = True
            async with self._bus.consume(train_queue(self._lease.policy), prefetch=1) as consumer:
                while answers and self._has_room():
                    answers = await self._receive(await consumer.get())
            if not answers:
                await self._look()

    def _has_room(self) -> bool:
        return len(self._assembly) < 2 * self._groups_per_step or self._step >= self._steps

    async def _receive(self, delivery: Delivery) -> bool:
        """Claim the group of a message; False when the API is away, and the message still unsettled."""
        message = delivery.message
        if isinstance(message, TrainGroup) and message.run_id == self._lease.run_id:
            try:
                order = await self._claim(message.group_id)
            except (InfraError, TimeoutError) as error:
                if isinstance(error, InfraError) and error.cause != "api_unavailable":
                    raise
                log.warning("group not claimed, the API does not answer", group_id=message.group_id)
                return False
            if order is not None and not self._assembly.knows(order.group_id):
                refusal = self._assembly.add(order)
                if refusal is not None:
                    await self._close(refusal)
                self._arrived.set()
        await delivery.ack()
        return True

    async def _claim(self, group_id: str) -> GroupOrder | None:
        """A group, also one that we know; None where it was disposed of, which is told again if the ledger has not heard it.

        The message of a known group may be the next learner's already, who is to be given it: Refused when the epoch is old.
        Raises InfraError, TimeoutError.
        """
        try:
            async with asyncio.timeout(CLAIM_S):
                order = await self._api.claim_group(group_id, epoch=self._lease.epoch)
        except (Refused, InputError) as error:
            async with asyncio.timeout(CLAIM_S):
                await self._api.hold_policy(self._lease.policy, epoch=self._lease.epoch)
            log.info("group not claimed", group_id=group_id, reason=str(error))
            return None
        if group_id in self._told:
            await publish_patiently(self._bus, self._told[group_id])
            return None
        return order

    async def _next_step(self) -> Step:
        while True:
            self._arrived.clear()
            for refusal in self._assembly.sweep(self._version, self._published):
                await self._close(refusal)
            step = self._assembly.take(self._version)
            self._room.set()
            if step is not None:
                return step
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._arrived.wait()
            except TimeoutError:
                await self._look()

    async def _finish(self, step: Step, result: StepResult, seconds: float) -> None:
        lease, number = self._lease, self._step + 1
        version = await self._grant(number)
        published = sorted({*self._published, version})[-LINEAGE:]
        position = Position(step=number, version=version, published=published)
        weights, checkpoint = await _patiently(lambda: asyncio.to_thread(self._store, result, position))
        await self._publisher.publish(version, result.weights)
        published_event = PolicyPublished(policy=lease.policy, epoch=lease.epoch, version=version, step=number, weights=weights)
        await publish_patiently(self._bus, published_event)
        finished = StepFinished(
            run_id=lease.run_id,
            policy=lease.policy,
            epoch=lease.epoch,
            step=number,
            version=version,
            groups=[group.group_id for group in step.groups],
            metrics={**step.metrics(), **result.metrics, "step_s": seconds},
            checkpoint=checkpoint,
            weights=weights,
            seconds=seconds,
        )
        await self._tell(finished, finished.groups)
        self._step, self._version, self._published = number, version, set(published)
        log.info("step", step=number, version=version, seconds=round(seconds, 3), **step.metrics(), **result.metrics)

    def _store(self, result: StepResult, position: Position) -> tuple[str, str | None]:
        weights = self._blobs.put("weights", pack_folder(result.weights))
        if result.checkpoint is None:
            return weights, None
        write_position(result.checkpoint, position)
        return weights, self._blobs.put("checkpoints", pack_folder(result.checkpoint))

    async def _grant(self, step: int) -> int:
        while True:
            grant = await _patiently(lambda: self._api.allot_version(self._lease.policy, epoch=self._lease.epoch, step=step))
            if grant.wait_s <= 0:
                return grant.version
            log.info("version held", step=step, wait_s=grant.wait_s)
            await asyncio.sleep(grant.wait_s)

    async def _close(self, refusal: Refusal) -> None:
        log.info("group closed", group_id=refusal.group_id, reason=str(refusal.reason), detail=refusal.detail)
        closed = GroupClosed(
            group_id=refusal.group_id,
            epoch=self._lease.epoch,
            disposition=refusal.disposition,
            reason=str(refusal.reason),
        )
        await self._tell(closed, [refusal.group_id])

    async def _tell(self, word: GroupClosed | StepFinished, groups: list[str]) -> None:
        """Say what became of groups; said again where the ledger asks for one of them again, for it has not heard it."""
        self._told |= dict.fromkeys(groups, word)
        await publish_patiently(self._bus, word)

    async def _look(self) -> None:
        run = await _patiently(lambda: self._api.get(f"/v1/runs/{self._lease.run_id}"))
        log.info("waiting for groups", run_id=self._lease.run_id, step=self._step, held=len(self._assembly))
        if run.get("state") in OVER:
            raise LeaseOver(f"run {self._lease.run_id} is {run['state']}")

    async def _settle(self) -> None:
        """Wait until the ledger has the last step: an earlier claim would be given the step before, to train it again."""
        deadline = time.monotonic() + REPORT_S
        while time.monotonic() < deadline:
            run = await _patiently(lambda: self._api.get(f"/v1/runs/{self._lease.run_id}"))
            if run.get("state") in OVER or int(run.get("step") or 0) >= self._steps:
                return
            await asyncio.sleep(0.2)

    @staticmethod
    async def _or_failure(collector: asyncio.Task[None], work: Awaitable[T]) -> T:
        """The result of ``work``, or the error with which the collector ended meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, collector}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                collector.result()
            return await task
        finally:
            task.cancel()


async def _patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of the API or the blob store, however long it is away: a trained step is not given up because the ledger
    restarts or a disk is full.
    """
    while True:
        try:
            return await call()
        except InfraError as error:
            if error.cause not in ("api_unavailable", "blob_refused"):
                raise
            log.warning("no answer, trying again", error=str(error))
        await asyncio.sleep(RETRY_S)
