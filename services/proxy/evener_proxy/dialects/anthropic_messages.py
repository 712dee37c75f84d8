"""A history of Anthropic's Messages as chat messages: one assistant turn is one message, and all else keeps its order.

The same history gives the same bytes, whatever of signatures, cache marks, block boundaries and empty contents an agent
changes when it sends it again. Used by `evener_proxy.dialects.anthropic`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from evener.engines.sampler import ToolCall
from evener_proxy.dialects.anthropic_blocks import Block, block_parts, blocks_of, parts_of, text_field, wrong
from evener_proxy.messages import (
    Part,
    Waiting,
    assistant_message,
    distinct,
    nearest,
    system_message,
    text_part,
    tool_message,
    user_message,
)
from evener_proxy.noise import without_noise

_encode = msgspec.json.Encoder().encode


class Turn(msgspec.Struct):
    """One of the request's ``messages``."""

    role: str
    content: Any = None


def chat_messages(system: object, turns: Sequence[Turn]) -> tuple[list[msgspec.Raw], int]:
    """The messages, and how many leading ones are system messages. Raises CallError 400 with the path of what is wrong."""
    history = _History()
    instructions = _instructions(system, "system")
    if instructions:
        history.messages.append(system_message(instructions))
    systems = len(history.messages)
    for index, turn in enumerate(turns):
        path = f"messages.{index}"
        match turn.role:
            case "user":
                history.user(turn.content, f"{path}.content")
            case "assistant":
                history.assistant(turn.content, f"{path}.content")
            case "system" | "developer":
                leading = len(history.messages) == systems and not history.speaking
                history.system(turn.content, f"{path}.content")
                systems += leading
            case _:
                raise wrong(f"{path}.role", f"Unexpected role {turn.role!r}: 'user', 'assistant' or 'system'")
    history.close_turn()
    return history.messages, systems


class _History:
    """The messages so far, and the assistant's turn that may still grow: the API takes adjacent ones for one turn."""

    def __init__(self) -> None:
        self.messages: list[msgspec.Raw] = []
        self.speaking = False
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._waiting: list[Waiting] = []
        self._turns = 1
        self._named = 0

    def system(self, content: object, path: str) -> None:
        self.close_turn()
        if parts := _instructions(content, path):
            self.messages.append(system_message(parts))

    def user(self, content: object, path: str) -> None:
        """Text and images between results are messages of their own, in their place."""
        self.close_turn()
        said: list[Part] = []
        before = len(self.messages)
        for block, at in blocks_of(content, path):
            if block.get("type") != "tool_result":
                said += block_parts(block, at)
                continue
            if said:
                self.messages.append(user_message(said))
                said = []
            self.messages.append(self._result(block, at))
        if said or len(self.messages) == before:
            self.messages.append(user_message(said))

    def assistant(self, content: object, path: str) -> None:
        self.speaking = True
        for block, at in blocks_of(content, path):
            match block.get("type"):
                case "tool_use":
                    self._calls.append(self._call(block, at))
                case "thinking":
                    self._thoughts.append(text_field(block, "thinking", at))
                case "text" | None:
                    self._texts.append(text_field(block, "text", at))
                case _ if isinstance(block.get("text"), str):
                    self._texts.append(text_field(block, "text", at))
                case _:
                    pass  # what a tool of the vendor answered is not the model's

    def close_turn(self) -> None:
        """What follows is not the assistant's."""
        if not self.speaking:
            return
        text = "".join(self._texts) or (None if self._calls else "")
        reasoning = "\n".join(filter(None, self._thoughts)) or None
        self.messages.append(assistant_message(text, reasoning, self._calls))
        self._turns += 1
        self.speaking = False
        self._texts, self._thoughts, self._calls = [], [], []

    def _call(self, block: Block, path: str) -> ToolCall:
        if block.get("name") is None:
            raise wrong(f"{path}.name", "Field required")
        name = text_field(block, "name", path)  # may be empty: a model can write so, and the agent sends it back
        given = block.get("input")
        if given is not None and not isinstance(given, dict):
            raise wrong(f"{path}.input", "Input should be an object")
        sent = text_field(block, "id", path) or self._name()
        call_id = distinct(sent, {call.id for call in self._calls})
        self._waiting.append(Waiting(sent, call_id, name, self._turns))
        return ToolCall(call_id, name, _encode(given or {}).decode())

    def _result(self, block: Block, path: str) -> msgspec.Raw:
        """A result without the id of its call answers the first call of the turn before it that has no answer yet."""
        sent = text_field(block, "tool_use_id", path)
        last = (call for call in self._waiting if call.turn == self._turns - 1)
        found = nearest(self._waiting, sent) if sent else next(last, None)
        if found is not None:
            self._waiting.remove(found)
        call_id = found.id if found is not None else sent or self._name()
        parts = parts_of(block.get("content"), f"{path}.content")
        return tool_message(call_id, _failed(parts) if block.get("is_error") is True else parts)

    def _name(self) -> str:
        """An id for a call that lost its own: by its place, so that it is the same when the history comes again."""
        self._named += 1
        return f"toolu_{self._named:024x}"


def _instructions(content: object, path: str) -> list[Part]:
    """The text blocks of a system prompt, without what agents put there for their vendor."""
    parts = [part for part in parts_of(content, path) if part["type"] == "text"]
    return [text_part(text) for part in parts if (text := without_noise(part["text"]))]


def _failed(parts: list[Part]) -> list[Part]:
    """Chat messages have no field for a tool's failure, so that the text says it, where it does not already."""
    if parts and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return parts if text[:5].lower() == "error" else [text_part("Error: " + text), *parts[1:]]
    return [text_part("Error"), *parts]
