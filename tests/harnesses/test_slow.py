"""A reply that takes `SLOW_S`: no agent gives up, asks twice or loses the turn. All agents wait for it at the same time."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from tests.harnesses.agents import Agent, selected
from tests.harnesses.checks import check_capture, check_ending, check_history, check_one_line
from tests.harnesses.expected import ending
from tests.harnesses.report import row
from tests.harnesses.rollout import SLOW_S, Seen, roll_out
from tests.harnesses.scenarios import fault

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("slow")]

Rollouts = dict[str, "asyncio.Task[Seen]"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rollouts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rollouts]:
    """One rollout for each agent, all under way."""
    running = {
        agent.id: asyncio.create_task(roll_out(agent, fault("slow", agent), tmp_path_factory.mktemp(agent.id)))
        for agent in selected()
    }
    yield running
    await asyncio.gather(*running.values(), return_exceptions=True)


@pytest.mark.parametrize("agent", selected(), ids=lambda agent: agent.id)
async def test_slow(agent: Agent, rollouts: Rollouts, record_property: Callable[[str, object], None]) -> None:
    seen = await rollouts[agent.id]
    record_property("row", row(agent, "slow", seen))
    check_ending(seen, ending("slow", agent.id))
    check_capture(seen)
    check_history(seen)
    check_one_line(seen, seen.records)
    assert seen.records[1].ended - seen.records[1].started >= SLOW_S
