"""Whether a policy's template can be read by `suffix`, proven once on six shapes of conversations before a prompt is trusted.

For each shape: the probes show where the turn ends; a token at which the engine ends turns stands there; every new message is
rendered behind it, in order; the real turn ends as the probes do; and a conversation of the same shape in which next to nothing
is said has the same suffix. A shape that the template itself refuses cannot come up. Called by `evener_proxy.engines`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from evener.engines.sampler import EngineRefused
from evener.trace.record import Ids
from evener_proxy.token_in import suffix
from evener_proxy.token_in.refusals import Refusal, Refused
from evener_proxy.token_in.suffix import Ends, Last, Message, Renderings

Tools = list[dict[str, Any]] | msgspec.Raw | None
Form = Literal["field", "inline"]
"""How a turn's thinking is in a history: a field of its own, or in the text between ``<think>`` and ``</think>``."""

_FORMS: tuple[Form, ...] = ("field", "inline")
_TEMPLATE_FAILED = (400, 422)  # what engines answer where a template raises

WRITTEN_AS = (("<|return|>", "<|end|>"), ("<|eom_id|>", "<|eot_id|>"))
"""Ends that are sampled, and what histories have for them: gpt-oss's final channel, and Llama's calls of built-in tools."""


class Policy(Protocol):
    """An engine with its policy, as far as templates go (`evener.engines.token_in.TokenInRoute`)."""

    async def render(self, messages: Sequence[Message], tools: Tools) -> Ids:
        """The prompt. Raises EngineRefused where the template does."""
        ...

    async def stops(self, ids: Iterable[int]) -> frozenset[int]:
        """Those of ``ids`` at which the engine ends a turn."""
        ...

    async def token(self, text: str) -> int | None:
        """The id of a text that is one token."""
        ...


_NO_ENDS = Ends(frozenset())


