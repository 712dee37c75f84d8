"""The prompt of a call is the tokens of the call it goes on from and what is new, or it is the engine's own and says why.

The truth is in Redis: each record keeps what its request was compared by. What this replica has served is remembered within a
bound, and read again where it is not. Called by `evener_proxy.calls` in sessions of prompt mode ``token_in`` alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from evener.engines.token_in import TokenInRoute
from evener.trace.prefix import Head
from evener.trace.record import CallRecord, Ids
from evener.trace.session import SessionSpec
from evener.trace.store import TraceStore
from evener_proxy.canonical import CallRequest, Reply
from evener_proxy.token_in import history, suffix
from evener_proxy.token_in.refusals import Refusal, Refused
from evener_proxy.token_in.soundness import Form, Verdict, rendering
from evener_proxy.token_in.suffix import Ends, Last, Message

KNOWN_BYTES = 64 << 20  # some 1,000 conversations of 60,000 tokens
_OVERHEAD = 512


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """A committed call. Its prompt is the tokens of ``above``, where there is one, and ``own``; ``length`` and ``digest`` are
    those of its messages. ``filled``: it has as many tokens as it was allowed. ``thoughts``: the forms in which thinking was
    sampled in it or above it. ``shown``: the thinking of turns that its ``own`` prompt renders, by place.
    """

    number: int
    above: "Past | None"
    own: Ids
    completion_ids: Ids
    length: int
    digest: bytes
    tools: str | None
    turn: history.Turn
    finish: str
    stopped_by: int | str | None
    filled: bool
    thoughts: frozenset[Form]
    shown: dict[int, str]

    @property
    def tokens(self) -> Ids:
        """Prompt + completion."""
        parts: list[Ids] = []
        at: Past | None = self
        while at is not None:
            parts += [at.completion_ids, at.own]
            at = at.above
        return np.concatenate(parts[::-1])

    @property
    def bytes(self) -> int:
        """What it takes to remember it, roughly."""
        return self.own.nbytes + self.completion_ids.nbytes + len(self.turn.text) + _OVERHEAD


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The ids to give, or the reason why none are given; and what later histories are compared with."""

    asked: history.Asked | None
    parent: Past | None = None
    ids: Ids | None = None
    reason: Refusal | None = None

    def refused(self, reason: Refusal) -> "Choice":
        """The same request without ids."""
        return Choice(self.asked, reason=reason)

    def document(self) -> dict[str, Any]:
        """What the call's record keeps of it."""
        kept: dict[str, Any] = {"from": self.parent.number} if self.parent is not None else {"refused": str(self.reason)}
        if self.asked is not None:
            kept |= {"messages": self.asked.length, "history": self.asked.digests[-1].hex()}
            shown = self.asked.thoughts(self.parent.length + 1 if self.parent is not None else 0)
            kept |= {"shown": {str(place): thinking for place, thinking in shown.items()}} if shown else {}
        return kept


class Prompts:
    """Chooses prompts for any session."""

    def __init__(self, store: TraceStore, bound: int = KNOWN_BYTES) -> None:
        self._store = store
        self._bound = bound
        self._bytes = 0
        self._known: dict[str, dict[int, Past]] = {}  # by session, the one that was asked for last at the end

    async def choose(
        self,
        spec: SessionSpec,
        request: CallRequest,
        tools_digest: str | None,
        heads: Sequence[Head],
        *,
        route: TokenInRoute,
        verdict: Verdict,
        window: int | None,
    ) -> Choice:
        """The prompt of a request. ``heads``: the last calls of its session. Raises EngineUnavailable, EngineRefused."""
        try:
            messages: list[Message] = [msgspec.json.decode(message) for message in request.messages]
            asked = history.read(messages)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError, RecursionError):
            return Choice(None, reason=Refusal.UNMATCHED)  # an engine may make sense of it; nothing is compared with it
        try:
            if verdict.problem is not None:
                raise Refused(Refusal.UNSOUND)
            if history.has_media(messages):
                raise Refused(Refusal.MEDIA)
            parent = _parent(asked, await self._of(spec.session_id, heads), tools_digest)
            ids = await _continued(parent, messages, request.tools, spec.thinking, route, verdict)
            if window is not None and len(ids) >= window:
                raise Refused(Refusal.CONTEXT_FULL)
        except Refused as error:
            return Choice(asked, reason=error.reason)
        return Choice(asked, parent, ids)

    def add(self, session_id: str, record: CallRecord) -> None:
        """A call was committed."""
        known = self._known.setdefault(session_id, {})
        past = _past_of(record, known)
        if past is not None:
            known[past.number] = past
            self._bytes += past.bytes
        while self._bytes > self._bound and self._known:
            self._forget(next(iter(self._known)))

    async def _of(self, session_id: str, heads: Sequence[Head]) -> list[Past]:
        """The calls of the session that have tokens, in order: ``heads`` are its last, and what is not known is read.

        Not the last ones alone: an agent goes on with its own conversation after any number of a sub-agent's calls.
        """
        known = self._known.pop(session_id, {})
        self._known[session_id] = known
        if not all(head.number in known for head in heads if head.total):
            records = await self._store.load(session_id)
            self._forget(session_id)
            for record in records:
                self.add(session_id, record)
            known = self._known.get(session_id, {})
        return [known[number] for number in sorted(known)]

    def _forget(self, session_id: str) -> None:
        self._bytes -= sum(past.bytes for past in self._known.pop(session_id, {}).values())


