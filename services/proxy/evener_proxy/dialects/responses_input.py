"""The items of a history become chat messages: all items of one assistant turn are one message, and nothing changes places.

A turn of ours is known by the reply id in its items' ids. Where an agent dropped those, a turn goes on as long as its items
come in the order in which we deliver them (reasoning, message, calls) and no result stands between. Called by `responses`.

Source: `openai.types.responses`, ``ResponseInputItemParam``.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from evener.engines.sampler import ToolCall
from evener_proxy.canonical import CallError
from evener_proxy.dialects.responses_tools import (
    Item,
    Origin,
    ToolTable,
    action_arguments,
    custom_arguments,
    object_arguments,
)
from evener_proxy.messages import (
    Part,
    assistant_message,
    image_part,
    system_message,
    text_part,
    tool_message,
    user_message,
)

# The kinds of item in the order of a reply.
_REASONING, _MESSAGE, _CALL = 0, 1, 2
_OUR_ID = re.compile(r"[a-z]+_([0-9a-f]{24})(?:_[0-9]+)?")
_SEALED = "evener_"
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_SEARCHES = ("tool_search_call", "tool_search_output")
_IMAGES = ("input_image", "computer_screenshot")
_encode = msgspec.json.Encoder().encode


def sealed_reasoning(reply_id: str) -> str:
    """The ``encrypted_content`` of a reply's reasoning: it names the reply, for agents that drop the ids of items."""
    return _SEALED + reply_id


def call_item_id(reply_id: str, index: int) -> str:
    """The part of a call's item id that does not tell its kind."""
    return f"{reply_id}_{index}"


def refused(where: str, message: str) -> CallError:
    """A 400 about one field."""
    return CallError(400, "invalid_request", f"{where}: {message}", param=where)


def read_input(instructions: str | None, items: Sequence[Item], tools: ToolTable) -> tuple[list[msgspec.Raw], int]:
    """The messages of a history, and how many leading ones are system messages.

    Tools that the history adds on the way go into ``tools``. Raises CallError 400.
    """
    history = _History(tools)
    if instructions:
        history.system([text_part(instructions)])
    for index, item in enumerate(items):
        history.add(item, f"input[{index}]")
    history.close()
    if len(history.messages) == (1 if instructions else 0):
        raise refused("input", "holds no message")
    return history.messages, history.systems


@dataclass(slots=True)
class _Turn:
    """An assistant turn that may go on. ``reply``: whose it is, None where no id says."""

    reply: str | None
    rank: int
    text: str = ""
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    results: list[msgspec.Raw] = field(default_factory=list[msgspec.Raw])

    def goes_on(self, rank: int, reply: str | None) -> bool:
        """Whether an item belongs to this turn."""
        if reply is not None and self.reply is not None:
            return reply == self.reply
        return not self.results and (rank > self.rank or rank == self.rank == _CALL)