@dataclass(frozen=True, slots=True)
class Verdict:
    """``problem``: why prompts are not given as ids, None where they are. ``skeleton``: histories may be rendered hollow.

    ``strips``: what the template takes out of earlier turns: thinking in a form, by the role of the message behind it.
    """

    problem: str | None = None
    skeleton: bool = False
    ends: Ends = _NO_ENDS
    strips: frozenset[tuple[Form, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Shape:
    """A conversation: what was said, a turn of the policy, and what is new."""

    name: str
    past: list[Message]
    turn: Message
    new: list[Message]
    tools: Tools


def _calls(*ids: int, text: str = "") -> Message:
    calls = [_call(number) for number in ids]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _call(number: int) -> dict[str, Any]:
    # Mistral's templates take ids of nine letters and digits only.
    function = {"name": "bash", "arguments": f'{{"command": "word{number}"}}'}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def _result(number: int) -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "bash", "content": f"result {number}"}


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


_PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS: Tools = [
    {"type": "function", "function": {"name": "bash", "description": "run a command", "parameters": _PARAMETERS}},
]
_OPENING = [_said("system", "You write code."), _said("user", "Find the bug in a.py")]
_LONGER = [*_OPENING, _calls(1, text="one"), _result(1), _calls(2), _result(2)]
SHAPES = (
    Shape("text, user", _OPENING, _said("assistant", "alpha"), [_said("user", "beta")], None),
    Shape("text, user, with tools", _LONGER, _said("assistant", "alpha"), [_said("user", "beta")], TOOLS),
    Shape("call, result", _LONGER, _calls(3), [_result(3)], TOOLS),
    Shape("text and call, result", _LONGER, _calls(3, text="alpha"), [_result(3)], TOOLS),
    Shape("two calls, two results", _LONGER, _calls(3, 4), [_result(3), _result(4)], TOOLS),
    Shape("call, result and user", _LONGER, _calls(3), [_result(3), _said("user", "beta")], TOOLS),
)


async def check(policy: Policy) -> Verdict:
    """The verdict on a policy's template. Raises EngineUnavailable."""
    try:
        return await _check(policy)
    except EngineRefused as error:
        return Verdict(f"the engine renders no prompts: {error}")


async def _check(policy: Policy) -> Verdict:
    seen: list[tuple[Shape, Renderings]] = []
    for shape in SHAPES:
        render = rendering(policy, shape.tools)
        try:
            await render([*shape.past, shape.turn, *shape.new])
        except Refused:
            continue  # plain chat would fail as well
        try:
            seen.append((shape, await _readable(render, shape)))
        except Refused as error:
            return Verdict(f"{shape.name}: {error.reason}")
    if not any(shape.tools for shape, _ in seen):
        return Verdict("the template renders no conversation with tools")
    ends = await _ends(policy, [rendered for _, rendered in seen])
    hollow: list[bool] = []
    for shape, _ in seen:
        try:
            hollow.append(await _check_shape(rendering(policy, shape.tools), shape, ends))
        except Refused as error:
            return Verdict(f"{shape.name}: {error.reason}")
    return Verdict(skeleton=all(hollow), ends=ends, strips=await _strips(policy))


def rendering(policy: Policy, tools: Tools) -> suffix.Render:
    """The policy's rendering under ``tools``; where its template fails, that is a refusal."""

    async def render(messages: Sequence[Message]) -> Ids:
        try:
            return await policy.render(messages, tools)
        except EngineRefused as error:
            if error.status not in _TEMPLATE_FAILED:
                raise
            raise Refused(Refusal.TEMPLATE_FAILED) from error

    return render


async def _readable(render: suffix.Render, shape: Shape) -> Renderings:
    """The renderings whose gap shows."""
    refused = Refused(Refusal.TURN_NOT_RENDERED)
    for probes in suffix.turn_probes(shape.turn):
        rendered = await suffix.renderings(render, shape.past, shape.turn, probes, shape.new)
        try:
            suffix.gap_of(rendered)
        except Refused as error:
            refused = error
            continue
        return rendered
    raise refused


async def _ends(policy: Policy, seen: Sequence[Renderings]) -> Ends:
    gaps = {token for rendered in seen for token in suffix.gap_of(rendered)[1]}
    written: dict[int, int] = {}
    for sampled, other in WRITTEN_AS:
        one, two = await policy.token(sampled), await policy.token(other)
        if one is not None and two is not None and one not in gaps and two in gaps:
            written[one] = two
    return Ends(await policy.stops(gaps | written.keys()), written)


async def _check_shape(render: suffix.Render, shape: Shape, ends: Ends) -> bool:
    """Whether the shape may be rendered hollow. Raises Refused where it is not sound at all."""
    gap = suffix.gap_of(await _readable(render, shape))[1]
    sampled = {other: one for one, other in ends.written_as.items() if one in ends.stops} | {one: one for one in ends.stops}
    stop = next((sampled[token] for token in gap if token in sampled), None)
    if stop is None:
        raise Refused(Refusal.NO_STOP)
    last = Last(stop, True)
    full = await suffix.derive(render, shape.past, shape.turn, shape.new, last=last, ends=ends)
    await _check_order(render, shape, len(full))
    try:
        hollow = await suffix.derive(render, suffix.skeleton(shape.past), shape.turn, shape.new, last=last, ends=ends)
    except Refused:
        return False
    return bool(np.array_equal(full, hollow))


async def _check_order(render: suffix.Render, shape: Shape, length: int) -> None:
    """Each new message is within the last ``length`` ids, behind the one before it. Raises Refused."""
    before = [*shape.past, shape.turn]
    whole = await render([*before, *shape.new])
    others = [
        await render([*before, *(suffix.marked(each) if each is message else each for each in shape.new)])
        for message in shape.new
    ]
    at = len(whole) - length
    for other in others:
        place = suffix.common_prefix(whole, other)
        if place >= len(whole) or place < at:
            raise Refused(Refusal.NEW_NOT_RENDERED if place >= len(whole) else Refusal.OVERLAP)
        at = place + 1


async def _strips(policy: Policy) -> frozenset[tuple[Form, str]]:
    found: set[tuple[Form, str]] = set()
    for shape in (SHAPES[1], SHAPES[2]):
        render = rendering(policy, shape.tools)
        for form in _FORMS:
            thoughts = [_thinking(shape.turn, form, word) for word in ("first", "second")]
            try:
                one, other = [await render([*shape.past, thought, *shape.new]) for thought in thoughts]
            except Refused:
                continue
            if np.array_equal(one, other):
                found.add((form, shape.new[0]["role"]))
    return frozenset(found)


def _thinking(turn: Message, form: Form, word: str) -> Message:
    if form == "field":
        return {**turn, "reasoning": word, "reasoning_content": word}
    return {**turn, "content": f"<think>\n{word}\n</think>\n\n{turn['content']}"}
