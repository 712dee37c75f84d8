"""A step is recorded with its version, in whatever order words come, and a run is at the last step before which none lacks."""

import msgspec
import pytest
from sqlalchemy import select

from evener.messages import PolicyPublished, StepFinished
from evener_orchestrator.ledger import learner, steps, versions
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.models import Group, PolicyVersion, Run, Step
from evener_orchestrator.states import GroupState, VersionState
from tests.unit.orchestrator.rows import NOW, a_group, a_run, a_task, write


def a_version(version, step, state=VersionState.ALLOTTED):
    return PolicyVersion(policy="r", version=version, state=state, epoch=1, step=step, weights="w", allotted_at=NOW)


def finished(step, **changes):
    word = StepFinished(
        run_id="r",
        policy="r",
        epoch=1,
        step=step,
        version=step + 1,
        groups=[f"g{step}"],
        checkpoint=f"c{step}",
        weights=f"w{step}",
    )
    return msgspec.structs.replace(word, **changes)


@pytest.fixture
async def training(ledger):
    """A run whose learner holds two groups, one for each of its two steps."""
    await write(
        ledger,
        [a_run(epoch=1, learner="l"), a_task()],
        [a_version(1, 0, VersionState.PUBLISHED), a_version(2, 1), a_version(3, 2)],
        [a_group(f"g{n}", number=n, state=GroupState.TRAINING, closed_at=NOW, issued_at=NOW) for n in (1, 2)],
    )
    return ledger


async def found(ledger):
    async with ledger.read() as session:
        run = (await session.scalars(select(Run))).one()
        states = [str(state) for state in await session.scalars(select(Group.state).order_by(Group.number))]
        published = select(PolicyVersion.version).where(PolicyVersion.state == VersionState.PUBLISHED)
        recorded = list(await session.scalars(select(Step.step).order_by(Step.step)))
        return run.step, states, sorted(await session.scalars(published)), recorded


async def test_a_step_publishes_its_version(training):
    await training.write(lambda tx: steps.finished(tx, finished(1)))
    assert await found(training) == (1, ["trained", "training"], [1, 2], [1])
    late = PolicyPublished(policy="r", epoch=1, version=2, step=1, weights="w1")
    await training.write(lambda tx: versions.published(tx, late))  # changes nothing
    await training.write(lambda tx: steps.finished(tx, finished(1)))
    assert await found(training) == (1, ["trained", "training"], [1, 2], [1])
    async with training.read() as session:
        assert (await session.get_one(PolicyVersion, ("r", 2))).weights == "w1"


async def test_the_last_step_does_not_end_a_run_whose_first_is_on_its_way(training):
    await training.write(lambda tx: steps.finished(tx, finished(2)))
    assert await found(training) == (0, ["training", "trained"], [1, 3], [2])
    await training.write(lambda tx: steps.finished(tx, finished(1)))
    assert await found(training) == (2, ["trained", "trained"], [1, 2, 3], [1, 2])


async def test_a_checkpoint_beyond_a_gap_is_not_gone_on_from(training):
    """The next learner would leave out what the missing step trained, or train it twice."""
    await training.write(lambda tx: steps.finished(tx, finished(2)))
    lease = await training.write(lambda tx: learner.claim(tx, "r", learner="l", lease_s=30))
    assert (lease.step, lease.version, lease.checkpoint) == (0, 1, None)
    assert await found(training) == (0, ["closed", "closed"], [1], [])


async def test_a_step_of_a_version_that_was_not_allotted_is_refused(training):
    with pytest.raises(Conflict, match="not allotted"):
        await training.write(lambda tx: steps.finished(tx, finished(1, version=9)))
    assert await found(training) == (0, ["training", "training"], [1], [])
