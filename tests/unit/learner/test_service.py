"""The learner against a ledger and an engine: steps, versions, refusals, restarts and stops."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from evener.blobs import Area, Blobs
from evener.bus import MemoryBus
from evener.errors import InfraError
from evener.messages import EVENTS, GroupClosed, PolicyPublished, StepFinished, train_queue
from evener.settings import Settings
from evener_learner import campaign, publisher, service
from evener_learner.folders import read_position, unpack_folder
from tests.unit.learner.engines import StubEngine, serving
from tests.unit.learner.making import pair, tiny_policy

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "POLL_S", 0.05)
    monkeypatch.setattr(publisher, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(campaign, "LOOK_S", 0.2)


class Stack:
    """A ledger, an engine, and learners that come and go."""

    def __init__(self, ledger, engine: StubEngine, settings: Settings) -> None:
        self.ledger = ledger
        self.engine = engine
        self.settings = settings
        self.stop = asyncio.Event()
        self.learner: asyncio.Task[None] | None = None

    def start(self, policy: str | None = "tiny") -> None:
        self.stop = asyncio.Event()
        ledger = self.ledger
        self.learner = asyncio.create_task(
            service.serve(self.settings, ledger.bus, ledger.blobs, policy=policy, stop=self.stop, name="learner-1")
        )

    async def halt(self) -> None:
        """Stop the learner; one that does not heed it fails the test."""
        assert self.learner is not None
        self.stop.set()
        async with asyncio.timeout(40):
            await self.learner

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition`` holds; a learner that ends meanwhile gives its error."""
        assert self.learner is not None
        async with asyncio.timeout(40):
            while not condition():
                if self.learner.done():
                    self.learner.result()
                await asyncio.sleep(0.01)

    async def serves(self, version: int) -> None:
        """Wait until the engine serves a version."""
        await self.until(lambda: self.engine.version == str(version) and not self.engine.paused)

    async def refused(self, group_id: str) -> GroupClosed:
        """Wait for the refusal of a group."""
        await self.until(lambda: any(event.group_id == group_id for event in self.ledger.of(GroupClosed)))
        return next(event for event in self.ledger.of(GroupClosed) if event.group_id == group_id)

    async def train_one(self) -> StepFinished:
        """Offer the groups of one step and wait for it."""
        before = len(self.ledger.of(StepFinished))
        for _ in range(2):
            await self.ledger.offer(self.engine)
        await self.until(lambda: len(self.ledger.of(StepFinished)) > before)
        return self.ledger.of(StepFinished)[-1]


@asynccontextmanager
async def stack(policy: Path, folder: Path, *, steps: int) -> AsyncIterator[Stack]:
    from tests.unit.learner.ledger import Ledger

    engine, bus = StubEngine(), MemoryBus()
    ledger = Ledger(bus, Blobs(folder / "blobs"), policy, steps=steps)
    consumer = asyncio.create_task(ledger.consume())
    async with serving(ledger.handle) as api, serving(engine.handle) as url:
        made = Stack(ledger, engine, Settings(url=api, engine_urls=[url], data=folder / "data"))
        try:
            yield made
        finally:
            consumer.cancel()
            if made.learner is not None:
                made.learner.cancel()
                await asyncio.wait({made.learner}, timeout=15)


async def test_it_learns_and_goes_back_to_wait(policy: Path, tmp_path: Path) -> None:
    from tests.unit.learner.ledger import FAVOURED

    async with stack(policy, tmp_path, steps=10) as made:
        ledger = made.ledger
        made.start()
        await made.serves(1)
        first = float(ledger.probability(policy)[list(FAVOURED)].sum())
        steps = [await made.train_one() for _ in range(10)]
        assert [step.step for step in steps] == list(range(1, 11))
        assert [step.version for step in steps] == list(range(2, 12))
        assert [event.version for event in ledger.of(PolicyPublished)] == list(range(2, 12))
        assert made.engine.version == "11"
        last = float(ledger.probability(Path(made.engine.path))[list(FAVOURED)].sum())
        assert last > first + 0.2
        trained = [group for step in steps for group in step.groups]
        assert len(trained) == len(set(trained)) == 20
        for name in ("reward_mean", "reward_std", "loss", "grad_norm", "kl", "ratio", "clip_fraction", "staleness_max"):
            assert name in steps[-1].metrics
        assert steps[0].metrics["ratio"] == pytest.approx(1, abs=1e-4)
        assert steps[0].metrics["trained_tokens"] == 16
        await asyncio.sleep(0.2)
        assert ledger.epoch == 1
        await made.halt()