class _History:
    """The messages so far, and the turn that may go on.

    A turn's results wait until it is over: some agents write each result directly behind its call, and the calls that
    follow are of the same turn.
    """

    def __init__(self, tools: ToolTable) -> None:
        self.messages: list[msgspec.Raw] = []
        self.systems = 0
        self._tools = tools
        self._turn: _Turn | None = None
        self._waiting: list[ToolCall] = []
        self._calls = 0

    def close(self) -> None:
        """End the turn."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        text = turn.text or (None if turn.calls else "")
        self.messages.append(assistant_message(text, turn.reasoning, turn.calls))
        self.messages.extend(turn.results)

    def add(self, item: Item, where: str) -> None:
        """Take the next item. Raises CallError 400."""
        kind = item.get("type", "message" if "role" in item else None)
        if kind is not None and not isinstance(kind, str):
            raise refused(f"{where}.type", "expected a string")
        if kind in _SEARCHES and item.get("execution") != "client":
            return  # the vendor's own search
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in _CALLS:
            self._call(item, *_CALLS[kind](item, where), where)
        elif kind in _RESULTS:
            self._result(item, _RESULTS[kind](item, where), where)
        elif kind == "additional_tools":
            self._tools.add(_raw_list(item, "tools", where), f"{where}.tools")
        elif kind == "tool_search_output":
            self._found_tools(item, where)
        elif kind is None or kind == "item_reference":
            raise refused(where, "items cannot be referred to, since no response is stored; send the item itself")

    def system(self, parts: list[Part]) -> None:
        """Take instructions."""
        if self.systems == len(self.messages):
            self.systems += 1
        self.messages.append(system_message(parts))

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        parts = read_parts(item.get("content"), f"{where}.content")
        if role == "assistant":
            turn = self._open(_MESSAGE, item)
            turn.text += "".join(part["text"] for part in parts if part["type"] == "text")
            return
        self.close()
        if role == "user":
            self.messages.append(user_message(parts))
        elif role in ("system", "developer"):
            self.system(parts)
        else:
            raise refused(f"{where}.role", "expected user, assistant, system or developer")

    def _reasoning(self, item: Item, where: str) -> None:
        """The text itself where it is given, else its summary, which of ours is the same text."""
        texts = _reasoning_texts(item, "content", where) or _reasoning_texts(item, "summary", where)
        turn = self._open(_REASONING, item)
        if texts:
            turn.reasoning = "\n\n".join((*([turn.reasoning] if turn.reasoning else []), *texts))

    def _call(self, item: Item, origin: Origin, arguments: str, where: str) -> None:
        self._calls += 1
        call_id = _text(item, "call_id", where, "") or _text(item, "id", where, "") or f"call_{self._calls}"
        call = ToolCall(call_id, self._tools.reach(origin), arguments)
        self._open(_CALL, item).calls.append(call)
        self._waiting.append(call)

    def _found_tools(self, item: Item, where: str) -> None:
        """What a tool search of the agent's found: the model reads the names, and has the tools from then on."""
        names = self._tools.add(_raw_list(item, "tools", where), f"{where}.tools")
        self._result(item, [text_part(_json(names))], where)

    def _result(self, item: Item, parts: list[Part], where: str) -> None:
        call = self._answered(item, where)
        message = tool_message(call, parts)
        (self.messages if self._turn is None else self._turn.results).append(message)

    def _answered(self, item: Item, where: str) -> str:
        """The id of the call that a result answers: as it says, else by the tool's name, else the first that waits."""
        call_id = _text(item, "call_id", where, "")
        found = next((call for call in self._waiting if call.id == (call_id or item.get("id"))), None)
        if found is None and not call_id:
            found = next(self._named(item, where), None) or next(iter(self._waiting), None)
        if found is None and not call_id:
            raise refused(f"{where}.call_id", "this result names no call, and none waits for one")
        if found is not None:
            self._waiting.remove(found)
        return found.id if found is not None else call_id

    def _named(self, item: Item, where: str) -> Iterator[ToolCall]:
        name, namespace = _text(item, "name", where, ""), _text(item, "namespace", where, "") or None
        names = {self._tools.reach(Origin(kind, name, namespace)) for kind in ("function", "custom")}
        return (call for call in self._waiting if call.name in names)

    def _open(self, rank: int, item: Item) -> _Turn:
        reply = _reply_of(item)
        turn = self._turn
        if turn is None or not turn.goes_on(rank, reply):
            self.close()
            self._turn = turn = _Turn(reply, rank)
        turn.reply = turn.reply or reply
        turn.rank = rank
        return turn


def _reply_of(item: Item) -> str | None:
    """The id of the reply that an item is of, where an id of ours is left."""
    for value in (item.get("id"), item.get("encrypted_content")):
        if isinstance(value, str) and (found := _OUR_ID.fullmatch(value)):
            return found[1]
    return None


def _message_parts(item: Item, where: str) -> list[Part]:
    return read_parts(item.get("output"), f"{where}.output")


def read_parts(content: Any, where: str) -> list[Part]:
    """The parts of a content, empty texts left out; null, absent, "" and [] are the same. Raises CallError 400."""
    if content is None:
        return []
    if isinstance(content, str):
        return [text_part(content)] if content else []
    if not isinstance(content, list):
        raise refused(where, "expected a string or a list of parts")
    found = (_part(part, f"{where}[{index}]") for index, part in enumerate(cast("list[Any]", content)))
    return [part for part in found if part is not None]


