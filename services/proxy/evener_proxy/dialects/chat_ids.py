"""Each call of a turn has an id of its own, and each result the id of its call, also where an agent repeats or drops ids.

All else stays the bytes that the agent sent. An id that repeats in another turn needs nothing: its results are of the turn
before them. Used by `evener_proxy.dialects.chat`.
"""

import re
from typing import Any

import msgspec

from evener_proxy.messages import Waiting, distinct, nearest

_given = re.compile(rb'"id"\s*:\s*"[^"]')
_encode = msgspec.json.Encoder().encode


class CallIds:
    """The calls of the turn before that have no result yet; None while their ids alone tell them apart."""

    def __init__(self) -> None:
        self._calls = msgspec.Raw()
        self._waiting: list[Waiting] | None = None
        self._answered: list[str] = []

    def told_apart(self, message: msgspec.Raw, calls: msgspec.Raw) -> msgspec.Raw:
        """An assistant's message with its ``tool_calls``; the same bytes where its calls have ids of their own."""
        self._calls, self._waiting, self._answered = calls, None, []
        text = bytes(calls)
        if len(_given.findall(text)) == text.count(b'"arguments"') <= 1:
            return message
        document: dict[str, Any] = msgspec.json.decode(message)
        self._waiting = _named(document["tool_calls"])
        if all(call.sent == call.id for call in self._waiting):
            return message
        return msgspec.Raw(_encode(document))

    def answered(self, message: msgspec.Raw, sent: msgspec.Raw) -> msgspec.Raw:
        """A result with its ``tool_call_id``; the same bytes where that is still the id of its call."""
        call_id = msgspec.json.decode(sent) if bytes(sent) else None
        if not isinstance(call_id, str):
            call_id = ""
        if self._waiting is None and call_id:
            self._answered.append(call_id)
            return message
        call = self._take(call_id)
        if call is None or call.id == call_id:
            return message
        return msgspec.Raw(_encode(msgspec.json.decode(message) | {"tool_call_id": call.id}))

    def _take(self, call_id: str) -> Waiting | None:
        """The call that a result answers: by id, else the first that the agent gave none, or that is left where it has none."""
        if self._waiting is None:
            self._waiting = _named(msgspec.json.decode(self._calls) if bytes(self._calls) else None)
            for answered in self._answered:
                if (done := nearest(self._waiting, answered)) is not None:
                    self._waiting.remove(done)
        found = nearest(self._waiting, call_id) if call_id else None
        found = found or next((call for call in self._waiting if not (call_id and call.sent)), None)
        if found is not None:
            self._waiting.remove(found)
        return found


def _named(calls: Any) -> list[Waiting]:
    """The calls, each with an id of its own from now on; one without an id is named by its place."""
    waiting: list[Waiting] = []
    taken: set[str] = set()
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            sent = call["id"] if isinstance(call.get("id"), str) else ""
            call["id"] = distinct(sent or f"call_{index}", taken)
            taken.add(call["id"])
            waiting.append(Waiting(sent, call["id"], "", 0))
    return waiting
