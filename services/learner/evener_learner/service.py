"""One learner trains one policy at a time, under the newest epoch or not at all, and stops within seconds.

`serve` claims the policy whenever a run wants it trained and runs one campaign after the other; started without a run to
train, it brings the engines to the policy's newest version first. Everything below it is one
task, which a stop cancels: no wait below needs to know of the stop. Called by `evener serve learner` and the embedded stack.
"""

import asyncio
import shutil
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from evener.api import ApiClient, LearnerLease, Refused
from evener.blobs import Blobs
from evener.bus import Bus
from evener.engines.weights import DiskWeightSink
from evener.errors import InfraError, InputError
from evener.log import get
from evener.settings import Settings
from evener_learner.campaign import Campaign, LeaseOver
from evener_learner.folders import unpack_folder
from evener_learner.publisher import Publisher

log = get("learner")

POLL_S = 1.0
"""How often an idle learner asks whether a run wants its policy trained."""


async def serve(settings: Settings, bus: Bus, blobs: Blobs, *, policy: str, stop: asyncio.Event, name: str) -> None:
    """Train ``policy`` until ``stop`` is set. Raises what makes a step fail; the ledger gives its groups out again.

    ``name`` is told to the ledger. Working files lie in ``{settings.data}/learner/{policy}``, which the engines must be able
    to read under the same path.
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
    with suppress(asyncio.CancelledError):
        await task


async def _work(settings: Settings, bus: Bus, blobs: Blobs, policy: str, name: str) -> None:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(ApiClient(settings.api, settings.api_token.get_secret_value()))
        sinks = [await stack.enter_async_context(DiskWeightSink(url)) for url in settings.engines]
        publisher = Publisher(sinks)
        stack.push_async_callback(_end, asyncio.create_task(publisher.watch()))
        folder = settings.data.absolute() / "learner" / policy.replace("/", "--")
        lease = await _claim(api, policy, name)
        if lease is None:
            await _restore(api, blobs, publisher, policy, folder / "newest")
        while True:
            lease = lease or await _claim(api, policy, name)
            if lease is None:
                await asyncio.sleep(POLL_S)
                continue
            log.info("training", policy=policy, run_id=lease.run_id, epoch=lease.epoch, step=lease.step, version=lease.version)
            campaign = Campaign(lease, api=api, bus=bus, blobs=blobs, publisher=publisher, folder=folder / str(lease.epoch))
            try:
                await campaign.run()
            except Refused as error:
                publisher.forget()
                log.warning("lease lost", policy=policy, epoch=lease.epoch, error=str(error))
                await asyncio.sleep(POLL_S)
            except LeaseOver as error:
                log.info("lease over", policy=policy, epoch=lease.epoch, error=str(error))
            lease = None


async def _claim(api: ApiClient, policy: str, name: str) -> LearnerLease | None:
    try:
        lease = await api.claim_policy(policy, learner=name)
    except Refused:
        return None
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


async def _restore(api: ApiClient, blobs: Blobs, publisher: Publisher, policy: str, folder: Path) -> None:
    """Bring the engines to the newest version of a policy that nobody trains now.

    A run that was stopped during its last evaluation goes on with engines that were started with other weights.
    """
    try:
        rows: list[dict[str, Any]] = await api.get("/v1/policies")
    except InfraError as error:
        log.warning("the newest version is not known", policy=policy, error=str(error))
        return
    published = [row for row in rows if row["policy"] == policy and row["state"] == "published" and row["weights"]]
    if published:
        newest = max(published, key=lambda row: int(row["version"]))
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        archive = await asyncio.to_thread(blobs.get, "weights", newest["weights"])
        await publisher.publish(int(newest["version"]), await asyncio.to_thread(unpack_folder, archive, folder))
