"""Where the ledger could not be written nobody was silent: no attempt ends for that."""

import asyncio
from types import SimpleNamespace

import pytest
from sqlalchemy import func, select

from evener_orchestrator import silence
from evener_orchestrator.ledger.models import Attempt
from evener_orchestrator.silence import Silence
from tests.unit.orchestrator.rows import a_claimed_run, a_task, write

LEASE_S = 30.0


@pytest.fixture
def clock(monkeypatch):
    """The clock of whoever watches; ``now`` is a test's to set."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(silence, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
async def watch(ledger, clock):
    """Over two attempts whose leases have run out, by an orchestrator that has just started."""
    await write(ledger, [a_task()])
    await a_claimed_run(ledger, groups=1)
    return Silence(ledger, lease_s=LEASE_S)


async def running(ledger):
    async with ledger.read() as session:
        return await session.scalar(select(func.count()).where(Attempt.ended_at.is_(None)))


async def test_who_starts_gives_every_runner_the_time_of_a_lease(ledger, watch, clock):
    clock.now += LEASE_S - 1
    await watch.end_attempts()
    assert await running(ledger) == 2
    clock.now += 2
    await watch.end_attempts()
    assert await running(ledger) == 0


async def test_so_does_who_could_not_write(ledger, watch, clock, monkeypatch):
    clock.now += LEASE_S + 1

    async def refused(work):
        raise ConnectionRefusedError(111, "refused")

    with monkeypatch.context() as away:
        away.setattr(ledger, "write", refused)
        for _ in range(3):
            with pytest.raises(ConnectionRefusedError):
                await watch.end_attempts()
            clock.now += LEASE_S / 2
    await watch.end_attempts()
    assert await running(ledger) == 2
    clock.now += LEASE_S
    await watch.end_attempts()
    assert await running(ledger) == 0


async def test_and_who_waited_for_a_database_that_had_stalled(ledger, watch, clock, monkeypatch):
    clock.now += LEASE_S + 1
    write = ledger.write

    async def stalled(work):
        clock.now += LEASE_S
        await asyncio.sleep(0)
        return await write(work)

    with monkeypatch.context() as slow:
        slow.setattr(ledger, "write", stalled)
        await watch.end_attempts()
    await watch.end_attempts()
    assert await running(ledger) == 2
    clock.now += LEASE_S + 1
    await watch.end_attempts()
    assert await running(ledger) == 0
