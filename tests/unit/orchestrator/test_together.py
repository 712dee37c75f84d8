"""What waits is done in one transaction, and each sees the result of its own work."""

import asyncio

import pytest
from sqlalchemy import select
from sqlalchemy.exc import TimeoutError as PoolTimeout

from evener.messages import RunRollout
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.models import Outgoing
from evener_orchestrator.ledger.together import MOST, Together


@pytest.fixture
def commits(ledger):
    """The transactions that were committed, each as the number of messages in the outbox then."""
    made = []
    ledger._on_commit = made.append
    return made


def say(number, failure=None):
    async def work(tx):
        tx.send(RunRollout(run_id="r", rollout_id=f"o{number}", attempt=1))
        await tx.session.flush()
        if failure is not None:
            raise failure
        return number

    return work


async def said(ledger):
    async with ledger.read() as session:
        return sorted(await session.scalars(select(Outgoing.body)))


async def at_once(together, works):
    async with asyncio.timeout(30):
        return await asyncio.gather(*(together.write(work) for work in works), return_exceptions=True)


async def test_what_waits_shares_a_transaction(ledger, commits):
    together = Together(ledger)
    assert await at_once(together, [say(number) for number in range(2 * MOST + 1)]) == list(range(2 * MOST + 1))
    assert len(commits) == 3  # the first alone, for nobody waited
    assert len(await said(ledger)) == 2 * MOST + 1
    assert await together.write(say(99)) == 99


async def test_a_failure_is_its_own_and_nothing_is_done_twice(ledger, commits):
    works = [say(0), say(1), say(2, Conflict("too late")), say(3)]
    results = await at_once(Together(ledger), works)
    assert [str(result) for result in results] == ["0", "1", "too late", "3"]
    assert len(await said(ledger)) == 3
    assert len(commits) == 3


@pytest.mark.parametrize("down", [ConnectionRefusedError(111, "refused"), PoolTimeout("all 26 connections are in use")])
async def test_while_the_database_is_down_all_who_wait_are_told(ledger, commits, down):
    together, tries = Together(ledger), []

    async def refused(tx):
        tries.append(1)
        raise down

    results = await at_once(together, [say(0), *(refused for _ in range(3 * MOST))])
    assert results[0] == 0
    assert {type(result) for result in results[1:]} == {type(down)}
    assert len(tries) == 1
    assert await together.write(say(1)) == 1


async def test_who_leaves_stops_nobody(ledger, commits):
    together = Together(ledger)
    first, left, last = (asyncio.create_task(together.write(say(number))) for number in range(3))
    await asyncio.sleep(0)
    left.cancel()
    async with asyncio.timeout(30):
        assert (await first, await last) == (0, 2)
    assert len(await said(ledger)) == 2
    await together.close()
