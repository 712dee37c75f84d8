"""The tokens of what is new, cut out of the engine's own renderings; no template and no tokenizer is known here.

A turn is rendered twice with other words in its place (the probes), and once with a word before each new message. What the
probes have in common at the end begins behind the turn's words; where the third differs, the new messages begin. Between lies
the gap: what closes the turn, the token that ends it, what opens the next message. The suffix begins behind the token that was
sampled last, or, where the reply was cut, with what the template would have closed it with. The real turn has to end in the
same tokens, else its words matter to what follows them. Called by `prompts` and `soundness`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from evener.trace.record import Ids
from evener_proxy.token_in.refusals import Refusal, Refused

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], Awaitable[Ids]]
"""The prompt of these messages under the request's tools, with what opens the reply. Raises Refused ``template_failed``."""

# Plain words that end unlike each other and unlike prose, so that no tokenizer joins an end with what follows in both.
_PROBES = ("qprobeAlfaQ", "zsondeBetaZ")
_MARK = "wnewGama "
_TEXTS = ("text", "input_text")


@dataclass(frozen=True, slots=True)
class Ends:
    """How turns end. ``stops``: the ids at which the engine ends a turn. ``written_as``: what a history has for an id that is
    sampled, where that is another one (gpt-oss's ``<|return|>`` is ``<|end|>`` there).
    """

    stops: frozenset[int]
    written_as: Mapping[int, int] = field(default_factory=dict[int, int])


class Last(NamedTuple):
    """The end of a reply: its last id, and whether the policy ended it (or else it was cut)."""

    id: int
    ended: bool


class Renderings(NamedTuple):
    """Of one turn and what is new: with either probe, with the first probe and marked new messages, and as it is."""

    first: Ids
    second: Ids
    marked: Ids
    real: Ids


async def derive(
    render: Render, past: Sequence[Message], turn: Message, new: Sequence[Message], *, last: Last, ends: Ends
) -> Ids:
    """The ids that follow a turn's sampled ones: ``past`` are the messages before it, ``new`` those behind. Raises Refused."""
    refused = Refused(Refusal.TURN_NOT_RENDERED)
    real: Ids | None = None
    for probes in turn_probes(turn):
        rendered = await renderings(render, past, turn, probes, new, real=real)
        real = rendered.real
        try:
            return cut(rendered, called=bool(turn.get("tool_calls")), last=last, ends=ends)
        except Refused as error:
            refused = error
    raise refused


async def renderings(
    render: Render,
    past: Sequence[Message],
    turn: Message,
    probes: tuple[Message, Message],
    new: Sequence[Message],
    *,
    real: Ids | None = None,
) -> Renderings:
    """Ask for what `cut` looks at. ``real``: that of an earlier pair of probes."""
    first, second = ([*past, probe, *new] for probe in probes)
    asked = [render(first), render(second), render([*past, probes[0], *map(marked, new)])]
    if real is None:
        asked.append(render([*past, turn, *new]))
    found = await asyncio.gather(*asked)
    return Renderings(found[0], found[1], found[2], found[3] if real is None else real)


def cut(rendered: Renderings, *, called: bool, last: Last, ends: Ends) -> Ids:
    """The suffix. ``called``: the turn has tool calls. Raises Refused."""
    ids = rendered.first
    start, gap = gap_of(rendered)
    if last.ended:
        place = _place(gap, (last.id, ends.written_as.get(last.id))) + 1
    elif called:  # what closes the call would stand behind whatever part of it was sampled
        place = _place(gap, ends.stops)
    else:
        place = 0
    suffix = ids[start + place :]
    open_end = place == 0 and int(suffix[0]) not in ends.stops
    _check_real(rendered.real, ids, suffix, stop=last.ended, joined=open_end)
    return suffix


def gap_of(rendered: Renderings) -> tuple[int, list[int]]:
    """Where the gap begins in the first rendering, and its ids. Raises Refused."""
    first, second, marks, _ = rendered
    start = len(first) - common_suffix(first, second)
    end = common_prefix(first, marks)
    if start == 0 or (end == len(first) == len(marks)):
        raise Refused(Refusal.TURN_NOT_RENDERED if start == 0 else Refusal.NEW_NOT_RENDERED)
    if start > end:
        raise Refused(Refusal.OVERLAP)
    if start == end:
        raise Refused(Refusal.NO_STOP)
    return start, first[start:end].tolist()


def _place(gap: list[int], wanted: Container[int | None]) -> int:
    place = next((place for place, token in enumerate(gap) if token in wanted), None)
    if place is None:
        raise Refused(Refusal.NO_STOP)
    return place


def _check_real(real: Ids, probe: Ids, suffix: Ids, *, stop: bool, joined: bool) -> None:
    """The turn itself is followed by what its probe is followed by, from the ``stop`` token on where it ended with one.

    ``joined``: text stands where a reply was cut, which a tokenizer may have joined with both probes' ends; then the turn's own
    end shows it, which has more in common with theirs.
    """
    common = common_suffix(real, probe)
    if common < len(suffix) + stop or (joined and common > len(suffix)):
        raise Refused(Refusal.TURN_DIFFERS)


def turn_probes(turn: Message) -> list[tuple[Message, Message]]:
    """Pairs of turns to try, which say other words than ``turn`` but call the same tools.

    Some templates print no arguments unless there is text; so the second pair has both.
    """
    forms = (False, True) if turn.get("tool_calls") else (True,)
    return [(_probe(turn, _PROBES[0], said), _probe(turn, _PROBES[1], said)) for said in forms]


def _probe(turn: Message, word: str, said: bool) -> Message:
    probe: Message = {"role": "assistant", "content": word if said else ""}
    if calls := turn.get("tool_calls"):
        probe["tool_calls"] = [_with_arguments(call, {"command": word}) for call in calls]
    return probe


def _with_arguments(call: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Tool arguments travel as text."""
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}


def marked(message: Message) -> Message:
    """The message with a word before its text."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": _MARK + (content or "")}
    parts = [dict(part) if isinstance(part, dict) else part for part in content]
    for place, part in enumerate(parts):
        if isinstance(part, str):
            parts[place] = _MARK + part
            break
        if part.get("type") in _TEXTS:
            part["text"] = _MARK + (part.get("text") or "")
            break
    return {**message, "content": parts}


def skeleton(past: Sequence[Message]) -> list[Message]:
    """The same conversation with next to nothing said in it: roles, counts, ids, names and instructions stay.

    What follows a turn depends on no more than these (`soundness` proves it), and a short prompt renders faster.
    """
    return [message if message["role"] in ("system", "developer") else _hollow(message) for message in past]


def _hollow(message: Message) -> Message:
    hollow = {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}
    if message["role"] != "assistant" or message.get("content"):
        hollow["content"] = "x"
    if calls := message.get("tool_calls"):
        hollow["tool_calls"] = [_with_arguments(call, {}) for call in calls]
    return hollow


def common_prefix(one: Ids, other: Ids) -> int:
    """How many leading ids are equal."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def common_suffix(one: Ids, other: Ids) -> int:
    """How many ids at the end are equal."""
    return common_prefix(one[::-1], other[::-1])