def _parent(asked: history.Asked, pasts: Sequence[Past], tools_digest: str | None) -> Past:
    if not pasts:
        raise Refused(Refusal.FIRST)
    parent = history.find(asked, pasts)
    if parent is None:
        raise Refused(Refusal.UNMATCHED)
    if parent.tools != tools_digest:
        raise Refused(Refusal.TOOLS_CHANGED)
    return parent


async def _continued(
    parent: Past, messages: Sequence[Message], tools: msgspec.Raw | None, thinking: str, route: TokenInRoute, verdict: Verdict
) -> Ids:
    """The parent's tokens and those of what is new."""
    past, turn, new = messages[: parent.length], messages[parent.length], messages[parent.length + 1 :]
    if not new or new[-1]["role"] == "assistant":
        raise Refused(Refusal.NOTHING_NEW)
    if thinking == "strip" and any((form, message["role"]) in verdict.strips for form in parent.thoughts for message in new):
        raise Refused(Refusal.THINKING_DROPPED)
    found = await suffix.derive(
        rendering(route, tools),
        suffix.skeleton(past) if verdict.skeleton else past,
        turn,
        new,
        last=last_of(parent, verdict.ends),
        ends=verdict.ends,
    )
    return np.concatenate((parent.tokens, found))


def last_of(past: Past, ends: Ends) -> Last:
    """How a reply ended. A reply that fills its limit and calls tools may be cut or not: its reason to end does not say which.

    Raises Refused.
    """
    last = int(past.completion_ids[-1])
    if isinstance(past.stopped_by, str):
        return Last(last, False)  # by a stop string, which no template knows
    if last in ends.stops or past.finish == "stop":
        return Last(last, True)
    if past.finish == "tool_calls":
        if past.filled:
            raise Refused(Refusal.END_UNCLEAR)
        return Last(last, True)
    return Last(last, False)


def _past_of(record: CallRecord, known: dict[int, Past]) -> Past | None:
    """None for a call without tokens, and for one whose messages could not be compared."""
    kept = record.request.get("prompt", {})
    if record.level == "text" or not len(record.completion_ids) or "history" not in kept:
        return None
    reply = msgspec.convert(record.reply, Reply)
    above = known.get(kept["from"]) if "from" in kept else None
    if above is None and "from" in kept:
        return None  # it was forgotten meanwhile; both are read again when they are asked for
    limit = record.request["used"].get("max_tokens")
    return Past(
        number=record.number,
        above=above,
        own=record.prompt_ids if above is None else record.prompt_ids[len(above.tokens) :],
        completion_ids=record.completion_ids,
        length=kept["messages"],
        digest=bytes.fromhex(kept["history"]),
        tools=record.request["tools_digest"],
        turn=history.turn_of(reply),
        finish=reply.finish_reason,
        stopped_by=reply.stop_reason,
        filled=limit is None or reply.completion_tokens >= limit,
        thoughts=(above.thoughts if above is not None else frozenset()) | _thoughts(reply),
        shown={int(place): thinking for place, thinking in kept.get("shown", {}).items()},
    )


def _thoughts(reply: Reply) -> frozenset[Form]:
    forms: list[Form] = ["field"] if reply.reasoning else []
    if reply.content and "</think>" in reply.content:
        forms.append("inline")
    return frozenset(forms)
