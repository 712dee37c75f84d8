"""Calls of one turn that share an id get ids of their own, and their results, in order, follow them.

All else stays the bytes that the agent sent. An id that repeats in another turn needs nothing: its results are of the turn
before them. Used by `evener_proxy.dialects.chat`.
"""

from typing import Any

import msgspec

from evener_proxy.messages import Waiting, distinct, nearest

_encode = msgspec.json.Encoder().encode


class SharedIds:
    """The calls of the turn before that shared an id, and have no result yet."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []

    def told_apart(self, message: msgspec.Raw, calls: msgspec.Raw) -> msgspec.Raw:
        """An assistant's message with its ``tool_calls``; the same bytes where its calls have ids of their own."""
        self._waiting = []
        if bytes(calls).count(b'"id"') < 2:
            return message
        document: dict[str, Any] = msgspec.json.decode(message)
        taken: set[str] = set()
        for call in document["tool_calls"] if isinstance(document["tool_calls"], list) else ():
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                sent: str = call["id"]
                call["id"] = distinct(sent, taken)
                taken.add(call["id"])
                self._waiting.append(Waiting(sent, call["id"], "", 0))
        if all(call.sent == call.id for call in self._waiting):
            self._waiting = []
            return message
        return msgspec.Raw(_encode(document))

    def answered(self, message: msgspec.Raw, sent: msgspec.Raw) -> msgspec.Raw:
        """A result with its ``tool_call_id``; the same bytes where that is still the id of its call."""
        call_id = msgspec.json.decode(sent) if self._waiting and bytes(sent) else None
        call = nearest(self._waiting, call_id) if isinstance(call_id, str) else None
        if call is None:
            return message
        self._waiting.remove(call)
        return msgspec.Raw(_encode(msgspec.json.decode(message) | {"tool_call_id": call.id}))
