"""docs/harnesses.md from .out/test-harnesses.json: only what the last ``make test-harnesses`` saw.

Run as ``python -m tests.harnesses.table``, after a run with all agents.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.harnesses.agents import AGENTS
from tests.harnesses.scenarios import FAULTS

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]

_HEAD = """# Agents that were run

What `make test-harnesses` saw, with every agent unmodified, installed without its install scripts and started with its
defaults, in the runner's bubblewrap sandbox, against an engine that follows a script. This page is written by
`python -m tests.harnesses.table` from `.out/test-harnesses.json`.

The task: look twice at once (text, thinking and two parallel calls in one turn), write a file, say so.
In every rollout of this page each sample of the engine is in the trace, token for token, each reply was delivered, and each
result answered its call.
"""
_NOTES = """
A cell says how the agent ended: `done` (the file is there) or `stops` (it is not), the runner's outcome where it is not
`finished`, the exit code where it is not 0, the number of calls, and why calls left the line where some did
(docs/sql.md, `fork_causes`). A `history_edited` call follows a turn that the agent dropped or changed: that turn is a leaf.

{faults}

Equal tokens do not prove that an agent keeps the spelling of a call's arguments: the template of the tests writes JSON in one
spelling. Agents serialise arguments anew, so with a template that repeats what it is given a trace may have more forks.
"""
_MODES = """
## Eight turns in either prompt mode

An engine samples thinking, text with spaces around it and arguments spaced oddly, which its template writes in another way.
Context tokens are those of the training rows that are not trained. The ratio is that of the tokens of a row for each call to
those of the rows, and the forks are counted by cause.
"""
MODES = ("token_in", "render")


def document(rows: list[Row]) -> str:
    """The page."""
    seen = {(row["agent"], row["scenario"]): row for row in rows}
    agents = [agent.id for agent in AGENTS if (agent.id, "task") in seen]
    tasks = [
        [agent, row["version"], row["dialect"], _end(row), str(row["roots"]), _thinking(seen.get((agent, "thinking")))]
        for agent in agents
        for row in [seen[agent, "task"]]
    ]
    sides = [
        f"`{row['agent']}` also asks beside the conversation: its task is `{_end(row)}` with {row['roots']} roots, one of them"
        " the conversation."
        for row in rows
        if row["scenario"] == "side calls"
    ]
    faults = [[agent, *(_cell(seen.get((agent, fault))) for fault in FAULTS)] for agent in agents]
    modes = [_mode(agent, found) for agent in agents for mode in MODES if (found := seen.get((agent, mode)))]
    meanings = "\n".join(f"- `{name}`: {meaning}." for name, meaning in FAULTS.items())
    return "\n".join(
        [
            _HEAD,
            _table(["agent", "version", "dialect", "task", "roots", "thinking"], tasks),
            "",
            *sides,
            "\n## Faults at the second turn\n",
            _table(["agent", *FAULTS], faults),
            _NOTES.format(faults=meanings),
            _MODES,
            _table(["agent", "prompt mode", "calls", "roots", "trained tokens", "context tokens", "ratio", "forks"], modes),
        ]
    )


def _end(row: Row) -> str:
    words = ["done" if row["done"] else "stops"]
    if row["outcome"] != "finished":
        words.append(row["outcome"])
    if row["exit_code"] != 0:
        words.append(f"exit {row['exit_code']}")
    return ", ".join(words)


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    roots = f", {row['roots']} roots" if row["roots"] > 1 else ""
    forks = f", {' '.join(row['forks'])}" if row["forks"] else ""
    return f"{_end(row)}; {row['calls']} calls{roots}{forks}"


def _mode(agent: str, row: Row) -> list[str]:
    counts = [row[name] for name in ("calls", "roots", "trained_tokens", "context_tokens", "row_ratio")]
    return [agent, row["scenario"], *map(str, counts), _counts(row["forks"])]


def _counts(forks: list[str]) -> str:
    return ", ".join(f"{cause} {count}" for cause, count in sorted(Counter(forks).items())) or "none"


def _thinking(dropped: Row | None) -> str:
    return f"dropped: {dropped['roots']} roots" if dropped else "kept"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    rows = json.loads((ROOT / ".out" / "test-harnesses.json").read_text())["rollouts"]
    (ROOT / "docs" / "harnesses.md").write_text(document([row for row in rows if row["passed"]]))
