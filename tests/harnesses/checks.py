"""What holds of every trace, whatever the agent and the fault: it is what the engine sampled, whole and once."""

from collections.abc import Sequence

import numpy as np

from evener.trace.record import CallRecord
from tests.harnesses.expected import Ending
from tests.harnesses.rollout import Seen
from tests.harnesses.scenarios import LOOKS, TRUNCATED
from tests.harnesses.template import answers, flaws


def check_capture(seen: Seen) -> None:
    """The records are the engine's samples, token for token; each was delivered, and none was lost."""
    sealed = seen.state.sealed
    assert sealed is not None, "sealed by the runner"
    assert (sealed.committed, sealed.lost, sealed.undelivered) == (len(seen.records), 0, 0), seen.text()
    assert sealed.aborted == seen.engine.refused, seen.text()
    assert {record.level for record in seen.records} == {"tokens"}, seen.text()
    assert {record.delivered for record in seen.records} == {"yes"}, seen.text()
    sampled = sorted((sample["prompt"], sample["ids"], _float32(sample["logprobs"])) for sample in seen.engine.sampled)
    assert sorted(_tokens(record) for record in seen.records) == sampled, seen.text()


def check_history(seen: Seen) -> None:
    """Whatever the agent sent back: every result answers its call, and what was run at once is told apart."""
    for body in seen.engine.asked:
        assert list(flaws(body["messages"])) == [], seen.text()
    results = answers(seen.engine.asked[-1]["messages"])
    for command, word in LOOKS.items():
        found = [result for arguments, result in results.items() if command in arguments]
        assert len(found) == 1, seen.text()
        assert word in found[0], seen.text()


def check_one_line(seen: Seen, records: Sequence[CallRecord]) -> None:
    """These are one conversation: each call goes on from the one before it, to the last token."""
    parents = [seen.graph.parent[record.call_id] for record in records]
    assert parents == [None, *(record.call_id for record in records[:-1])], seen.text()


def check_ending(seen: Seen, expected: Ending) -> None:
    """The agent ended as it can, and the trace has the form that this makes."""
    found = Ending(
        seen.report.outcome,
        -1 if seen.report.exit_code is None else seen.report.exit_code,
        done=seen.hello == "hello",
        calls=len(seen.records),
        roots=len(seen.graph.roots),
        forks=tuple(seen.forks),
    )
    assert found == expected, seen.text()


def check_fault(seen: Seen, name: str) -> None:
    """The fault is in the trace as what it was."""
    second = seen.records[1].reply if len(seen.records) > 1 else {}
    match name:
        case "error" | "cut":
            assert seen.state.engine_failures == 1, seen.text()
        case "empty":
            assert (second["content"], second["tool_calls"]) == ("", []), seen.text()
        case "malformed":
            assert second["tool_calls"][0]["arguments"] == TRUNCATED, seen.text()
        case "length":
            assert second["finish_reason"] == "length", seen.text()
        case "context":
            assert seen.state.budget_spent == "context", seen.text()
        case _:
            raise AssertionError(f"no check for {name}")


def _tokens(record: CallRecord) -> tuple[list[int], list[int], list[float]]:
    return record.prompt_ids.tolist(), record.completion_ids.tolist(), record.logprobs.tolist()


def _float32(values: list[float]) -> list[float]:
    return np.array(values, np.float32).tolist()
