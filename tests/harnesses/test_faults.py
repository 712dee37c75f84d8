"""A fault of the engine or of the model at the second turn: each agent ends as `expected` says, and the trace is right."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harnesses.agents import Agent, selected
from tests.harnesses.checks import check_capture, check_ending, check_fault, check_history
from tests.harnesses.expected import ending
from tests.harnesses.report import row
from tests.harnesses.rollout import roll_out
from tests.harnesses.scenarios import FAULTS, fault


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "slow"])
@pytest.mark.parametrize("agent", selected(), ids=lambda agent: agent.id)
async def test_fault(agent: Agent, name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    seen = await roll_out(agent, fault(name, agent), tmp_path)
    record_property("row", row(agent, name, seen))
    check_ending(seen, ending(name, agent.id))
    check_capture(seen)
    check_history(seen)
    check_fault(seen, name)
