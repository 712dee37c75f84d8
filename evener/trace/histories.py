"""What each call was asked, message by message, as its records hold it; two messages are the same where they say the same.

A record keeps the messages that its base lacks, so that histories are put together in order of number; where a base was lost,
what it would have given is a message that is equal only to itself. Arguments of calls are compared as JSON values; a text and a
list of it, nothing and an empty text, and spaces at an end are equal. Thinking is told apart from what is said: agents drop it.
Used by `classes` and `forks`; documents come from agents, so that none of a shape unheard of may stop an archive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import msgspec

from evener.trace.arguments import parsed, spelled
from evener.trace.graph import Graph
from evener.trace.record import CallRecord

Opening = tuple[object, ...]

EVIDENCE = 16
"""Characters: a shorter text may recur by chance."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message: ``role``, ``text`` and ``calls`` (name and arguments, in one spelling) are compared.

    ``raw`` is what stands in the record, thinking first, for people; ``given`` the arguments that its calls name.
    """

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    thinking: str = field(default="", compare=False)
    raw: str = field(default="", compare=False)
    given: tuple[str, ...] = field(default=(), compare=False)


class Histories:
    """The histories of a graph's calls. ``texts``: system texts by digest, where they are at hand."""

    def __init__(self, graph: Graph, texts: Mapping[str, bytes] | None = None) -> None:
        self._calls = graph.calls
        self._texts = texts or {}

    def systems(self, call: CallRecord) -> list[Message]:
        """The system texts; those that are not at hand by their digests."""
        return [self._system(digest) for digest in _digests(call)]

    def turns(self, call: CallRecord) -> list[Message]:
        """The messages after the system texts."""
        return self._turns[call.call_id]

    def reply(self, call: CallRecord) -> Message:
        """The turn that answered."""
        return self._replies[call.call_id]

    def whole(self, call: CallRecord) -> list[Message]:
        """The messages after the system texts, and the turn that answered."""
        return [*self.turns(call), self.reply(call)]

    @cached_property
    def _turns(self) -> dict[str, list[Message]]:
        turns: dict[str, list[Message]] = {}
        by_number: dict[int, list[Message]] = {}
        for key, call in self._calls.items():
            base, kept = _count(call, "messages_base"), _count(call, "messages_kept") - len(_digests(call))
            above = by_number.get(base)
            lost = [Message("lost", f"{base}.{place}") for place in range(kept)] if above is None else []
            new = call.request.get("messages")
            said = [_message(each) for each in cast("list[Any]", new)] if isinstance(new, list) else []
            turns[key] = by_number[call.number] = [*(above or lost)[: max(0, kept)], *said]
        return turns

    @cached_property
    def _replies(self) -> dict[str, Message]:
        return {key: _message({"role": "assistant"} | call.reply) for key, call in self._calls.items()}

    def _system(self, digest: str) -> Message:
        text = self._texts.get(digest)
        if text is None:
            return Message("system", digest, raw=f"system text {digest}")
        try:
            return Message("system", digest, raw=_message(msgspec.json.decode(text)).raw)
        except msgspec.DecodeError:
            return Message("system", digest, raw=text.decode(errors="replace"))


def opening(call: CallRecord) -> Opening:
    """System texts and tool list: what makes a conversation another one."""
    tools = call.request.get("tools_digest")
    return (*_digests(call), None, None if tools is None else str(tools))


def has_tools(call: CallRecord) -> bool:
    """Whether the policy was given tools."""
    return call.request.get("tools_digest") is not None


def common(left: Sequence[Message], right: Sequence[Message]) -> int:
    """How many messages both begin with."""
    count = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine is not theirs and mine != theirs:  # histories that share a base share its messages
            break
        count += 1
    return count


def summary_of(call: CallRecord, graph: Graph, histories: Histories) -> CallRecord | None:
    """The call whose reply a conversation begins anew from, shorter than it was: a compaction. None where there is none.

    The summary was asked for with the history, or by a summariser without tools, which is shown the history as a text. What
    quotes a reply under another system text or other tools (a title, a reviewer) is another conversation.
    """
    turns = histories.turns(call)
    before = [each for each in graph.calls.values() if each.number < call.number]
    if not any(opening(each) == opening(call) and len(histories.turns(each)) > len(turns) for each in before):
        return None
    found = None
    for earlier in before:
        asked_for = len(histories.turns(earlier)) > len(turns) or (opening(earlier) != opening(call) and not has_tools(earlier))
        if asked_for and _begins_from(turns, histories.reply(earlier).text, histories.turns(earlier)[-1:]):
            found = earlier
    return found


def _begins_from(turns: Sequence[Message], text: str, asked: Sequence[Message]) -> bool:
    """Whether a history is told ``text``, or has it as its first turn, to answer something else than what was ``asked``."""
    if len(text) < EVIDENCE:
        return False
    first = next((place for place, turn in enumerate(turns) if turn.role == "assistant"), None)
    if first is not None and turns[first].text == text and not turns[first].calls:
        return turns[max(0, first - 1) : first] != asked
    return any(text in turn.text for turn in turns if turn.role in ("user", "system", "developer"))


def _digests(call: CallRecord) -> list[str]:
    found = call.request.get("system_digests")
    return [str(each) for each in cast("list[Any]", found)] if isinstance(found, list) else []


def _count(call: CallRecord, name: str) -> int:
    value = call.request.get(name)
    return value if isinstance(value, int) else 0


def _message(document: Any) -> Message:
    if not isinstance(document, dict):
        return Message("", spelled(document), raw=spelled(document))
    message = cast("dict[str, Any]", document)
    text = _text(message.get("content"))
    thinking = _text(message.get("reasoning") or message.get("reasoning_content"))
    called = [_call(each) for each in _list(message.get("tool_calls"))]
    return Message(
        role=str(message.get("role")),
        text=text.strip(),
        calls=tuple((name, _spelled(arguments)) for name, arguments in called),
        thinking=thinking.strip(),
        raw="\n".join(part for part in (thinking, text, *(f"{name}({arguments})" for name, arguments in called)) if part),
        given=tuple(text for _, arguments in called for text in _strings(arguments)),
    )


def _call(document: Any) -> tuple[str, str]:
    """Name and arguments of a call, as a message has it or as a reply has it."""
    call = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
    function = call.get("function")
    parts = cast("dict[str, Any]", function) if isinstance(function, dict) else call
    arguments = parts.get("arguments")
    return str(parts.get("name")), arguments if isinstance(arguments, str) else spelled(arguments or {})


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(_part(part) for part in cast("list[Any]", content))
    return content if isinstance(content, str) else "" if content is None else spelled(content)


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(text := cast("dict[str, Any]", part).get("text"), str):
        return text
    return part if isinstance(part, str) else spelled(part)


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _spelled(arguments: str) -> str:
    """Arguments in one spelling; a text that is no JSON stays as it is."""
    try:
        return spelled(parsed(arguments))
    except ValueError:
        return arguments


def _strings(arguments: str) -> list[str]:
    """The texts in a call's arguments that are long enough to prove something."""
    found: list[str] = []
    try:
        waiting = [parsed(arguments)]
    except ValueError:
        return []
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found += [value.strip()] if len(value.strip()) >= EVIDENCE else []
        elif isinstance(value, dict):
            waiting += cast("dict[str, Any]", value).values()
        elif isinstance(value, list):
            waiting += cast("list[Any]", value)
    return found
