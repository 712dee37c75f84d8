"""Every loop of an orchestrator outlives its failures: what went wrong is logged, and it tries again.

A loop is woken by an event or by its period, whichever comes first. Run by `orchestrator.run`.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial

from sqlalchemy import select

from evener import log
from evener_orchestrator import planner
from evener_orchestrator.consumer import consume
from evener_orchestrator.context import Context
from evener_orchestrator.ledger import regrades, runs
from evener_orchestrator.ledger.models import Run
from evener_orchestrator.ledger.reissue import REISSUE_S, reissue
from evener_orchestrator.outbox import BATCH, send
from evener_orchestrator.queues import delete_queues
from evener_orchestrator.release import release
from evener_orchestrator.silence import Silence
from evener_orchestrator.states import RunState

GATHER_S = 0.02
"""Changes within this time are planned for at once: a group's rollouts end in bunches."""

SHARE = 2.0
"""A loop that is woken without end pauses so many times as long as its work last took (`LONGEST_GATHER_S` at most): the more
there is to do, the more is done at once, and the ledger's other writers get their turn."""

LONGEST_GATHER_S = 0.5

RELEASE_S = 2.0
"""The proxy's memory of a finished session is small: many are released at once."""

QUEUES_S = 60.0

FAILURE_PAUSE_S = 1.0
_log = log.get("orchestrator")


async def run_loops(context: Context) -> None:
    """Run every loop until cancelled."""
    lease_s = context.settings.lease_s
    # A bus of this process has forgotten everything; of a broker another orchestrator may have just been told.
    await issue_again(context, age_s=REISSUE_S if context.settings.amqp_url else 0.0)
    async with asyncio.TaskGroup() as loops:
        loops.create_task(_supervise("events", lambda: consume(context)))
        loops.create_task(_every("planner", lambda: plan(context), 1.0, context.planner, GATHER_S))
        loops.create_task(_every("outbox", lambda: drain_outbox(context), 1.0, context.outbox))
        loops.create_task(_every("release", lambda: drain_sessions(context), RELEASE_S))
        loops.create_task(_every("queues", lambda: drop_queues(context), QUEUES_S))
        loops.create_task(_every("reissue", lambda: issue_again(context, age_s=REISSUE_S), REISSUE_S))
        silence = Silence(context.ledger, lease_s=lease_s)
        loops.create_task(_every("leases", silence.end_attempts, min(2.0, lease_s / 4)))


async def run_regrading(context: Context) -> None:
    """Run what regrades need, until cancelled: nothing of a run is planned, dispatched or ended meanwhile."""
    await issue_regrades_again(context, age_s=0.0)
    async with asyncio.TaskGroup() as loops:
        loops.create_task(_supervise("events", lambda: consume(context)))
        loops.create_task(_every("outbox", lambda: drain_outbox(context), 1.0, context.outbox))


async def plan(context: Context) -> None:
    """Advance every run that is running."""
    async with context.ledger.read() as session:
        running = select(Run.id, Run.prompt_mode).where(Run.state == RunState.RUNNING).order_by(Run.id)
        found = (await session.execute(running)).all()
    for run_id, prompt_mode in found:
        if prompt_mode == runs.UNKNOWN:
            problem = await context.sessions.prompt_problem()
            await context.ledger.write(partial(runs.resolve_prompts, run_id=run_id, problem=problem))
        await context.ledger.write(partial(planner.advance, run_id=run_id))


async def drain_outbox(context: Context) -> None:
    """Send until nothing waits."""
    while await send(context.ledger, context.bus) == BATCH:
        pass


async def drain_sessions(context: Context) -> None:
    """Release until nothing waits, where no other orchestrator is about it."""
    async with context.ledger.alone("release") as mine:
        while mine and await release(context.ledger, context.sessions):
            pass


async def drop_queues(context: Context) -> None:
    """Delete until nothing is left of runs that are over."""
    while await delete_queues(context.ledger, context.bus):
        pass


async def issue_again(context: Context, *, age_s: float) -> None:
    """Issue the commands that had no effect for ``age_s`` seconds."""
    number = await context.ledger.write(lambda tx: reissue(tx, before=tx.now - timedelta(seconds=age_s)))
    number += await issue_regrades_again(context, age_s=age_s)
    if number:
        _log.info("reissued", commands=number)


async def issue_regrades_again(context: Context, *, age_s: float) -> int:
    """The same for regrades alone; the number of commands."""
    return await context.ledger.write(lambda tx: regrades.reissue(tx, before=tx.now - timedelta(seconds=age_s)))


async def _every(
    name: str, work: Callable[[], Awaitable[None]], period_s: float, wake: asyncio.Event | None = None, gather_s: float = 0.0
) -> None:
    """Do ``work`` now, ``gather_s`` or more after ``wake`` was set, and every ``period_s`` seconds."""
    wake = wake or asyncio.Event()

    async def forever() -> None:
        took = 0.0
        while True:
            await asyncio.sleep(max(gather_s, min(SHARE * took, LONGEST_GATHER_S)))
            wake.clear()
            began = time.monotonic()
            await work()
            took = time.monotonic() - began
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await wake.wait()

    await _supervise(name, forever)


async def _supervise(name: str, loop: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await loop()
        except Exception as error:  # noqa: BLE001 - a supervisor: it records and goes on
            _log.error("loop_failed", loop=name, exc_info=error)
            await asyncio.sleep(FAILURE_PAUSE_S)
