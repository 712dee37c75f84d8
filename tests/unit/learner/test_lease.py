"""A lease outlives a heartbeat that nobody answers."""

import asyncio
from typing import Any, cast

from evener.api import ApiClient, Heartbeat, LearnerLease
from evener_learner.lease import BEATS, held

LEASE = LearnerLease(
    policy="p",
    epoch=1,
    lease_s=0.3,
    run_id="r",
    step=2,
    version=1,
    weights="",
    checkpoint=None,
    group_size=2,
    temperature=1.0,
    train={},
)


class Api:
    """The first heartbeat hangs, as at a replica that starts."""

    def __init__(self) -> None:
        self.beats: list[float] = []
        self.released: list[dict[str, Any]] = []

    async def hold_policy(self, policy: str, *, epoch: int) -> Heartbeat:
        self.beats.append(asyncio.get_running_loop().time())
        if len(self.beats) == 1:
            await asyncio.sleep(60)
        return Heartbeat(lease_s=0.3)

    async def release_policy(self, policy: str, **said: Any) -> None:
        self.released.append(said)


async def test_the_beat_after_one_that_hangs_comes_in_time() -> None:
    api = Api()
    async with asyncio.timeout(20):
        await held(cast("ApiClient", api), LEASE, asyncio.sleep(1), step=lambda: 3)
    assert len(api.beats) >= 3
    assert api.beats[1] - api.beats[0] < 2 * LEASE.lease_s / BEATS
    assert api.released == [{"epoch": 1, "step": 3}]