async def test_a_full_blob_store_costs_no_step(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "RETRY_S", 0.05)
    async with stack(policy, tmp_path, steps=1) as made:
        made.start()
        await made.serves(1)
        put, refused = Blobs.put, list[str]()

        def full(blobs: Blobs, area: Area, data: bytes) -> str:
            if len(refused) < 3:
                refused.append(area)
                raise InfraError("blob_refused", "no space left on device")
            return put(blobs, area, data)

        monkeypatch.setattr(Blobs, "put", full)
        step = await made.train_one()
        assert (step.step, step.version, refused) == (1, 2, ["weights"] * 3)
        assert made.ledger.epoch == 1
        await made.halt()


async def test_without_a_policy_it_trains_that_of_the_oldest_run(policy: Path, tmp_path: Path) -> None:
    async with stack(policy, tmp_path, steps=1) as made:
        made.engine.version = "1"  # of whatever the engine was started with
        made.start(policy=None)
        await made.until(lambda: made.engine.path)
        assert "/learner/tiny/1/" in made.engine.path
        await made.train_one()
        assert made.engine.version == "2"
        updates = len(made.engine.calls)
        await asyncio.sleep(0.3)
        assert (len(made.engine.calls), made.ledger.epoch) == (updates, 1)
        await made.halt()


async def test_an_older_run_that_does_not_train_is_served_first(policy: Path, tmp_path: Path) -> None:
    async with stack(policy, tmp_path, steps=1) as made:
        made.ledger.before = [{"policy": "older", "kind": "eval", "state": "running"}]
        made.engine.version = "1"
        made.start(policy=None)
        await made.until(lambda: made.engine.path.endswith("/learner/older/newest"))
        await asyncio.sleep(0.3)
        assert made.ledger.epoch == 0
        made.ledger.before[0]["state"] = "done"
        await made.until(lambda: "/learner/tiny/1/" in made.engine.path)


async def test_killed_it_goes_on_from_its_checkpoint_with_the_next_version(policy: Path, tmp_path: Path) -> None:
    import torch

    async with stack(policy, tmp_path, steps=4) as made:
        made.start()
        await made.serves(1)
        await made.train_one()
        await made.train_one()
        assert made.learner is not None
        made.learner.cancel()
        with suppress(asyncio.CancelledError):
            await made.learner
        made.ledger.allotted += 1  # version 4 died with it
        made.engine.version = "default"
        made.start()
        await made.serves(3)
        step = await made.train_one()
        assert (step.epoch, step.step, step.version) == (2, 3, 5)
        assert step.checkpoint is not None
        checkpoint = unpack_folder(made.ledger.blobs.get("checkpoints", step.checkpoint), tmp_path / "checkpoint")
        assert read_position(checkpoint).published == [1, 2, 3, 5]
        state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
        assert {int(one["step"]) for one in state.values()} == {3}


async def test_restarted_after_the_last_step_it_reloads_the_engine(policy: Path, tmp_path: Path) -> None:
    async with stack(policy, tmp_path, steps=1) as made:
        made.start()
        await made.serves(1)
        await made.train_one()
        await made.halt()
        made.engine.version = "default"
        made.start()
        await made.serves(2)
        assert Path(made.engine.path).name == "newest"
        assert made.ledger.epoch == 1


async def test_a_deposed_learner_takes_no_message_of_the_next(policy: Path, tmp_path: Path) -> None:
    async with stack(policy, tmp_path, steps=1) as made:
        ledger = made.ledger
        made.start()
        await made.serves(1)
        kept = shutil.copytree(made.engine.path, tmp_path / "kept")  # a learner's next lease removes the files of the last
        known = await ledger.offer(made.engine)
        await made.until(lambda: ledger.claims == [(1, known)])
        ledger.epoch = 2
        await ledger.issue(ledger.orders[known])
        await made.until(lambda: ledger.epoch == 3)
        made.engine.path = str(kept)
        other = await ledger.offer(made.engine)
        await made.until(lambda: ledger.of(StepFinished))
        assert sorted(ledger.of(StepFinished)[0].groups) == sorted([known, other])
        assert ledger.claims[-2:] == [(3, known), (3, other)]


async def test_refused_groups_give_their_credit_back_at_once(policy: Path, tmp_path: Path) -> None:
    async with stack(policy, tmp_path, steps=3) as made:
        ledger = made.ledger
        made.start()
        await made.serves(1)
        flat = await made.refused(await ledger.offer(made.engine, signal=False))
        assert (flat.disposition, flat.reason, flat.epoch) == ("skipped", "no_signal", 1)
        future = pair(version=7)
        await ledger.issue(future)
        assert (await made.refused(future.group_id)).reason == "future_version"
        ledger.hold = 2
        assert (await made.train_one()).version == 2
        assert (await made.train_one()).version == 3
        old = pair(version=1)
        await ledger.issue(old)
        stale = await made.refused(old.group_id)
        assert (stale.disposition, stale.reason) == ("rejected", "stale")
        assert old.group_id not in [group for step in ledger.of(StepFinished) for group in step.groups]


