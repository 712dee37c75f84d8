"""How each agent ends after each fault: what its makers decided, seen with the pinned version. `FAULTS` describes the faults.

An exit code does not say whether the task was done: that is in ``done``. A fault that the proxy hides (``error``, ``cut``,
``slow``) leaves no trace in the conversation of any agent.
"""

from dataclasses import dataclass, replace

from evener.errors import Outcome
from evener.trace.forks import ForkCause
from tests.harnesses.agents import AGENTS

FORGETS_THINKING = {"gemini-cli"}
"""Agents that send a turn back without its thinking."""


@dataclass(frozen=True)
class Ending:
    """``calls`` are those of the trace; ``forks`` why calls left the line, in order."""

    outcome: Outcome
    exit_code: int
    done: bool
    calls: int
    roots: int = 1
    forks: tuple[ForkCause, ...] = ()


_PI = ("pi-chat", "pi-anthropic", "pi-responses", "pi-gemini")
_ALL = tuple(agent.id for agent in AGENTS)
_done = Ending(Outcome.FINISHED, 0, done=True, calls=3)
_stops = Ending(Outcome.FINISHED, 0, done=False, calls=2)
_goes_on = replace(_done, calls=4)
_edits = replace(_goes_on, forks=("history_edited",))
_asks_again = replace(_goes_on, forks=("retry",))  # the same request

ENDINGS: dict[str, dict[str, Ending]] = {
    "error": dict.fromkeys(_ALL, _done),
    "cut": dict.fromkeys(_ALL, _done),
    "slow": dict.fromkeys(_ALL, _done),
    "empty": {
        **dict.fromkeys((*_PI, "opencode"), _stops),
        "qwen-code": _asks_again,
        # They ask again; the turn without a call is not in their history.
        **dict.fromkeys(("claude-code", "mini-swe-agent"), _edits),
        "codex": _stops,
        "gemini-cli": _stops,  # it asks again only where the empty reply is not to a tool's result
    },
    "malformed": {
        # The arguments come back as an object, empty or with the text in it (from opencode as a call of a tool `invalid`);
        # from mini-swe-agent the turn does not come back.
        **dict.fromkeys((*_PI, "claude-code", "gemini-cli", "opencode", "mini-swe-agent"), _edits),
        "qwen-code": _asks_again,
        "codex": _goes_on,  # sends the text back as it was
    },
    "length": {
        **dict.fromkeys((*_PI, "gemini-cli", "opencode"), _stops),
        "qwen-code": _asks_again,
        "claude-code": _goes_on,  # asks for the rest
        "mini-swe-agent": _edits,
        "codex": replace(_stops, outcome=Outcome.AGENT_ERROR, exit_code=1),
    },
    # The proxy's last reply ends the work where an error would be retried or lead to a compaction.
    "context": dict.fromkeys(_ALL, Ending(Outcome.BUDGET, 0, done=False, calls=1)),
}


def ending(fault: str, agent: str) -> Ending:
    """The expected end."""
    return ENDINGS[fault][agent]
