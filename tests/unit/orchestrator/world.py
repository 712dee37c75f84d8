"""A whole Evener around the real orchestrator: scripted workers over real HTTP, a real bus and a real SQLite file.

The trace store is a dictionary. What the agents do, how the verifier scores and when the learner speaks can be scripted by a
test.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evener.api import ApiClient, GroupOrder, LearnerLease, Refused, RolloutLease
from evener.blobs import Blobs
from evener.bus import MemoryBus
from evener.errors import InfraError, Outcome
from evener.ids import new_id, session_id
from evener.messages import (
    ROLLOUTS,
    WORKSPACES,
    GroupClosed,
    PolicyPublished,
    RolloutFinished,
    RolloutScored,
    Sealed,
    StepFinished,
    train_queue,
)
from evener.settings import Settings
from evener.tasks import task_digest
from evener.trace.record import CallRecord
from evener_orchestrator.archive import Archiver
from evener_orchestrator.context import Context
from evener_orchestrator.ledger import Ledger
from evener_orchestrator.ledger.migrate import migrate
from evener_orchestrator.orchestrator import run
from tests.ports import free_port

TOKEN = "test-token"


def a_call(session: str, number: int, version: int) -> CallRecord:
    """A call with a prompt of five tokens and a completion of three."""
    return CallRecord(
        call_id=new_id(),
        session_id=session,
        number=number,
        prompt_ids=np.arange(5, dtype=np.int32),
        completion_ids=np.array([7, 8, 9], np.int32),
        logprobs=np.array([-0.5, -0.25, 0.0], np.float32),
        versions=np.full(3, version, np.int32),
        version_dispatch=version,
        version_completion=version,
        request={
            "system_digests": ["t1"],
            "tools_digest": None,
            "messages": [],
            "used": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        },
        reply={"content": "ok", "tool_calls": [{"name": "bash", "arguments": "{}"}]},
        dialect="chat",
        started=1.0,
        ended=2.0,
        delivered="yes",
        level="tokens",
        engine="fake",
    )


class FakeTrace:
    def __init__(self) -> None:
        self.calls: dict[str, list[CallRecord]] = {}

    async def load(self, session_id: str) -> list[CallRecord]:
        return self.calls.get(session_id, [])

    async def texts(self, session_id: str, digests: Collection[str]) -> dict[str, bytes]:
        return {"t1": b"You are an agent."}


class FakeSessions:
    def __init__(self, trace: FakeTrace) -> None:
        self.trace = trace
        self.sealed: list[str] = []
        self.deleted: list[str] = []
        self.problem: str | None = None

    async def prompt_problem(self) -> str | None:
        return self.problem

    async def seal(self, session_id: str) -> None:
        self.sealed.append(session_id)

    async def delete(self, session_id: str) -> None:
        self.deleted.append(session_id)
        self.trace.calls.pop(session_id, None)


async def _pong() -> bool:
    return True


def run_file(**changes: Any) -> dict[str, Any]:
    document = {
        "name": "first-run",
        "policy": "./policy",
        "tasks": "./tasks",
        "harness": [{"name": "pi"}],
        "rollouts": {"group_size": 2, "concurrent": 4},
        "train": {"steps": 2, "groups_per_step": 2, "max_staleness": 1},
    }
    return document | changes


_migrated: list[bytes] = []


async def migrated_ledger() -> bytes:
    """The file of an empty SQLite ledger: every world starts from a copy, since the migrations cost 0.1 CPU-s each time."""
    if not _migrated:
        with tempfile.TemporaryDirectory() as folder:
            ledger = Ledger(f"sqlite:///{folder}/ledger.db")
            await migrate(ledger)
            await ledger.close()
            _migrated.append((Path(folder) / "ledger.db").read_bytes())
    return _migrated[0]


class World:
    """The orchestrator under test and what is around it."""

    def __init__(self, folder: Path, *, lease_s: float = 5.0, database: str | None = None, migrated: bool = True) -> None:
        self._migrated = migrated and database is None
        self.settings = Settings(data=folder, api_port=free_port(), api_token=TOKEN, lease_s=lease_s, database_url=database)
        self.blobs = Blobs(folder / "blobs")
        self.trace = FakeTrace()
        self.sessions = FakeSessions(self.trace)
        self.bus = MemoryBus()
        self.engine_version = 1
        self.score: Callable[[RolloutLease], float] = alternating()
        self.finish: Callable[[RolloutLease, RolloutFinished], list[RolloutFinished]] = lambda _, event: [event]
        self.scored: Callable[[RolloutScored], list[RolloutScored]] = lambda event: [event]
        self.hold: Callable[[RolloutLease], Awaitable[None]] | None = None
        self.leases: list[RolloutLease] = []
        self.scores: dict[str, float] = {}
        self.trained: list[str] = []
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        self._stop = asyncio.Event()
        ready = asyncio.Event()
        file = self.settings.data / "ledger.db"
        if self._migrated and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(await migrated_ledger())
        self.context = Context(self.settings, self.bus, self.blobs, Archiver(self.trace), self.sessions, ping_redis=_pong)
        self._service = asyncio.create_task(run(self.context, stop=self._stop, ready=ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((self._service, waiting), timeout=20, return_when=asyncio.FIRST_COMPLETED)
        if self._service.done():
            self._service.result()
        self.api = await self._stack.enter_async_context(ApiClient(self.settings.api, TOKEN, patience_s=10))

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.wait_for(self._service, 20)

    async def restart(self) -> None:
        await self.stop()
        self.bus = MemoryBus()
        await self.start()

    async def close(self) -> None:
        await self.stop()
        await self._stack.aclose()

    async def upload_task(self, name: str, family: str = "files") -> str:
        agent, grader = f"agent {name}".encode(), f"grader {name}".encode()
        digest = task_digest(agent, grader)
        body = {"id": name, "family": family, "agent": agent, "grader": grader}
        assert self.api._http is not None
        async with self.api._http.put(f"{self.settings.api}/v1/tasks/{digest}", data=msgspec.msgpack.encode(body)) as response:
            assert response.status == 200, await response.text()
        return digest

    async def submit(self, document: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        document = document or run_file()
        tasks = [await self.upload_task(f"task-{n}") for n in range(3)]
        held_out = [await self.upload_task(f"held-out-{n}") for n in range(2)] if document.get("eval") else []
        weights = self.blobs.put("weights", b"start")
        body = {"run": document, "tasks": tasks, "eval_tasks": held_out, "weights": weights, "trusted": True}
        return await self.api.post("/v1/runs", body | changes)

    async def until(self, condition: Callable[[dict[str, Any]], bool], *, timeout: float = 30.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while True:
            state = await self.api.get("/v1/runs/latest")
            if condition(state):
                return state
            assert time.monotonic() < deadline, state
            await asyncio.sleep(0.1)

    async def until_heartbeat(self, lease: RolloutLease, action: str) -> None:
        """Beat until the ledger says ``action``."""
        async with asyncio.timeout(20):
            while (await self.api.heartbeat(lease.session_id, lease=lease.lease)).action != action:
                await asyncio.sleep(0.05)

    async def until_over(self, *, timeout: float = 40.0) -> dict[str, Any]:
        return await self.until(lambda state: state["state"] not in ("running", "paused"), timeout=timeout)


def alternating() -> Callable[[RolloutLease], float]:
    """Scores 0, 1, 0, 1: within a group of two there is always something to learn."""
    seen: dict[str, int] = {}

    def score(lease: RolloutLease) -> float:
        seen[lease.group_id] = seen.get(lease.group_id, -1) + 1
        return float(seen[lease.group_id] % 2)

    return score


async def runner(world: World) -> None:
    """Claims attempts and reports them, each at once."""
    bus, api = world.bus, world.api
    async with bus.consume(ROLLOUTS, prefetch=16) as commands, asyncio.TaskGroup() as agents:
        while True:
            delivery = await commands.get()
            agents.create_task(_attempt(world, bus, api, delivery))


async def _attempt(world: World, bus: MemoryBus, api: ApiClient, delivery) -> None:
    command = delivery.message
    try:
        lease = await api.claim_rollout(session_id(command.rollout_id, command.attempt), runner="r1")
    except (Refused, InfraError):
        await delivery.ack()
        return
    await delivery.ack()
    world.leases.append(lease)
    if world.hold is not None:
        await world.hold(lease)
    for event in world.finish(lease, finished(world, lease)):
        await bus.publish(event)


def finished(world: World, lease: RolloutLease, calls: int = 1, **changes: Any) -> RolloutFinished:
    """The last word of a runner whose agent made some calls; its trace is in the store."""
    version = lease.version or world.engine_version
    world.trace.calls[lease.session_id] = [a_call(lease.session_id, number + 1, version) for number in range(calls)]
    world.scores[lease.session_id] = world.score(lease)
    event = RolloutFinished(
        rollout_id=lease.rollout_id,
        attempt=lease.attempt,
        lease=lease.lease,
        outcome=Outcome.FINISHED,
        sealed=Sealed(committed=calls, aborted=0, lost=0, undelivered=0),
        snapshot=world.blobs.put("snapshots", b"workspace"),
        logs=world.blobs.put("logs", b"hello\n"),
        started=time.time(),
        ended=time.time(),
    )
    return msgspec.structs.replace(event, **changes)


async def verifier(world: World) -> None:
    """Scores whatever the scripted scores say."""
    bus, api = world.bus, world.api
    async with bus.consume(WORKSPACES, prefetch=4) as commands:
        while True:
            delivery = await commands.get()
            command = delivery.message
            session = session_id(command.rollout_id, command.attempt)
            try:
                order = await api.scoring(session)
            except (Refused, InfraError):
                await delivery.ack()
                continue
            event = RolloutScored(
                rollout_id=command.rollout_id,
                attempt=command.attempt,
                scores={"reward": world.scores.get(session, 0.0)},
                regrade=order.regrade,
                evidence={"tier": "in_process", "tampered": False},
            )
            for each in world.scored(event):
                await bus.publish(each)
            await delivery.ack()


@dataclass
class Learner:
    """Trains groups that have variance, skips the others; ``checkpoints`` says which steps can be resumed."""

    world: World
    policy: str = "first-run"
    name: str = "l1"
    checkpoints: bool = True
    repeat: int = 1
    dies_after: int | None = None  # the step after which it says nothing more
    buffer: list[GroupOrder] = field(default_factory=list)
    stepped: set[str] = field(default_factory=set)  # a command may come again before the ledger has its group's step

    async def __call__(self) -> None:
        bus, api = self.world.bus, self.world.api
        while (lease := await api.claim_policy(self.policy, learner=self.name)) is None:
            await asyncio.sleep(0.05)
        async with bus.consume(train_queue(self.policy), prefetch=16) as commands:
            while lease.step < (self.dies_after or lease.train["steps"]):
                delivery = await commands.get()
                order = await self._claim(api, lease, delivery.message.group_id)
                await delivery.ack()
                if order is None:
                    continue
                if len({rollout.reward for rollout in order.rollouts}) < 2:
                    await self._say(bus, GroupClosed(group_id=order.group_id, epoch=lease.epoch, disposition="skipped"))
                    continue
                self.buffer.append(order)
                if len(self.buffer) == lease.train["groups_per_step"]:
                    lease = await self._step(bus, api, lease)

    async def _claim(self, api: ApiClient, lease: LearnerLease, group: str) -> GroupOrder | None:
        try:
            order = await api.claim_group(group, epoch=lease.epoch)
        except (Refused, InfraError):
            return None
        return None if order.group_id in self.stepped | {each.group_id for each in self.buffer} else order

    async def _step(self, bus: MemoryBus, api: ApiClient, lease: LearnerLease) -> LearnerLease:
        step = lease.step + 1
        while (grant := await api.allot_version(self.policy, epoch=lease.epoch, step=step)).wait_s:
            await asyncio.sleep(grant.wait_s)
        self.world.engine_version = grant.version
        groups = [order.group_id for order in self.buffer]
        self.world.trained += groups
        self.stepped.update(groups)
        self.buffer.clear()
        await self._say(
            bus,
            StepFinished(
                run_id=lease.run_id,
                policy=self.policy,
                epoch=lease.epoch,
                step=step,
                version=grant.version,
                groups=groups,
                metrics={"loss": 0.1},
                checkpoint=f"checkpoint-{step}" if self.checkpoints else None,
            ),
            PolicyPublished(
                policy=self.policy,
                epoch=lease.epoch,
                version=grant.version,
                step=step,
                weights=self.world.blobs.put("weights", f"weights {step}".encode()),
            ),
        )
        return replace_lease(lease, step=step, version=grant.version)

    async def _say(self, bus: MemoryBus, *events: Any) -> None:
        for _ in range(self.repeat):
            for event in reversed(events) if self.repeat > 1 else events:
                await bus.publish(event)


def replace_lease(lease: LearnerLease, **changes: Any) -> LearnerLease:
    return msgspec.structs.replace(lease, **changes)


class Workers:
    """Runs workers until the block ends."""

    def __init__(self, *workers: Callable[[], Awaitable[None]]) -> None:
        self._workers = workers
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.ensure_future(worker()) for worker in self._workers]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


def everyone(world: World, **learner: Any) -> Workers:
    return Workers(lambda: runner(world), lambda: verifier(world), Learner(world, **learner))
