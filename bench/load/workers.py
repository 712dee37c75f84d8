"""Scripted runners and verifiers: what the real ones say on bus, API and proxy, without sandboxes, agents and tests.

An attempt claims, beats, waits for an engine, opens a session, makes its calls with pauses between them, drains, seals and
reports, in the order of `evener_runner.attempt`; a scoring asks for its order, and reports a random score. Each request's
seconds are kept by name. Run by `bench.load`.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from evener.api import ApiClient, Refused, RolloutLease
from evener.bus import Bus, Delivery, publish_patiently
from evener.errors import EvenerError, InfraError, Outcome
from evener.ids import session_id
from evener.messages import ROLLOUTS, WORKSPACES, Message, RolloutFinished, RolloutScored, RunRollout, ScoreWorkspace
from evener.proxy_admin import ProxyAdmin
from evener.trace.session import SessionSpec

SNAPSHOT = "sha256:" + "0" * 64
"""No workspace is stored: the ledger keeps the digest and asks for nothing more."""

PREFETCH = 64


@dataclass
class Times:
    """Seconds by what took them, in order, and what else is counted."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))
    counts: Counter[str] = field(default_factory=Counter[str])
    published: dict[str, float] = field(default_factory=dict[str, float])
    """When the bus had a report (Unix seconds), by ``finished``/``scored`` and attempt."""

    @contextlib.contextmanager
    def of(self, what: str) -> Generator[None]:
        """Measure the block."""
        began = time.perf_counter()
        yield
        self.seconds[what].append(time.perf_counter() - began)


@dataclass
class Workers:
    """Runners with ``slots`` slots together and verifiers, over one bus.

    Claims and orders, and heartbeats, have a client each: real runners have one of their own, and no heartbeat of theirs waits
    for a hundred claims of others.
    """

    bus: Bus
    api: ApiClient
    beats: ApiClient
    admin: ProxyAdmin
    http: aiohttp.ClientSession
    proxy_url: str
    slots: int
    calls: int
    agent_s: float
    times: Times
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def at_work(self) -> int:
        """Attempts and scorings under way."""
        return len(self._tasks)

    async def run_rollouts(self) -> None:
        """Take commands while there is a free slot, for ever."""
        free = asyncio.Semaphore(self.slots)
        async with self.bus.consume(ROLLOUTS, prefetch=PREFETCH) as commands:
            while True:
                await free.acquire()
                task = self._start(self._claim_and_work(await commands.get()))
                task.add_done_callback(lambda _: free.release())

    async def score_workspaces(self) -> None:
        """Score what comes, for ever."""
        async with self.bus.consume(WORKSPACES, prefetch=PREFETCH) as commands:
            while True:
                self._start(self._score(await commands.get()))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._counted(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _counted(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (Refused, EvenerError, aiohttp.ClientError) as error:
            self.times.counts[f"failed: {type(error).__name__}: {str(error)[:60]}"] += 1

    async def _claim_and_work(self, delivery: Delivery) -> None:
        command = delivery.message
        assert isinstance(command, RunRollout)
        try:
            with self.times.of("claim"):
                lease = await self.api.claim_rollout(session_id(command.rollout_id, command.attempt), runner="scripted")
        except Refused:
            self.times.counts["claims refused"] += 1
            return
        finally:
            await delivery.ack()
        async with self._beating(lease):
            report = await self._work(lease)
            await self._publish("finished", lease.session_id, report)

    async def _work(self, lease: RolloutLease) -> RolloutFinished:
        started = time.time()
        while await self.admin.problem(oldest_version=lease.oldest_version or 0):  # noqa: ASYNC110 - a service's word
            await asyncio.sleep(1.0)
        with self.times.of("open"):
            key = await self.admin.open(_spec(lease))
        messages = [{"role": "user", "content": f"Do {lease.task_id}."}]
        for number in range(self.calls):
            await asyncio.sleep(self.agent_s / self.calls * random.uniform(0.5, 1.5))
            with self.times.of("call"):
                reply = await self._call(lease.policy, key, messages)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"turn {number}"}]
        with self.times.of("read"):
            await self.admin.read(lease.session_id)
        with self.times.of("seal"):
            state = await self.admin.seal(lease.session_id)
        return RolloutFinished(
            rollout_id=lease.rollout_id,
            attempt=lease.attempt,
            lease=lease.lease,
            outcome=Outcome.FINISHED,
            sealed=state.sealed,
            snapshot=SNAPSHOT,
            logs=SNAPSHOT,
            exit_code=0,
            sandbox="scripted",
            harness_version="1",
            started=started,
            ended=time.time(),
        )

    async def _call(self, model: str, key: str, messages: list[dict[str, str]]) -> str:
        body = {"model": model, "messages": messages}
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post(self.proxy_url + "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise InfraError("proxy_refused", f"{response.status}: {(await response.text())[:200]}")
            return (await response.json())["choices"][0]["message"]["content"]

    @contextlib.asynccontextmanager
    async def _beating(self, lease: RolloutLease) -> AsyncGenerator[None]:
        task = asyncio.create_task(self._beat(lease))
        try:
            yield
        finally:
            task.cancel()

    async def _beat(self, lease: RolloutLease) -> None:
        while True:
            await asyncio.sleep(lease.lease_s / 3)
            try:
                with self.times.of("heartbeat"):
                    await self.beats.heartbeat(lease.session_id, lease=lease.lease)
            except (Refused, EvenerError) as error:
                self.times.counts[f"heartbeat: {type(error).__name__}"] += 1
                return

    async def _score(self, delivery: Delivery) -> None:
        command = delivery.message
        assert isinstance(command, ScoreWorkspace)
        session = session_id(command.rollout_id, command.attempt)
        try:
            with self.times.of("order"):
                await self.api.scoring(session)
        except Refused:
            self.times.counts["scorings refused"] += 1
        else:
            scored = RolloutScored(
                rollout_id=command.rollout_id, attempt=command.attempt, scores={"reward": random.random()}, seconds=0.01
            )
            await self._publish("scored", session, scored)
        await delivery.ack()

    async def _publish(self, what: str, session: str, report: Message) -> None:
        self.times.published[f"{what} {session}"] = time.time()
        with self.times.of(f"publish {what}"):
            await publish_patiently(self.bus, report)


def _spec(lease: RolloutLease) -> SessionSpec:
    return SessionSpec(
        session_id=lease.session_id,
        rollout_id=lease.rollout_id,
        attempt=lease.attempt,
        harness=lease.harness.name,
        policy=lease.policy,
        purpose=lease.purpose,
        version=lease.version,
        oldest_version=lease.oldest_version,
        sampling=lease.sampling,
        budget=lease.budget,
        prompt_mode=lease.prompt_mode,
        thinking=lease.thinking,
    )
