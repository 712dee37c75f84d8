"""Whose turn a history repeats: found by the ids that we minted, then by content; what was changed on purpose is no match.

Two messages are the same where they say the same: arguments of calls are compared as JSON values; a text and a list of that
text, nothing and an empty text, and spaces at an end are equal; marks for a vendor's cache do not count. Neither does thinking
that is gone: agents drop it, and the chain has what was sampled. Thinking that came back as other words is an edit. Of what
stands before a turn the ids of calls do not count, but which call a result answers does. Called by `prompts`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from evener.trace.arguments import parsed, spelled
from evener_proxy.canonical import Reply, reply_of_call

Message = dict[str, Any]


class Called(NamedTuple):
    """A tool call as it is compared. ``valid``: its arguments are JSON; other ones come back as an agent pleases."""

    id: str
    name: str
    arguments: str
    valid: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy as it is compared. ``thinking``: a digest of its words; empty for none."""

    text: str
    calls: tuple[Called, ...]
    thinking: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's messages as they are compared: for each number n of them a digest of the first n, and the assistant's turns
    by their place.
    """

    digests: tuple[bytes, ...]
    turns: dict[int, Turn]

    @property
    def length(self) -> int:
        """How many messages there are."""
        return len(self.digests) - 1

    def thoughts(self, start: int) -> dict[int, str]:
        """The thinking of the turns from the place ``start`` on, by place."""
        return {place: turn.thinking for place, turn in self.turns.items() if place >= start and turn.thinking}


class Past(Protocol):
    """A call that a history may go on from: ``length`` messages with this digest, and the turn that answered them."""

    @property
    def length(self) -> int:
        """Of its messages."""
        ...

    @property
    def digest(self) -> bytes:
        """Of its messages."""
        ...

    @property
    def turn(self) -> Turn:
        """Its reply."""
        ...

    @property
    def above(self) -> "Past | None":
        """The call that it goes on from itself."""
        ...

    @property
    def shown(self) -> Mapping[int, str]:
        """`Asked.thoughts` of what was new in it."""
        ...


P = TypeVar("P", bound=Past)


def read(messages: Sequence[Message]) -> Asked:
    """The messages of a request."""
    places: dict[str, int] = {}
    running = hashlib.blake2b(digest_size=16)
    digests = [running.digest()]
    turns: dict[int, Turn] = {}
    for place, message in enumerate(messages):
        turn = _turn(message)
        answered = places.get(str(message.get("tool_call_id")), -1) if message["role"] == "tool" else -1
        for call in turn.calls:
            places[call.id] = len(places)
        if message["role"] == "assistant":
            turns[place] = turn
        running.update(_key(message, turn, answered))
        digests.append(running.digest())
    return Asked(tuple(digests), turns)


def turn_of(reply: Reply) -> Turn:
    """The turn that a reply was."""
    calls = tuple(_called(each.id, each.name, each.arguments) for each in reply.tool_calls)
    return Turn((reply.content or "").strip(), calls, _words(reply.reasoning))


def find(asked: Asked, calls: Iterable[P]) -> P | None:
    """The call that a history goes on from: of those whose messages and reply begin it the one with most messages, then one
    that is known by its ids, then the last.
    """
    best: tuple[int, bool] | None = None
    found: P | None = None
    for call in calls:
        turn = asked.turns.get(call.length)
        if turn is None or asked.digests[call.length] != call.digest or _thought_otherwise(asked, call):
            continue
        alike = same_turn(call.turn, turn)
        if alike is not None and (best is None or (call.length, alike == "ids") >= best):
            best, found = (call.length, alike == "ids"), call
    return found


def same_turn(ours: Turn, echoed: Turn) -> str | None:
    """How a turn of a history is known as ours: by its ``ids`` or its ``content``; None where it is not."""
    if ours.text != echoed.text or len(ours.calls) != len(echoed.calls):
        return None
    by_id = bool(ours.calls) and all(mine.id == theirs.id for mine, theirs in zip(ours.calls, echoed.calls, strict=True))
    for mine, theirs in zip(ours.calls, echoed.calls, strict=True):
        if mine.name != theirs.name or (mine.arguments != theirs.arguments and (mine.valid or not by_id)):
            return None
        if not by_id and reply_of_call(theirs.id) is not None:
            return None  # an id of ours, but of another reply
    return "ids" if by_id else "content"


def _thought_otherwise(asked: Asked, call: Past) -> bool:
    """Whether a turn of the chain that ends with ``call`` has other thinking now than in the chain."""
    chain: dict[int, str] = {}
    at: Past | None = call
    while at is not None:
        chain |= {**at.shown, at.length: at.turn.thinking}
        at = at.above
    return any(thinking != chain.get(place) for place, thinking in asked.thoughts(0).items() if place <= call.length)


def has_media(messages: Iterable[Message]) -> bool:
    """Whether anything but text is said."""
    return any(_others(message.get("content")) for message in messages)


def _turn(message: Message) -> Turn:
    calls = message.get("tool_calls") if message["role"] == "assistant" else None
    called = [
        _called(str(each.get("id")), str(each["function"].get("name")), each["function"].get("arguments"))
        for each in calls or ()
    ]
    text = _text(message.get("content"))
    if message["role"] != "assistant":
        return Turn(text.rstrip(), tuple(called))
    return Turn(text.strip(), tuple(called), _words(message.get("reasoning") or message.get("reasoning_content")))


def _key(message: Message, turn: Turn, answered: int) -> bytes:
    said = (
        message["role"],
        turn.text,
        [(call.name, call.arguments) for call in turn.calls],
        answered,
        message.get("name"),
        _others(message.get("content")),
    )
    return hashlib.blake2b(spelled(said).encode(), digest_size=16).digest()


def _called(call_id: str, name: str, arguments: Any) -> Called:
    if not isinstance(arguments, str):
        arguments = spelled(arguments or {})
    try:
        return Called(call_id, name, spelled(parsed(arguments)), True)
    except ValueError:
        return Called(call_id, name, arguments, False)


def _text(content: Any) -> str:
    """Engines join the texts of a list by line ends."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, str) else part.get("text") for part in content if not _is_other(part)]
    return "\n".join(part or "" for part in parts)


def _words(thinking: Any) -> str:
    """A digest: agents trim thinking, and join its parts as they please."""
    words = " ".join(_text(thinking).split())
    return hashlib.blake2b(words.encode(errors="surrogatepass"), digest_size=8).hexdigest() if words else ""


def _others(content: Any) -> list[Any]:
    return [part for part in content if _is_other(part)] if isinstance(content, list) else []


def _is_other(part: Any) -> bool:
    return isinstance(part, dict) and not isinstance(part.get("text"), str)
