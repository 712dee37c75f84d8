"""What is told of one rollout: a row of plain values, for .out/test-harnesses.json and docs/harnesses.md."""

from typing import Any

from tests.harnesses.agents import Agent
from tests.harnesses.rollout import Seen


def row(agent: Agent, scenario: str, seen: Seen) -> dict[str, Any]:
    """How it went."""
    return {
        "agent": agent.id,
        "version": agent.harness.version,
        "dialect": agent.harness.dialect,
        "scenario": scenario,
        "outcome": str(seen.report.outcome),
        "cause": seen.report.cause,
        "exit_code": seen.report.exit_code,
        "done": seen.hello == "hello",
        "calls": len(seen.records),
        "roots": len(seen.graph.roots),
        "forks": seen.forks,
        "engine_failures": seen.state.engine_failures,
        "seconds": round((seen.report.ended or 0.0) - (seen.report.started or 0.0), 1),
    }
