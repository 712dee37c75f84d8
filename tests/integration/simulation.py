"""An Evener whose processes act one at a time, in the order and at the time that a test chooses, and die where it says.

Ledger (SQLite), planner, outbox, consumer and release are the shipped ones; runner, verifier and learner say and ask what the
real ones do, in their order. Time is the database's clock moved ahead by the test. The wire is a list of messages that are
not acknowledged. A process can die at a seam: a commit of the ledger that changes something, or a publication.
"""

import contextlib
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from evener.api import GroupOrder, LearnerLease, RolloutLease
from evener.blobs import Blobs
from evener.errors import InputError
from evener.ids import session_id
from evener.messages import (
    GroupClosed,
    Message,
    PolicyPublished,
    RolloutFinished,
    RolloutScored,
    RunRollout,
    ScoreWorkspace,
    StepFinished,
    TrainGroup,
)
from evener.runfile import RunFile
from evener.settings import Settings
from evener_orchestrator import consumer, loops
from evener_orchestrator.archive import Archiver
from evener_orchestrator.context import Context
from evener_orchestrator.ledger import Transaction, attempts, engine, groups, learner, regrades, runs, tasks, versions
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.models import Attempt, Base, Outgoing, Run
from evener_orchestrator.ledger.reissue import REISSUE_S
from evener_orchestrator.states import RunState
from tests.unit.orchestrator.world import FakeSessions, FakeTrace, finished, migrated_ledger, run_file

LEASE_S = 30.0
POLICY = "first-run"
ROUNDS = 300
"""More rounds of everybody than any life takes; one that needs more does not end."""

PATIENT_ROUNDS = 20
"""How many rounds a learner waits until the ledger has read its last step."""

Side = Literal["before", "after"]
T = TypeVar("T")


class Died(BaseException):
    """The process that acted is gone; what it was about to do did not happen."""


class Seams:
    """Counts the calls of both seams. At call ``fatal`` (0, 1, ...) the process dies, ``before`` or ``after`` its effect."""

    def __init__(self) -> None:
        self.arm(None)

    def arm(self, fatal: int | None, side: Side = "before") -> None:
        """Count from 0 again."""
        self.calls: list[str] = []
        self.fatal = fatal
        self.side: Side = side
        self.dead = False

    async def through(self, name: str, effect: Callable[[], Awaitable[None]]) -> None:
        """Let an effect happen, or the process die at it; one that is dead has no further effects."""
        if self.dead:
            raise Died
        fatal = len(self.calls) == self.fatal
        self.calls.append(name)
        if fatal and self.side == "before":
            self.dead = True
            raise Died
        await effect()
        if fatal:
            self.dead = True
            raise Died

    @property
    def reached(self) -> bool:
        """Whether the fatal call was made."""
        return self.fatal is not None and len(self.calls) > self.fatal


class Clock:
    """How far the ledger's time is ahead of the real one."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def pass_by(self, seconds: float) -> None:
        """Let time pass."""
        self.ahead += timedelta(seconds=seconds)


@contextlib.contextmanager
def simulated(seams: Seams, clock: Clock) -> Generator[None]:
    """Every session's commit goes through the seams, and every transaction asks the moved clock."""
    commit, read_clock, seen = AsyncSession.commit, engine._clock, dict[int, int]()

    async def commit_through(session: AsyncSession) -> None:
        await session.flush()
        driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
        if seen.get(id(driver), 0) == driver.total_changes:
            await commit(session)
            return
        seen[id(driver)] = driver.total_changes
        await seams.through("commit", lambda: commit(session))

    async def moved_clock(session: AsyncSession, *, sqlite: bool) -> datetime:
        return await read_clock(session, sqlite=sqlite) + clock.ahead

    with (
        patch.object(AsyncSession, "commit", commit_through),
        patch.object(engine, "_clock", moved_clock),
        patch.object(loops, "GATHER_S", 0.0),
    ):
        yield


