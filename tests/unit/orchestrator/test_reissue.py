"""A command is issued again until it has its effect, and no queue fills with copies of what only waits."""

from datetime import timedelta

from sqlalchemy import select

from evener.messages import TrainGroup, decode
from evener_orchestrator.ledger.models import Outgoing
from evener_orchestrator.ledger.reissue import LONGEST_S, REISSUE_S, reissue
from evener_orchestrator.states import GroupState
from tests.unit.orchestrator.rows import NOW, a_group, a_rollout, a_run, a_task, an_attempt, write


async def issued_in(ledger, hours: float) -> int:
    """How often what waits is issued when the loop looks every minute for so long, from `NOW` on."""
    number, minute = 0, timedelta(seconds=REISSUE_S)
    for beat in range(1, round(hours * 60) + 1):

        async def look(tx, now=NOW + beat * minute):
            tx.now = now
            return await reissue(tx, before=now - minute)

        number += await ledger.write(look)
    return number


async def test_a_rollout_that_waits_a_day_for_a_runner_leaves_few_copies(ledger):
    await write(ledger, [a_run(), a_task()], [a_group("g")], [a_rollout("o", "g")], [an_attempt("o")])
    assert await issued_in(ledger, 0.5) == 5  # after 1, 2, 4, 8 and 16 minutes
    assert await issued_in(ledger, 24) <= 24 * 3600 / LONGEST_S + 6


async def test_everything_is_issued_again_where_the_bus_has_forgotten_it(ledger):
    await write(ledger, [a_run(), a_task()], [a_group("g")], [a_rollout("o", "g")], [an_attempt("o")])
    for _ in range(3):
        assert await ledger.write(lambda tx: reissue(tx, before=tx.now)) == 1


async def test_a_group_whose_fate_is_not_told_is_asked_for_again(ledger):
    states = (GroupState.CLOSED, GroupState.TRAINING, GroupState.TRAINED, GroupState.SKIPPED)
    groups = [a_group(f"g{n}", number=n, state=state, closed_at=NOW, issued_at=NOW) for n, state in enumerate(states)]
    await write(ledger, [a_run(), a_task()], groups)
    assert await ledger.write(lambda tx: reissue(tx, before=tx.now - timedelta(seconds=REISSUE_S))) == 2
    async with ledger.read() as session:
        bodies = (await session.scalars(select(Outgoing.body))).all()
    assert {decode(body.encode()).group_id for body in bodies} == {"g0", "g1"}
    assert all(isinstance(decode(body.encode()), TrainGroup) for body in bodies)
