"""The conversation of every test: look twice at once, write the file, say so; with a fault in the place of one turn or before.

A fault is at the second turn, when there is a history that can be lost.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tests.harnesses.agents import Agent
from tests.harnesses.engine import ScriptedEngine, breaks_off, call, is_full, late, says
from tests.harnesses.rollout import SLOW_S, Script
from tests.unit.proxy.stub import Behaviour, fails

LOOKS = {"echo one": "one", "echo two": "two"}
"""What is asked at once, and the word in the answer."""
TRUNCATED = '{"command": "printf \'hel'
"""Arguments that end within a string."""


def task(agent: Agent, *, thinking: bool) -> list[dict[str, Any]]:
    """The turns of an engine without a fault. Some have thinking, for agents that keep it."""
    thought = {"reasoning": 'What is here? Two looks: "one" & "two".'} if thinking else {}
    looks = [call(agent.shell, agent.arguments(command)) for command in LOOKS]
    # Not ended by a newline: that the file has just this word shows that the command arrived as it was.
    write = [call(agent.shell, agent.arguments("printf 'hello' > hello.txt"))]
    end = [call(agent.shell, agent.arguments(agent.ends_with))]
    return [
        {"content": "I look first.\n\nThen I write: é, 漢.", "tool_calls": looks, **thought},
        {"content": None, "tool_calls": write},
        {"content": "Done.", "tool_calls": end} if agent.ends_with else {"content": "Done: hello.txt says hello."},
    ]


def _in_between(agent: Agent, make: Callable[[ScriptedEngine, Behaviour], Sequence[Behaviour]], *, thinking: bool) -> Script:
    """A script whose second turn is what ``make`` makes of it."""

    def script(engine: ScriptedEngine) -> list[Behaviour]:
        turns = [says(engine, **turn) for turn in task(agent, thinking=thinking)]
        return [turns[0], *make(engine, turns[1]), *turns[2:]]

    return script


def plain(agent: Agent, *, thinking: bool) -> Script:
    """No fault."""
    return _in_between(agent, lambda _, write: [write], thinking=thinking)


def _malformed(agent: Agent) -> dict[str, Any]:
    return {"content": None, "tool_calls": [call(agent.shell, TRUNCATED)]}


def fault(name: str, agent: Agent) -> Script:
    """The script with one fault of `FAULTS`."""
    made: dict[str, Callable[[ScriptedEngine, Behaviour], Sequence[Behaviour]]] = {
        "error": lambda _, write: [fails(500), write],
        "cut": lambda engine, write: [breaks_off(engine, content="Half of th"), write],
        "slow": lambda _, write: [late(write, seconds=SLOW_S)],
        "empty": lambda engine, write: [says(engine, content=""), write],
        "malformed": lambda engine, write: [says(engine, **_malformed(agent)), write],
        "length": lambda engine, write: [says(engine, finish="length", content="I will now write the"), write],
        "context": lambda engine, write: [is_full(engine), write],
    }
    return _in_between(agent, made[name], thinking=False)


FAULTS = {
    "error": "status 500 once, then the reply",
    "cut": "the connection ends within the reply, then the reply",
    "slow": f"the reply takes {SLOW_S:.0f} s",
    "empty": "a reply without text and without a call, once",
    "malformed": "a call whose arguments are no JSON, once",
    "length": "a text that was cut at the limit of tokens, once",
    "context": "from the second call on the prompt fills the window",
}
