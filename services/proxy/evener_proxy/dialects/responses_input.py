"""The items of a history become chat messages: all items of one assistant turn are one message, and nothing changes places.

What we minted decides whether an item is of the turn before it: the reply's id in the ids of its items, or in the ids of its
calls; also where results stand between. Where nothing minted came back the order decides: a turn goes on as long as its items
come as we deliver them (reasoning, message, calls), and a result ends it. What the user or the agent's instructions say ends
every turn. Called by `responses`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from evener.engines.sampler import ToolCall
from evener_proxy.canonical import REPLY_DIGITS, reply_of_call
from evener_proxy.dialects.responses_items import (
    CALLS,
    HOSTED,
    RESULTS,
    check_update,
    json_text,
    raw_list,
    read_parts,
    reasoning_texts,
    refused,
    text_field,
    unknown_parts,
)
from evener_proxy.dialects.responses_tools import Item, Origin, ToolTable
from evener_proxy.messages import (
    Part,
    Waiting,
    assistant_message,
    distinct,
    nearest,
    system_message,
    text_part,
    tool_message,
    unshown,
    user_message,
)

# The kinds of item in the order of a reply.
_REASONING, _MESSAGE, _CALL = 0, 1, 2
_OUR_ID = re.compile(r"[a-z]+_([0-9a-f]{24})(?:_[0-9]+)?")
_SEALED = "evener_"
_SEARCHES = ("tool_search_call", "tool_search_output")


def sealed_reasoning(reply_id: str) -> str:
    """The ``encrypted_content`` of a reply's reasoning: it names the reply, for agents that drop the ids of items."""
    return _SEALED + reply_id


def call_item_id(reply_id: str, index: int) -> str:
    """The part of a call's item id that does not tell its kind."""
    return f"{reply_id}_{index}"


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
    """An assistant turn that may go on. ``reply``: whose it is, None where no item's id says; ``named``: what ids of calls say,
    which others may have made.
    """

    reply: str | None
    rank: int
    named: set[str] = field(default_factory=set[str])
    text: str = ""
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    results: list[msgspec.Raw] = field(default_factory=list[msgspec.Raw])

    def goes_on(self, rank: int, reply: str | None, named: str | None) -> bool:
        """Whether an item belongs to this turn."""
        if reply is not None and self.reply is not None:
            return reply == self.reply
        if {_digits(reply), named} & (self.named | {_digits(self.reply)}) - {None}:
            return True
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
        self._waiting: list[Waiting] = []
        self._turns = 0
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
        if kind in HOSTED or (kind in _SEARCHES and item.get("execution") != "client"):
            self._tools.hosted += 1
        elif kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in CALLS:
            self._call(item, *CALLS[kind](item, where), where)
        elif kind in RESULTS:
            self._result(item, RESULTS[kind](item, where), where)
        elif kind == "additional_tools":
            self._tools.add(raw_list(item, "tools", where), f"{where}.tools")
        elif kind == "tool_search_output":
            self._found_tools(item, where)
        elif kind is None or kind == "item_reference":
            raise refused(where, "items cannot be referred to, since no response is stored; send the item itself")
        elif kind == "configuration_update":
            check_update(item, where)
        elif kind in ("compaction", "compaction_trigger"):
            raise refused(where, "a history is not compacted here, and what the vendor made of one cannot be read")
        else:
            self._unknown(item, unknown_parts(item, where), where)

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
            turn.text += "".join((part if part["type"] == "text" else unshown("image"))["text"] for part in parts)
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
        texts = reasoning_texts(item, "content", where) or reasoning_texts(item, "summary", where)
        turn = self._open(_REASONING, item)
        if texts:
            turn.reasoning = "\n\n".join((*([turn.reasoning] if turn.reasoning else []), *texts))

    def _call(self, item: Item, origin: Origin, arguments: str, where: str) -> None:
        self._calls += 1
        sent = text_field(item, "call_id", where, "") or text_field(item, "id", where, "") or f"call_{self._calls}"
        turn = self._open(_CALL, item, reply_of_call(sent))
        call_id = distinct(sent, {call.id for call in turn.calls})
        turn.calls.append(ToolCall(call_id, self._tools.reach(origin), arguments))
        self._waiting.append(Waiting(sent, call_id, turn.calls[-1].name, self._turns))

    def _found_tools(self, item: Item, where: str) -> None:
        """What a tool search of the agent's found: the model reads the names, and has the tools from then on."""
        names = self._tools.add(raw_list(item, "tools", where), f"{where}.tools")
        self._result(item, [text_part(json_text(names))], where)

    def _unknown(self, item: Item, parts: list[Part], where: str) -> None:
        """Take what an item of an unknown kind says: the result of the call that it names, else a word to the model."""
        call_id = text_field(item, "call_id", where, "")
        if call_id and nearest(self._waiting, call_id) is not None:
            self._result(item, parts, where)
        elif item.get("role") == "assistant":
            self._message({"role": "assistant", "content": parts}, where)
        else:
            self.close()
            self.messages.append(user_message(parts))

    def _result(self, item: Item, parts: list[Part], where: str) -> None:
        call = self._answered(item, where)
        message = tool_message(call, parts)
        (self.messages if self._turn is None else self._turn.results).append(message)

    def _answered(self, item: Item, where: str) -> str:
        """The id of the call that a result answers: as it says, else by the tool's name, else the first that waits."""
        call_id = text_field(item, "call_id", where, "")
        sent = call_id or item.get("id")
        found = nearest(self._waiting, sent) if isinstance(sent, str) else None
        if found is None and not call_id:
            found = next(self._named(item, where), None) or next(iter(self._waiting), None)
        if found is None and not call_id:
            raise refused(f"{where}.call_id", "this result names no call, and none waits for one")
        if found is not None:
            self._waiting.remove(found)
        return found.id if found is not None else call_id

    def _named(self, item: Item, where: str) -> Iterator[Waiting]:
        name, namespace = text_field(item, "name", where, ""), text_field(item, "namespace", where, "") or None
        names = {self._tools.reach(Origin(kind, name, namespace)) for kind in ("function", "custom")}
        return (call for call in self._waiting if call.name in names)

    def _open(self, rank: int, item: Item, named: str | None = None) -> _Turn:
        """The turn that an item is of. ``named``: the reply that the id of its call names."""
        reply = _reply_of(item)
        turn = self._turn
        if turn is None or not turn.goes_on(rank, reply, named):
            self.close()
            self._turns += 1
            self._turn = turn = _Turn(reply, rank)
        turn.reply = turn.reply or reply
        if named is not None:
            turn.named.add(named)
        turn.rank = rank
        return turn


def _reply_of(item: Item) -> str | None:
    """The id of the reply that an item is of, where an id of ours is left."""
    for value in (item.get("id"), item.get("encrypted_content")):
        if isinstance(value, str) and (found := _OUR_ID.fullmatch(value)):
            return found[1]
    return None


def _digits(reply: str | None) -> str | None:
    """As much of a reply's id as the ids of its calls have."""
    return None if reply is None else reply[:REPLY_DIGITS]
