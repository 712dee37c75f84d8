"""The orchestrator as a learner sees it: a lease, groups sampled by the newest weights, version numbers, and what it was told.

Rollouts are one sampled token behind a fixed prompt; a rollout that sampled a favoured token is rewarded.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from evener.api import GroupOrder
from evener.blobs import Blobs
from evener.bus import MemoryBus
from evener.messages import EVENTS, PolicyPublished, StepFinished, TrainGroup
from evener_learner.folders import pack_folder
from tests.unit.learner.engines import StubEngine
from tests.unit.learner.making import VOCABULARY, group, rollout, sequence

PROMPT = [5, 9, 12, 7]
FAVOURED = range(8, 24)
GROUP_SIZE = 8
LIVING = ("running", "paused")


class Ledger:
    """A run of policy ``tiny``."""

    def __init__(self, bus: MemoryBus, blobs: Blobs, policy: Path, *, steps: int) -> None:
        self.bus = bus
        self.blobs = blobs
        self.steps = steps
        self.epoch = 0
        self.step = 0
        self.version = 1
        self.allotted = 1
        self.checkpoint: str | None = None
        self.weights = blobs.put("weights", pack_folder(policy))
        self.policy = policy
        self.events: list[Any] = []
        self.orders: dict[str, GroupOrder] = {}
        self.claims: list[tuple[int, str]] = []
        self.state = "running"
        self.hold = 0
        self.before: list[dict[str, Any]] = []
        self.lease_s = 30.0
        self.heartbeats = self.released = 0
        self.refuse_versions = False
        self._model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)  # here: loading is not thread-safe
        self._random = np.random.default_rng(0)

    async def handle(self, request: web.Request) -> web.Response:
        """The paths of the API that a learner asks."""
        match request.path.split("/")[2:]:
            case ["policies", _, "learner"]:
                return web.json_response(self._lease())
            case ["policies", _, "learner", "heartbeat"]:
                return self._heartbeat((await request.json())["epoch"])
            case ["policies", _, "learner", "release"]:
                self.released += 1
                return web.json_response(None)
            case ["policies", _, "versions"]:
                return self._allot((await request.json())["epoch"])
            case ["groups", group_id, "claim"]:
                if (await request.json())["epoch"] != self.epoch or group_id not in self.orders:
                    return web.json_response({"detail": "disposed of"}, status=409)
                self.claims.append((self.epoch, group_id))
                return web.Response(body=msgspec.msgpack.encode(self.orders[group_id]))
            case ["policies"]:
                return web.json_response(
                    [self._published(), *({**self._published(), "policy": run["policy"]} for run in self.before)]
                )
            case ["runs"]:
                return web.json_response(self.runs())
            case ["runs", _]:
                return web.json_response({"state": self.state, "step": self.step})
            case _:
                return web.json_response({"detail": "unknown"}, status=404)

    def runs(self) -> list[dict[str, Any]]:
        """The newest first: one that is over, and ours after the one of ``before``."""
        ours = {"policy": "tiny", "kind": "train", "state": self.state}
        return [ours, *self.before, {"policy": "old", "kind": "train", "state": "done"}]

    def _published(self) -> dict[str, Any]:
        return {"policy": "tiny", "version": self.version, "state": "published", "weights": self.weights}

    def _heartbeat(self, epoch: int) -> web.Response:
        self.heartbeats += 1
        if epoch != self.epoch:
            return web.json_response({"detail": "epoch is old"}, status=409)
        return web.json_response({"lease_s": self.lease_s, "action": "continue" if self.state in LIVING else "cancel"})

    def _lease(self) -> dict[str, Any] | None:
        if self.step >= self.steps or self.state != "running":
            return None
        self.epoch += 1
        return {
            "policy": "tiny",
            "epoch": self.epoch,
            "lease_s": self.lease_s,
            "run_id": "run",
            "step": self.step,
            "version": self.version,
            "weights": self.weights,
            "checkpoint": self.checkpoint,
            "group_size": GROUP_SIZE,
            "temperature": 1.0,
            "train": {
                "steps": self.steps,
                "groups_per_step": 2,
                "learning_rate": 1e-2,
                "warmup_steps": 0,
                "max_staleness": 1,
                "seed": 0,
            },
        }

    def _allot(self, epoch: int) -> web.Response:
        if epoch != self.epoch or self.refuse_versions:
            return web.json_response({"detail": "epoch is old"}, status=409)
        if self.hold > 0:
            self.hold -= 1
            return web.json_response({"version": 0, "wait_s": 0.05})
        self.allotted += 1
        return web.json_response({"version": self.allotted, "wait_s": 0})

    async def consume(self) -> None:
        """Take in what the learner says, until cancelled."""
        async with self.bus.consume(EVENTS) as consumer:
            while True:
                delivery = await consumer.get()
                event = delivery.message
                await delivery.ack()
                self.events.append(event)
                if isinstance(event, StepFinished) and event.epoch == self.epoch:
                    self.step, self.checkpoint = event.step, event.checkpoint
                if isinstance(event, PolicyPublished) and event.epoch == self.epoch:
                    self.version, self.weights = event.version, event.weights

    def of(self, kind: type) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def probability(self, folder: Path) -> torch.Tensor:
        """Probabilities of the next token under the weights in ``folder``."""
        self._model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        with torch.no_grad():
            return self._model(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)

    async def offer(self, engine: StubEngine, *, signal: bool = True) -> str:
        """Close one group that ``engine`` samples now, and command its training."""
        probability = self.probability(Path(engine.path)).numpy().astype(np.float64)
        while True:
            tokens = self._random.choice(VOCABULARY, GROUP_SIZE, p=probability / probability.sum()).tolist()
            rewards = [float(token in FAVOURED) for token in tokens]
            if (len(set(rewards)) > 1) == signal:
                break
        order = group(
            *(
                rollout(
                    reward,
                    sequence(
                        [*PROMPT, token],
                        [0] * len(PROMPT) + [1],
                        [0.0] * len(PROMPT) + [float(np.log(probability[token]))],
                        versions=int(engine.version),
                    ),
                )
                for token, reward in zip(tokens, rewards, strict=True)
            )
        )
        await self.issue(order)
        return order.group_id

    async def issue(self, order: GroupOrder) -> None:
        """Command the training of a group."""
        self.orders[order.group_id] = order
        await self.bus.publish(TrainGroup(run_id="run", policy="tiny", group_id=order.group_id))
