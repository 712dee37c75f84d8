"""Eight turns whose tokens no template writes the same way: thinking, spaces around a text, arguments spaced oddly.

The engine's template strips nothing and spells arguments in its own way, like those of real models. Used by `test_prompts`.
"""

from tests.harnesses.agents import Agent
from tests.unit.token_in.engine import TemplateEngine
from tests.unit.token_in.templates import TEMPLATES

TURNS = 8
WINDOW = 200_000


def eight_turns(agent: Agent) -> TemplateEngine:
    """An engine that has ``agent`` run seven commands and then end."""
    commands = [*(f"echo step {number}" for number in range(TURNS - 2)), "printf 'hello' > hello.txt"]
    says = [_turn(agent, number, command) for number, command in enumerate(commands)]
    says.append(_turn(agent, TURNS - 1, agent.ends_with) if agent.ends_with else "  Done: hello.txt says hello. \n<|im_end|>")
    engine = TemplateEngine(says, TEMPLATES[0])
    engine.window = WINDOW
    return engine


def _turn(agent: Agent, number: int, command: str) -> str:
    call = f'{{"name": "{agent.shell}",  "arguments": {agent.arguments(command)}}}'
    said = f'I do step {number}, "as told". \n' if number % 2 else ""
    return f"<think>\nwhat is step {number}?\n</think>\n\n{said}<tool_call>\n{call}\n</tool_call><|im_end|>"
