"""A scripted learner: it claims the policy and its groups as the real one does, trains nothing, and publishes versions.

The engine is told each version, so that the proxy's sessions see the policy move on. Run by `bench.load`.
"""

import asyncio
from dataclasses import dataclass

import aiohttp
import msgspec

from bench.load.place import POLICY
from bench.load.workers import Times
from evener.api import ApiClient, LearnerLease, Refused
from evener.bus import Bus, publish_patiently
from evener.messages import PolicyPublished, StepFinished, TrainGroup, train_queue


@dataclass
class Learner:
    """One lease from its claim to the run's last step."""

    bus: Bus
    api: ApiClient
    http: aiohttp.ClientSession
    engine_url: str
    times: Times

    async def run(self) -> None:
        """Train until the last step, then wait to be cancelled."""
        lease = await self.api.claim_policy(POLICY, learner="scripted")
        assert lease is not None, "the run was submitted before"
        await self._serve(lease.version)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat(lease))
            tasks.create_task(self._train(lease))

    async def _beat(self, lease: LearnerLease) -> None:
        while True:
            await asyncio.sleep(lease.lease_s / 3)
            with self.times.of("learner's heartbeat"):
                await self.api.hold_policy(POLICY, epoch=lease.epoch)

    async def _train(self, lease: LearnerLease) -> None:
        groups: dict[str, None] = {}
        told: set[str] = set()
        async with self.bus.consume(train_queue(POLICY), prefetch=16) as commands:
            while lease.step < lease.train["steps"]:
                delivery = await commands.get()
                command = delivery.message
                assert isinstance(command, TrainGroup)
                if command.group_id not in told and await self._claim(lease, command.group_id):
                    groups[command.group_id] = None
                await delivery.ack()
                if len(groups) == lease.train["groups_per_step"]:
                    lease = await self._step(lease, list(groups))
                    told.update(groups)
                    groups.clear()

    async def _claim(self, lease: LearnerLease, group: str) -> bool:
        try:
            with self.times.of("claim group"):
                await self.api.claim_group(group, epoch=lease.epoch)
        except Refused:
            self.times.counts["groups refused"] += 1
            return False
        return True

    async def _step(self, lease: LearnerLease, groups: list[str]) -> LearnerLease:
        step = lease.step + 1
        with self.times.of("allot version"):
            grant = await self.api.allot_version(POLICY, epoch=lease.epoch, step=step)
        await self._serve(grant.version)
        common = {"policy": POLICY, "epoch": lease.epoch, "version": grant.version, "step": step, "weights": lease.weights}
        await publish_patiently(self.bus, PolicyPublished(**common))
        await publish_patiently(self.bus, StepFinished(run_id=lease.run_id, groups=groups, checkpoint="none", **common))
        return msgspec.structs.replace(lease, step=step, version=grant.version)

    async def _serve(self, version: int) -> None:
        update = {"weight_version": str(version)}
        async with self.http.post(f"{self.engine_url}/finish_weight_update", json=update) as response:
            response.raise_for_status()
