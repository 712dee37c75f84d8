"""A policy is held while its learner lives: the lease is prolonged well before it ends, and given up when the work ends.

A learner that cannot reach the API goes on: its epoch, and no clock, keeps it from changing anything once another took over.
Called by `evener_learner.campaign`.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from evener.api import ApiClient, LearnerLease, Refused
from evener.errors import InfraError, InputError
from evener.log import get

log = get("learner")

BEATS = 3
"""Heartbeats in one lease; each is waited for until the next is due, since a replica that starts may accept and not answer."""

RELEASE_S = 1.0
"""Longest that a stop waits for the farewell; without it the next learner waits until the lease ends."""


class LeaseOver(Exception):
    """The run does not train any more."""


async def held(api: ApiClient, lease: LearnerLease, work: Coroutine[Any, Any, None], *, step: Callable[[], int]) -> None:
    """Do ``work`` while the lease is prolonged; it is cancelled when the lease is lost. ``step``: the last one reported.

    Raises what ``work`` raises, Refused where another learner took over, LeaseOver where the run has ended.
    """
    working = asyncio.create_task(work)
    beating = asyncio.create_task(_beat(api, lease))
    try:
        await asyncio.wait({working, beating}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            beating.result()
        await working
    finally:
        working.cancel()
        beating.cancel()
        await asyncio.gather(working, beating, return_exceptions=True)
        await _release(api, lease, step())


async def _beat(api: ApiClient, lease: LearnerLease) -> None:
    due = time.monotonic()
    while True:
        due = max(due + lease.lease_s / BEATS, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        try:
            async with asyncio.timeout(lease.lease_s / BEATS):
                answer = await api.hold_policy(lease.policy, epoch=lease.epoch)
        except (InfraError, TimeoutError) as error:
            if isinstance(error, InfraError) and error.cause != "api_unavailable":
                raise
            log.warning("the lease is not prolonged, trying again", policy=lease.policy, error=str(error))
            continue
        if answer.action == "cancel":
            raise LeaseOver(f"run {lease.run_id} is over")


async def _release(api: ApiClient, lease: LearnerLease, step: int) -> None:
    with suppress(Refused, InputError, InfraError, TimeoutError):
        async with asyncio.timeout(RELEASE_S):
            await api.release_policy(lease.policy, epoch=lease.epoch, step=step)