@dataclass(eq=False)
class InFlight:
    """A message that was published and not acknowledged, as a delivery of it."""

    wire: "list[InFlight]"
    message: Message
    redelivered: bool = False

    async def ack(self) -> None:
        """It is done; a copy of it may have been already."""
        if self in self.wire:
            self.wire.remove(self)

    async def hand_back(self) -> None:
        """It stays."""

    async def reject(self, reason: str) -> None:
        """No handler may fail on a message, however late or often it comes."""
        raise AssertionError(f"{self.message}: {reason}")


@dataclass
class LearnerMemory:
    """What a learner's process knows, and what dies with it."""

    lease: LearnerLease
    known: set[str] = field(default_factory=set[str])
    buffer: list[GroupOrder] = field(default_factory=list[GroupOrder])
    told: dict[str, Message] = field(default_factory=dict[str, Message])
    waits: int = 0


class Simulation:
    """One run of one policy at a time. ``together``: every process and the bus die with the one that dies (as embedded)."""

    def __init__(self, folder: Path, *, together: bool = False) -> None:
        self.folder = folder
        self.seams = Seams()
        self.clock = Clock()
        self.together = together
        self._forget()

    def _forget(self) -> None:
        self.blobs = Blobs(self.folder / "blobs")
        self.trace = FakeTrace()
        self.sessions = FakeSessions(self.trace)
        self.engine_version = 1
        self.scores: dict[str, float] = {}
        self.wire: list[InFlight] = []
        self.said: list[Message] = []
        self.deaths = 0
        self.report: Callable[[RolloutLease, RolloutFinished], RolloutFinished | None] = lambda _, event: event
        self.judge: Callable[[RolloutScored], RolloutScored | None] = lambda event: event
        self._places: dict[str, list[str]] = {}
        self._learner: LearnerMemory | None = None

    async def start(self, file: dict[str, Any], *, task_count: int = 1) -> None:
        """A ledger with one run in it; of an earlier run nothing stays but the open database, whose statements are compiled."""
        self.seams.arm(None)
        self._forget()
        if not hasattr(self, "context"):
            database = self.folder / "ledger.db"
            database.parent.mkdir(parents=True, exist_ok=True)
            database.write_bytes(await migrated_ledger())
            self.context = self._new_context()
        else:
            await self.context.ledger.write(_empty)
            self.context.archiver, self.context.sessions = self._parts()
            self.context.refused.clear()
        submission = runs.Submission(
            file=RunFile.model_validate(file),
            tasks=[f"sha256:train-{n}" for n in range(task_count)],
            eval_tasks=["sha256:held-out"] if file.get("eval") else [],
            weights=self.blobs.put("weights", b"start"),
            trusted=True,
            new=False,
        )

        async def submit(tx: Transaction) -> None:
            for digest in (*submission.tasks, *submission.eval_tasks):
                await tasks.register(tx, digest=digest, task_id=digest, family="f", agent_bundle="a", grader_bundle="g")
            await runs.submit(tx, submission)

        await self.context.ledger.write(submit)

    async def close(self) -> None:
        """Close the ledger's files."""
        await self.context.ledger.close()

    async def act(self, work: Awaitable[object]) -> None:
        """One process does something; where it dies of it, the next of its kind takes its place."""
        try:
            await work
        except Died:
            await self.replace(all_of_them=self.together)

    async def replace(self, *, all_of_them: bool) -> None:
        """A process that died starts again; ``all_of_them``: everything that lives in memory is gone."""
        self.seams.dead = False
        self.deaths += 1
        if all_of_them:
            self._learner = None
            self.wire.clear()
            self.trace.calls.clear()
        await self.act(loops.issue_again(self.context, age_s=0.0 if all_of_them else REISSUE_S))

    async def live(self) -> None:
        """Everybody acts in turn until the run is over and nothing is left."""
        for _ in range(ROUNDS):
            before = len(self.seams.calls), self.deaths
            await self.round()
            if before != (len(self.seams.calls), self.deaths):
                continue
            if await self.at_rest():
                return
            self.clock.pass_by(max(LEASE_S, REISSUE_S) + 1)
            await self.act(self.context.ledger.write(attempts.expire))
            await self.act(loops.issue_again(self.context, age_s=REISSUE_S))
        raise AssertionError(f"no end after {ROUNDS} rounds; in flight: {[each.message for each in self.wire]}")

    async def round(self) -> None:
        """One turn of every process."""
        await self.act(loops.plan(self.context))
        await self.act(loops.drain_outbox(self.context))
        for delivery in list(self.wire):
            await self.act(self.deliver(delivery))
        await self.act(self.claim_policy())
        await self.act(self.train())
        await self.act(loops.drain_sessions(self.context))

    async def at_rest(self) -> bool:
        """Whether the run is over, and neither message nor session is left."""
        async with self.context.ledger.read() as session:
            going = await session.scalar(select(Run.id).where(Run.state.in_((RunState.RUNNING, RunState.PAUSED))))
            waiting = await session.scalar(select(Outgoing.id).limit(1))
            held = await session.scalar(select(Attempt.id).where(Attempt.released_at.is_(None)).limit(1))
        return going is None and waiting is None and held is None and not self.wire

    async def publish(self, message: Message, *, priority: int = 0) -> None:
        """The bus."""

        async def put() -> None:
            self.said.append(message)
            self.wire.append(InFlight(self.wire, message))

        await self.seams.through(f"publish {type(message).__name__}", put)

    async def deliver(self, delivery: InFlight) -> None:
        """Give a message to whom it is for; one that nobody consumes now stays."""
        match delivery.message:
            case RunRollout():
                await self._run(delivery, delivery.message)
            case ScoreWorkspace():
                await self._score(delivery, delivery.message)
            case TrainGroup():
                await self._receive(delivery, delivery.message)
            case _:
                await consumer.settle(self.context, delivery)

    async def ask(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        """A worker's request: asked again where the orchestrator dies over it. Raises Conflict."""
        while True:
            try:
                return await self.context.ledger.write(work)
            except Died:
                if self.together:
                    raise
                await self.replace(all_of_them=False)

    def score(self, lease: RolloutLease) -> float:
        """0, 1, 0, ... by the rollouts of a group, whatever their attempts: there is always something to learn."""
        places = self._places.setdefault(lease.group_id, [])
        if lease.rollout_id not in places:
            places.append(lease.rollout_id)
        return float(places.index(lease.rollout_id) % 2)

    async def _run(self, delivery: InFlight, command: RunRollout) -> None:
        session = session_id(command.rollout_id, command.attempt)
        try:
            lease = await self.ask(lambda tx: attempts.claim(tx, session, runner="r", lease_s=LEASE_S))
        except (Conflict, InputError):
            await delivery.ack()
            return
        await delivery.ack()
        event = self.report(lease, finished(self, lease))
        if event is not None:
            await self.publish(event)

    async def _score(self, delivery: InFlight, command: ScoreWorkspace) -> None:
        session = session_id(command.rollout_id, command.attempt)
        try:
            await self.ask(lambda tx: regrades.order(tx, session, begins=True))
        except (Conflict, InputError):
            await delivery.ack()
            return
        event = RolloutScored(
            rollout_id=command.rollout_id, attempt=command.attempt, scores={"reward": self.scores.get(session, 0.0)}
        )
        judged = self.judge(event)
        if judged is not None:
            await self.publish(judged)
            await delivery.ack()

    async def claim_policy(self) -> None:
        """A learner without a lease asks for one."""
        if self._learner is not None:
            return
        try:
            lease = await self.ask(lambda tx: learner.claim(tx, POLICY, learner="l", lease_s=LEASE_S))
        except Conflict:
            return
        if lease is not None:
            self._learner = LearnerMemory(lease)
            self.engine_version = lease.version

    def lose_learner(self) -> None:
        """The learner's process dies between two of its words."""
        self._learner = None

    async def _receive(self, delivery: InFlight, command: TrainGroup) -> None:
        memory = self._learner
        if memory is None:
            await self._drop_if_over(delivery, command)
            return
        order: GroupOrder | str = "known"
        if command.group_id not in memory.known:
            try:
                order = await self.ask(lambda tx: groups.claim(tx, command.group_id, epoch=memory.lease.epoch))
            except Conflict:
                order = "refused"
        await delivery.ack()
        if isinstance(order, str):
            if command.group_id in memory.told:
                await self._say(memory.told[command.group_id])
            return
        memory.known.add(order.group_id)
        if len({rollout.reward for rollout in order.rollouts}) < 2:
            word = GroupClosed(group_id=order.group_id, epoch=memory.lease.epoch, disposition="skipped")
            memory.told[order.group_id] = word
            await self._say(word)
        else:
            memory.buffer.append(order)

    async def _drop_if_over(self, delivery: InFlight, command: TrainGroup) -> None:
        """The queue of a run that is over is deleted with what waits in it (`queues.delete_queues`)."""
        if await self._over(command.run_id):
            await delivery.ack()

    async def _over(self, run_id: str) -> bool:
        async with self.context.ledger.read() as session:
            return (await session.get_one(Run, run_id)).state not in (RunState.RUNNING, RunState.PAUSED)

    async def train(self) -> None:
        """A step, where the learner holds enough groups for one."""
        memory = self._learner
        if memory is None:
            return
        if await self._over(memory.lease.run_id):
            self._learner = None
            return
        lease, size = memory.lease, int(memory.lease.train["groups_per_step"])
        if lease.step >= int(lease.train["steps"]):
            await self._settle(memory)
            return
        if len(memory.buffer) < size:
            return
        step = lease.step + 1
        try:
            grant = await self.ask(lambda tx: versions.allot(tx, POLICY, epoch=lease.epoch, step=step))
        except Conflict:
            self._learner = None
            return
        if grant.wait_s:
            return
        trained, memory.buffer = memory.buffer[:size], memory.buffer[size:]
        self.engine_version = grant.version
        weights = self.blobs.put("weights", f"{lease.epoch} {step}".encode())
        words = {"policy": POLICY, "epoch": lease.epoch, "step": step, "version": grant.version}
        await self._say(PolicyPublished(weights=weights, **words))
        ids = [order.group_id for order in trained]
        metrics = {"rollouts": float(sum(len(order.rollouts) for order in trained))}
        checkpoint = f"checkpoint {lease.epoch} {step}"
        word = StepFinished(run_id=lease.run_id, groups=ids, metrics=metrics, checkpoint=checkpoint, weights=weights, **words)
        memory.told |= dict.fromkeys(ids, word)
        await self._say(word)
        memory.lease = msgspec.structs.replace(lease, step=step)

    async def _settle(self, memory: LearnerMemory) -> None:
        """Give the policy up once the ledger has the last step, or after a long wait for it."""
        lease = memory.lease
        memory.waits += 1
        async with self.context.ledger.read() as session:
            recorded = (await session.get_one(Run, lease.run_id)).step
        if recorded >= lease.step or memory.waits > PATIENT_ROUNDS:
            self._learner = None
            with contextlib.suppress(Conflict):
                await self.ask(lambda tx: learner.release(tx, POLICY, epoch=lease.epoch, step=lease.step))

    async def _say(self, message: Message) -> None:
        """The learner's memory dies with it."""
        try:
            await self.publish(message)
        except Died:
            self._learner = None
            raise

    def _new_context(self) -> Context:
        bus: Any = self
        archiver, sessions = self._parts()
        settings = Settings(data=self.folder, lease_s=LEASE_S)
        return Context(settings, bus, self.blobs, archiver, sessions, ping_redis=_pong)

    def _parts(self) -> tuple[Archiver, Any]:
        return Archiver(self.trace), self.sessions


async def _pong() -> bool:
    return True


async def _empty(tx: Transaction) -> None:
    for table in reversed(Base.metadata.sorted_tables):
        await tx.session.execute(table.delete())


def small_run(**changes: Any) -> dict[str, Any]:
    """An evaluation, one step of one group, and an evaluation."""
    return run_file(
        **{
            "rollouts": {"group_size": 2, "concurrent": 4},
            "train": {"steps": 1, "groups_per_step": 1, "max_staleness": 0},
            "eval": {"tasks": "./held-out", "every": 0, "group_size": 1},
        }
        | changes
    )