def _part(part: Any, where: str) -> Part | None:
    """A part that a model can read; None for one of an unknown kind that holds no text."""
    if isinstance(part, str):
        return text_part(part) if part else None
    if not isinstance(part, dict):
        raise refused(where, "expected an object")
    fields = cast("Item", part)
    kind = fields.get("type")
    if kind in _IMAGES:
        url = _text(fields, "image_url", where, "")
        if not url:
            raise refused(where, "no file is stored here; send an image as image_url")
        return image_part(url, where)
    if kind in ("input_file", "input_audio"):
        raise refused(where, f"{kind} is not taken; the model reads text and images")
    known = _TEXTS.get(kind) if isinstance(kind, str) else None
    text = fields.get("text") if known is None else _text(fields, known, where)
    return text_part(text) if isinstance(text, str) and text else None


def _reasoning_texts(item: Item, name: str, where: str) -> list[str]:
    parts = item.get(name)
    if isinstance(parts, str):
        return [parts] if parts else []
    return [
        text
        for index, part in enumerate(_list(item, name, where))
        if (text := _text(_object(part, f"{where}.{name}[{index}]"), "text", f"{where}.{name}[{index}]", ""))
    ]


def _function_call(item: Item, where: str) -> tuple[Origin, str]:
    origin = Origin("function", _text(item, "name", where), _text(item, "namespace", where, "") or None)
    return origin, _text(item, "arguments", where, "")


def _custom_call(item: Item, where: str) -> tuple[Origin, str]:
    origin = Origin("custom", _text(item, "name", where), _text(item, "namespace", where, "") or None)
    return origin, custom_arguments(_text(item, "input", where, ""))


def _local_shell_call(item: Item, where: str) -> tuple[Origin, str]:
    return Origin("local_shell", "local_shell"), action_arguments(_object(item.get("action"), f"{where}.action"))


def _shell_call(item: Item, where: str) -> tuple[Origin, str]:
    return Origin("shell", "shell"), action_arguments(_object(item.get("action"), f"{where}.action"))


def _patch_call(item: Item, where: str) -> tuple[Origin, str]:
    return Origin("apply_patch", "apply_patch"), action_arguments(_object(item.get("operation"), f"{where}.operation"))


def _search_call(item: Item, where: str) -> tuple[Origin, str]:
    arguments = item.get("arguments")
    text = arguments if isinstance(arguments, str) else object_arguments(_object(arguments, f"{where}.arguments"))
    return Origin("tool_search", "tool_search"), text


def _shell_output(item: Item, where: str) -> list[Part]:
    """What each command printed and how it ended, as the agent wrote it."""
    output = item.get("output")
    return read_parts(output if isinstance(output, str) else _json(_list(item, "output", where)), where)


def _patch_output(item: Item, where: str) -> list[Part]:
    texts = (_text(item, "status", where, ""), _text(item, "output", where, ""))
    return read_parts("\n".join(text for text in texts if text), where)


_CALLS: dict[str | None, Callable[[Item, str], tuple[Origin, str]]] = {
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _local_shell_call,
    "shell_call": _shell_call,
    "apply_patch_call": _patch_call,
    "tool_search_call": _search_call,
}
_RESULTS: dict[str | None, Callable[[Item, str], list[Part]]] = {
    "function_call_output": _message_parts,
    "custom_tool_call_output": _message_parts,
    "local_shell_call_output": _message_parts,
    "shell_call_output": _shell_output,
    "apply_patch_call_output": _patch_output,
}


def _text(item: Item, name: str, where: str, default: str | None = None) -> str:
    """A string field; null is as absent. Raises CallError 400, also where it is absent and has no default."""
    value = item.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise refused(f"{where}.{name}", "expected a string")
    return value


def _object(value: Any, where: str) -> Item:
    if not isinstance(value, dict):
        raise refused(where, "expected an object")
    return cast("Item", value)


def _list(item: Item, name: str, where: str) -> list[Any]:
    value = item.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise refused(f"{where}.{name}", "expected a list")
    return cast("list[Any]", value)


def _raw_list(item: Item, name: str, where: str) -> list[msgspec.Raw]:
    return [msgspec.Raw(_encode(each)) for each in _list(item, name, where)]


def _json(value: Any) -> str:
    return _encode(value).decode()
