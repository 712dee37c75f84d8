"""What ends a run's training, and what comes after that."""

import pytest
from sqlalchemy import select

from evener_orchestrator.ledger.endings import HOPELESS_GROUPS, dispose
from evener_orchestrator.ledger.locks import lock_group
from evener_orchestrator.ledger.models import Run
from evener_orchestrator.states import GroupState, RunState
from tests.unit.orchestrator.rows import NOW, a_group, a_run, a_task, write
from tests.unit.orchestrator.world import run_file


@pytest.mark.parametrize(("step", "state"), [(0, RunState.FAILED), (1, RunState.RUNNING)])
async def test_what_was_under_way_when_training_ended_changes_nothing(ledger, step, state):
    over = {"state": GroupState.SKIPPED, "disposed_at": NOW}
    names = [f"g{number:02}" for number in range(HOPELESS_GROUPS + 2)]
    *earlier, last, under_way, another = names
    await write(
        ledger,
        [a_run(step=step, file=run_file(train={"steps": 9, "groups_per_step": 2})), a_task()],
        [a_group(name, number=number, **over) for number, name in enumerate(earlier)],
        [a_group(name, number=99, state=GroupState.TRAINING) for name in (last, under_way, another)],
    )
    reasons = []
    for name in (last, under_way, another):

        async def skip(tx, name=name):
            run, group = await lock_group(tx, name)
            if run.state is RunState.RUNNING:
                await dispose(tx, run, group, GroupState.SKIPPED, "no variance")
            reasons.append(run.reason)

        await ledger.write(skip)
    async with ledger.read() as session:
        run = (await session.scalars(select(Run))).one()
    assert run.state is state
    assert reasons[0] == reasons[1] == reasons[2] == run.reason
    assert run.file["train"]["steps"] == (step or 9)
