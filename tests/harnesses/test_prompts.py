"""A conversation of eight turns in either prompt mode: one chain of exact tokens, or the forks that rendering it anew makes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.errors import Outcome
from tests.harnesses.agents import Agent, selected
from tests.harnesses.conversation import TURNS, eight_turns
from tests.harnesses.report import row
from tests.harnesses.rollout import Seen, against
from tests.unit.proxy.stub import serving
from tests.unit.trace.sessions import rows_of

LESS = 5.0
"""So many times fewer tokens are trained on than with a row for each call."""


@pytest.mark.parametrize("agent", selected(), ids=lambda agent: agent.id)
async def test_token_in(agent: Agent, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    seen = await converse(agent, tmp_path, "token_in")
    figures = tokens(seen)
    record_property("row", row(agent, "token_in", seen) | figures)
    refused = [record.request["prompt"].get("refused") for record in seen.records]
    assert refused == ["first", *[None] * (TURNS - 1)], seen.text()
    assert (len(seen.graph.roots), seen.forks) == (1, []), seen.text()
    assert figures["trained_tokens"] == sum(len(record.completion_ids) for record in seen.records)
    assert figures["row_ratio"] >= LESS, figures


@pytest.mark.parametrize("agent", selected(), ids=lambda agent: agent.id)
async def test_render(agent: Agent, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """No turn comes back as it was sampled, so that each call is a root, with its cause."""
    seen = await converse(agent, tmp_path, "render")
    record_property("row", row(agent, "render", seen) | tokens(seen))
    assert len(seen.graph.roots) == TURNS, seen.text()
    assert set(seen.forks) <= {"retokenised", "thinking_dropped", "template"}, seen.text()


async def converse(agent: Agent, folder: Path, mode: Any) -> Seen:
    engine = eight_turns(agent)
    async with serving(engine):
        seen = await against(engine, agent, folder, prompt_mode=mode)
    assert (seen.report.outcome, seen.report.exit_code, seen.hello) == (Outcome.FINISHED, 0, "hello"), seen.text()
    assert len(seen.records) == TURNS, seen.text()
    return seen


def tokens(seen: Seen) -> dict[str, float]:
    """Of all training rows; ``row_ratio``: the tokens of a row for each call, over theirs."""
    rows = rows_of(seen.records)
    trained, total = sum(int(each.loss_mask.sum()) for each in rows), sum(len(each.input_ids) for each in rows)
    alone = sum(len(record.tokens) for record in seen.records)
    return {"trained_tokens": trained, "context_tokens": total - trained, "row_ratio": round(alone / total, 2)}