async def test_once_a_command_that_comes_again_changes_nothing(policy: Path, tmp_path: Path) -> None:
    async with stack(policy, tmp_path, steps=2) as made:
        ledger = made.ledger
        made.start()
        await made.serves(1)
        first = await ledger.offer(made.engine)
        for _ in range(3):
            await ledger.issue(ledger.orders[first])
        second = await ledger.offer(made.engine)
        await made.until(lambda: ledger.of(StepFinished))
        assert ledger.of(StepFinished)[0].groups == [first, second]
        assert await ledger.bus.depth(train_queue("tiny")) == 0
        assert ledger.events == [event for event in ledger.events if isinstance(event, StepFinished | PolicyPublished)]


async def test_what_the_ledger_has_not_heard_is_said_again(policy: Path, tmp_path: Path) -> None:
    """A group that is asked for although its fate was told: the word was lost on its way."""
    async with stack(policy, tmp_path, steps=3) as made:
        ledger = made.ledger
        made.start()
        await made.serves(1)
        step = await made.train_one()
        skipped = await ledger.offer(made.engine, signal=False)
        refusal = await made.refused(skipped)
        for group in (step.groups[1], skipped):
            await ledger.issue(ledger.orders[group])
        await made.until(lambda: len(ledger.of(StepFinished)) == len(ledger.of(GroupClosed)) == 2)
        assert ledger.of(StepFinished) == [step, step]
        assert ledger.of(GroupClosed) == [refusal, refusal]
        assert step.weights == ledger.weights


async def test_fenced_a_learner_of_an_old_epoch_stops_training(policy: Path, tmp_path: Path) -> None:
    async with stack(policy, tmp_path, steps=5) as made:
        ledger = made.ledger
        made.start()
        await made.serves(1)
        ledger.refuse_versions = True
        for _ in range(2):
            await ledger.offer(made.engine)
        await made.until(lambda: made.ledger.epoch == 2)
        assert made.engine.version == "1"
        assert ledger.events == []


async def test_live_it_waits_for_an_engine_that_fails_and_loses_no_step(policy: Path, tmp_path: Path) -> None:
    async with stack(policy, tmp_path, steps=1) as made:
        made.start()
        await made.serves(1)
        made.engine.fail = {"/pause": 3, "/update_weights": 4}
        step = await made.train_one()
        assert step.version == 2
        assert made.engine.version == "2"
        assert not made.engine.paused
        assert made.engine.calls.count("/resume") == made.engine.calls.count("/pause?mode=keep&clear_cache=true")


async def test_live_a_stop_ends_any_wait(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "POLL_S", 600.0)
    monkeypatch.setattr(campaign, "LOOK_S", 600.0)
    monkeypatch.setattr(publisher, "FIRST_PAUSE_S", 600.0)
    async with stack(policy, tmp_path, steps=5) as made:
        made.ledger.state = "paused"
        made.start()
        await asyncio.sleep(0.2)
        await made.halt()  # in the wait for a lease
        made.ledger.state = "running"
        made.start()
        await made.serves(1)
        await made.ledger.offer(made.engine)
        await asyncio.sleep(0.3)
        await made.halt()  # in the wait for a group
        made.engine.version = "default"
        made.engine.fail = {"/start_weight_update": 10**6}
        made.start()
        await made.until(lambda: made.engine.fail["/start_weight_update"] < 10**6)
        await made.halt()  # in the wait for an engine


async def test_a_run_that_is_cancelled_frees_the_learner(policy: Path, tmp_path: Path) -> None:
    async with stack(policy, tmp_path, steps=5) as made:
        made.start()
        await made.serves(1)
        await asyncio.sleep(0.3)
        made.ledger.state = "cancelled"
        await asyncio.sleep(0.6)
        made.ledger.state = "running"
        await made.until(lambda: made.ledger.epoch == 2)


async def test_live_a_failing_step_ends_the_service_with_its_error(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evener_learner import trainer

    def break_down(*_: object) -> None:
        raise MemoryError("no room")

    async with stack(policy, tmp_path, steps=5) as made:
        made.start()
        await made.serves(1)
        monkeypatch.setattr(trainer.StepTrainer, "training_step", break_down)
        for _ in range(2):
            await made.ledger.offer(made.engine)
        assert made.learner is not None
        with pytest.raises(MemoryError, match="no room"):
            await asyncio.wait_for(made.learner, 20)
        assert await made.ledger.bus.depth(EVENTS) == 0
