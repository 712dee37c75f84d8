"""One learner trains one policy at a time, under the newest epoch or not at all, and stops within seconds.

`serve` claims the policy whenever a run wants it trained and runs one campaign after the other; started without a run to
train, it brings the engines to the policy's newest version first; while another learner holds the policy it stands by and
touches nothing. Without a policy of its own it takes the oldest run that is running, trains or only serves its policy, and goes
on to the next when that run is over. Everything below it is one task, which a stop cancels: no wait below needs to know of the
stop. Called by `evener serve learner` and the embedded stack.
"""

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from evener.api import ApiClient, LearnerLease, Refused
from evener.blobs import Blobs
from evener.bus import Bus
from evener.engines.weights import DiskWeightSink
from evener.errors import InfraError, InputError
from evener.log import get
from evener.settings import Settings
from evener_learner.campaign import Campaign
from evener_learner.folders import unpack_folder
from evener_learner.lease import LeaseOver
from evener_learner.publisher import Publisher

log = get("learner")

POLL_S = 1.0
"""How often an idle learner asks whether a run wants its policy trained."""


async def serve(settings: Settings, bus: Bus, blobs: Blobs, *, policy: str | None, stop: asyncio.Event, name: str) -> None:
    """Train ``policy`` until ``stop`` is set; None: the policies of the API's runs, one after another.

    ``name`` is told to the ledger, and no other living learner may have it. Working files lie in
    ``{settings.data}/learner/{policy}``, which the engines must be able to read under the same path. One learner
    trains a policy; any other stands by, and takes over once the ledger has not heard of the first for as long as a lease
    lasts (`Settings.lease_s`), or at once where that one gave it up. Raises what makes a step fail; the ledger gives its
    groups out again.
    """
    work = asyncio.create_task(_work(settings, bus, blobs, policy, name))
    halt = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, halt}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        halt.cancel()
        await _end(work)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end. Raises the error that it ended with before."""
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        this = asyncio.current_task()
        if this is not None and this.cancelling():  # it is us who are cancelled
            raise


async def _work(settings: Settings, bus: Bus, blobs: Blobs, policy: str | None, name: str) -> None:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(ApiClient(settings.api, settings.api_token.get_secret_value()))
        sinks = [await stack.enter_async_context(DiskWeightSink(url)) for url in settings.engines]
        publisher = Publisher(sinks)
        stack.push_async_callback(_end, asyncio.create_task(publisher.watch()))
        learner = _Learner(api, bus, blobs, publisher, settings.data.absolute() / "learner", name)
        await (learner.follow_runs() if policy is None else learner.follow(policy))


class _Learner:
    """Claims, trains and serves policies until it is cancelled."""

    def __init__(self, api: ApiClient, bus: Bus, blobs: Blobs, publisher: Publisher, folder: Path, name: str) -> None:
        self._api = api
        self._bus = bus
        self._blobs = blobs
        self._publisher = publisher
        self._folder = folder
        self._name = name

    async def follow(self, policy: str) -> None:
        """Train one policy whenever a run wants it."""
        lease = await self._claim(policy)
        if lease is None:
            await self._restore(policy)
        while True:
            if lease is not None:
                await self._train(lease)
            else:
                await asyncio.sleep(POLL_S)
            lease = await self._claim(policy)

    async def follow_runs(self) -> None:
        """Train, or only serve, the policy of the oldest run that is running.

        A run that is past its training is still waited for: the engines serve its policy until its last evaluation is over.
        """
        served: str | None = None
        while True:
            run = await self._oldest_run()
            lease = await self._claim(run["policy"]) if run is not None and run["kind"] == "train" else None
            if lease is not None:
                new, served = lease.policy != served, lease.policy
                await self._train(lease, new_policy=new)
                continue
            if run is not None and run["policy"] != served and await self._restore(run["policy"], force=True):
                served = run["policy"]
            await asyncio.sleep(POLL_S)

    async def _oldest_run(self) -> dict[str, Any] | None:
        try:
            runs: list[dict[str, Any]] = await self._api.get("/v1/runs")
        except InfraError as error:
            if error.cause != "api_unavailable":
                raise
            log.warning("the API does not answer, trying again", error=str(error))
            return None
        return next((run for run in reversed(runs) if run["state"] == "running"), None)

    async def _train(self, lease: LearnerLease, *, new_policy: bool = False) -> None:
        policy, epoch = lease.policy, lease.epoch
        log.info("training", policy=policy, run_id=lease.run_id, epoch=epoch, step=lease.step, version=lease.version)
        campaign = Campaign(
            lease,
            api=self._api,
            bus=self._bus,
            blobs=self._blobs,
            publisher=self._publisher,
            folder=self._folder_of(policy) / str(epoch),
            new_policy=new_policy,
        )
        try:
            await campaign.run()
        except Refused as error:
            self._publisher.forget()
            log.warning("lease lost", policy=policy, epoch=epoch, error=str(error))
            await asyncio.sleep(POLL_S)
        except LeaseOver as error:
            log.info("lease over", policy=policy, epoch=epoch, error=str(error))

    async def _claim(self, policy: str) -> LearnerLease | None:
        """The policy's lease, once no other learner holds it; None where no run trains it now."""
        try:
            lease = await self._first_in_line(policy)
        except InputError as error:
            if error.cause != "not_found":
                raise
            return None
        except InfraError as error:
            if error.cause != "api_unavailable":
                raise
            log.warning("the API does not answer, trying again", error=str(error))
            return None
        return lease if lease is not None and lease.step < int(lease.train["steps"]) else None

    async def _first_in_line(self, policy: str) -> LearnerLease | None:
        waiting = False
        while True:
            try:
                return await self._api.claim_policy(policy, learner=self._name)
            except Refused as error:
                self._publisher.forget()  # the engines are the other's
                if not waiting:
                    log.info("standing by", policy=policy, reason=str(error))
                waiting = True
            await asyncio.sleep(POLL_S)

    async def _restore(self, policy: str, *, force: bool = False) -> bool:
        """Bring the engines to the newest version of a policy that nobody trains now; False where it is not known.

        A run that was stopped during its last evaluation goes on with engines that were started with other weights.
        """
        try:
            rows: list[dict[str, Any]] = await self._api.get("/v1/policies")
        except InfraError as error:
            log.warning("the newest version is not known", policy=policy, error=str(error))
            return False
        published = [row for row in rows if row["policy"] == policy and row["state"] == "published" and row["weights"]]
        if not published:
            return False
        newest = max(published, key=lambda row: int(row["version"]))
        folder = self._folder_of(policy) / "newest"
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        archive = await asyncio.to_thread(self._blobs.get, "weights", newest["weights"])
        weights = await asyncio.to_thread(unpack_folder, archive, folder)
        await self._publisher.publish(int(newest["version"]), weights, force=force)
        return True

    def _folder_of(self, policy: str) -> Path:
        return self._folder / policy.replace("/", "--")
