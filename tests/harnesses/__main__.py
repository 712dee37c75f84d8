"""``make test-harnesses``: install the agents, run the tests, and tell what was seen: one line, and .out/test-harnesses.json.

``HARNESSES`` names the agents (all where it is unset). One that cannot be installed here is unavailable, which is said
loudly, and fails where ``CI`` is true. Exit code: 0 where nothing failed and something passed.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evener.errors import InfraError
from evener.sandbox.probe import bubblewrap_missing
from evener.settings import load
from tests.harnesses.agents import Agent, install_agent, selected

ROOT = Path(__file__).resolve().parents[2]


class Tally:
    """Counts tests, and keeps the rows that they told."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {"passed": 0, "failed": 0}
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Hear of one phase of one test, from whichever worker."""
        if report.when == "call" and not report.skipped:
            self.outcomes[report.outcome] += 1
            self.rows += [dict(value, passed=report.passed) for name, value in report.user_properties if name == "row"]  # type: ignore[call-overload]
        elif report.failed:
            self.outcomes["failed"] += 1


async def _install(agents: list[Agent]) -> dict[str, str]:
    """Install what is absent; returns the reason for each agent that cannot run here."""
    missing = await bubblewrap_missing()
    if missing is not None:
        return {agent.id: f"bubblewrap does not work here: {missing}" for agent in agents}
    unavailable: dict[str, str] = {}
    for agent in agents:
        try:
            await install_agent(agent, load().cache, lambda step: print(step, flush=True))
        except InfraError as error:
            unavailable[agent.id] = error.detail
    return unavailable


def main() -> int:
    """Run it; the exit code is the verdict."""
    os.chdir(ROOT)
    started = time.monotonic()
    agents = selected()
    unavailable = asyncio.run(_install(agents))
    tally = Tally()
    if available := [agent.id for agent in agents if agent.id not in unavailable]:
        os.environ["HARNESSES"] = " ".join(available)
        pytest.main(
            [
                "tests/harnesses",
                "--ignore=tests/harnesses/test_template.py",
                "-q",
                "-n",
                "2",
                "--dist",
                "loadgroup",
                *sys.argv[1:],
            ],
            plugins=[tally],
        )
    for name, reason in unavailable.items():
        print(f"UNAVAILABLE: {name}: {reason}", file=sys.stderr)
    counts = {**tally.outcomes, "unavailable": len(unavailable)}
    document = {**counts, "seconds": round(time.monotonic() - started), "reasons": unavailable, "rollouts": tally.rows}
    (ROOT / ".out").mkdir(exist_ok=True)
    (ROOT / ".out" / "test-harnesses.json").write_text(json.dumps(document, indent=1) + "\n")
    print("test-harnesses: " + " ".join(f"{name}={count}" for name, count in counts.items()))
    lacking = unavailable and os.environ.get("CI") == "true"
    return int(bool(counts["failed"] or lacking) or not counts["passed"])


if __name__ == "__main__":
    sys.exit(main())
