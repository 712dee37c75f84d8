"""Chat messages from their parts, for the dialects whose own messages look otherwise.

The same parts give the same bytes: a history that an agent sends again renders as it did before. The calls of one turn have
ids of their own, and a result is the nearest call's that waits for it, whatever ids an agent repeats.
"""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import msgspec

from evener.engines.sampler import ToolCall
from evener_proxy.canonical import CallError

Part = dict[str, Any]
"""A content part of a chat message: ``text_part`` or ``image_part``."""

_encode = msgspec.json.Encoder().encode


def text_part(text: str) -> Part:
    """A piece of text."""
    return {"type": "text", "text": text}


def image_part(url: str, where: str) -> Part:
    """An image as a data URL. Raises CallError 400 that names ``where`` for any other."""
    return {"type": "image_url", "image_url": {"url": inline(url, where)}}


def inline(url: str, where: str) -> str:
    """A data URL. Raises CallError 400 for what an engine would have to fetch: an agent reaches the proxy and nothing else."""
    if not url.startswith("data:"):
        raise CallError(400, "invalid_request", f"{where}: media come inline, as data URLs", param=where)
    return url


def unshown(kind: str) -> Part:
    """What stands for media that no chat message can hold: an agent would take silence for an empty file."""
    return text_part(f"[{kind or 'file'}: not shown, the model reads text and images]")


class Waiting(NamedTuple):
    """A call without a result: the id that the agent gave, the one that the engine gets, and the turn that it is of."""

    sent: str
    id: str
    name: str
    turn: int


def distinct(wanted: str, taken: Container[str]) -> str:
    """An id that is not ``taken``: the one wanted, or it with a number."""
    chosen, count = wanted, 1
    while chosen in taken:
        count += 1
        chosen = f"{wanted}_{count}"
    return chosen


def nearest(waiting: Sequence[Waiting], sent: str) -> Waiting | None:
    """The call that a result with this id answers: of the latest turn that has one, and in it the first."""
    found = None
    for call in reversed(waiting):
        if call.sent == sent and (found is None or call.turn == found.turn):
            found = call
    return found


def system_message(parts: Sequence[Part]) -> msgspec.Raw:
    """Instructions."""
    return _raw({"role": "system", "content": _content(parts)})


def user_message(parts: Sequence[Part]) -> msgspec.Raw:
    """What the user, or the agent in the user's name, said."""
    return _raw({"role": "user", "content": _content(parts)})


def assistant_message(text: str | None, reasoning: str | None, calls: Sequence[ToolCall]) -> msgspec.Raw:
    """One turn of the policy, as one message; ``arguments`` stay the text that they are."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]
    return _raw(message)


def tool_message(call_id: str, parts: Sequence[Part]) -> msgspec.Raw:
    """The result of the call with this id."""
    return _raw({"role": "tool", "tool_call_id": call_id, "content": _content(parts)})


def function_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool as chat requests list it; ``parameters`` is a JSON schema."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": function | {"parameters": parameters}}


def tool_list(tools: Sequence[dict[str, Any]]) -> msgspec.Raw | None:
    """The ``tools`` of a request, None where there are none."""
    return msgspec.Raw(_encode(tools)) if tools else None


def _content(parts: Sequence[Part]) -> str | list[Part]:
    """One text stays a string, which every chat template takes."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return list(parts)


def _raw(message: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(_encode(message))
