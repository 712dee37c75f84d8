"""The task of three turns, without a fault: it is done, and its trace is one line from one root."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.errors import Outcome
from evener.trace.record import CallRecord
from tests.harnesses.agents import SIDE_CALLERS, Agent, selected
from tests.harnesses.checks import check_capture, check_history, check_one_line
from tests.harnesses.expected import FORGETS_THINKING
from tests.harnesses.report import row
from tests.harnesses.rollout import Seen, roll_out
from tests.harnesses.scenarios import plain, task


@pytest.mark.parametrize("agent", selected(), ids=lambda agent: agent.id)
async def test_task(agent: Agent, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    thinking = agent.id not in FORGETS_THINKING
    seen = await roll_out(agent, plain(agent, thinking=thinking), tmp_path)
    record_property("row", row(agent, "task", seen))
    check_done(seen)
    check_capture(seen)
    check_history(seen)
    check_one_line(seen, seen.records)
    assert [_turn(record) for record in seen.records] == [_sampled(turn) for turn in task(agent, thinking=thinking)]
    assert seen.engine.aside == []


@pytest.mark.parametrize("agent", [each for each in selected() if each.id in FORGETS_THINKING], ids=lambda agent: agent.id)
async def test_thinking(agent: Agent, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """What an agent drops of a turn is a fork with its cause; the turn itself stays whole in the trace."""
    seen = await roll_out(agent, plain(agent, thinking=True), tmp_path)
    record_property("row", row(agent, "thinking", seen))
    check_done(seen)
    check_capture(seen)
    check_history(seen)
    assert len(seen.graph.roots) == 2, seen.text()
    assert seen.forks == ["thinking_dropped"], seen.text()
    assert [_turn(record) for record in seen.records] == [_sampled(turn) for turn in task(agent, thinking=True)]


@pytest.mark.parametrize("agent", selected(SIDE_CALLERS), ids=lambda agent: agent.id)
async def test_side_calls(agent: Agent, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """What an agent asks beside the conversation is a root of its own, without a child."""
    seen = await roll_out(agent, plain(agent, thinking=False), tmp_path, purpose="eval")
    record_property("row", row(agent, "side calls", seen))
    check_done(seen)
    check_capture(seen)
    check_history(seen)
    assert seen.engine.aside, seen.text()
    tools = [record for record in seen.records if record.request["tools_digest"] is not None]
    check_one_line(seen, tools)
    alone = [record for record in seen.graph.roots if record not in tools]
    assert len(alone) == len(seen.engine.aside), seen.text()
    assert all(seen.graph.children[record.call_id] == [] for record in alone), seen.text()


def check_done(seen: Seen) -> None:
    assert (seen.report.outcome, seen.report.exit_code, seen.hello) == (Outcome.FINISHED, 0, "hello"), seen.text()


def _turn(record: CallRecord) -> tuple[object, ...]:
    """What the record's reply says."""
    calls = [(each["name"], each["arguments"]) for each in record.reply["tool_calls"]]
    return record.reply["content"], record.reply["reasoning"], calls, record.reply["finish_reason"]


def _sampled(turn: dict[str, Any]) -> tuple[object, ...]:
    """The same of what the engine was told to say: the text of arguments as the model wrote it."""
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in turn.get("tool_calls", ())]
    return turn["content"], turn.get("reasoning"), calls, "tool_calls" if calls else "stop"
