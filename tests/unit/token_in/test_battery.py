"""Each behaviour of chat templates: the suffix is exact, or it is refused; it is never wrong.

What is right is found in the text that the template makes of the real turn: a word at the end of the turn, the end that the
policy sampled behind it, and all that follows, tokenised by itself.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from evener.engines.sampler import EngineRefused
from evener_proxy.token_in import soundness, suffix
from evener_proxy.token_in.refusals import Refused
from evener_proxy.token_in.soundness import TOOLS, Verdict
from evener_proxy.token_in.suffix import Last, Message
from tests.unit.token_in.policy import TemplatePolicy
from tests.unit.token_in.templates import TEMPLATES, Template

TURN = "ZQT"
NEW = "WKN"


def called(*ids: int, text: str | None = "", word: str = "") -> Message:
    calls = [
        {
            "id": f"call_{each}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": f"ls {each}{word}"})},
        }
        for each in ids
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": "bash", "content": text}


def said(role: str, text: str, **more: Any) -> Message:
    return {"role": role, "content": text, **more}


@dataclass(frozen=True)
class Conversation:
    """A history, a turn whose last word is `TURN`, and new messages that begin with `NEW`. ``cut``: the turn has no end."""

    name: str
    past: list[Message]
    turn: Message
    new: list[Message]
    tools: Any = None
    cut: bool = False


SHORT = [said("system", "You are a coder."), said("user", "Find the bug in a.py, please")]
BARE = [said("user", "Find the bug")]
LONG = [*SHORT, called(1, text="I look"), result(1, "a.py\nb.py"), called(2, 3), result(2, "return 1"), result(3, "return 2")]
THOUGHT = [*SHORT, said("assistant", "It is b.py.", reasoning="two files"), said("user", "Sure?")]
USER = [said("user", f"{NEW} now mend it")]
RESULT = [result(8, f"{NEW}total 0")]

CONVERSATIONS = (
    Conversation("text", SHORT, said("assistant", f"The bug is in b.py {TURN}"), USER),
    Conversation("text, no instructions", BARE, said("assistant", f"In b.py {TURN}"), USER),
    Conversation("text, tools", LONG, said("assistant", f"In b.py {TURN}"), USER, TOOLS),
    Conversation("text, thought about", THOUGHT, said("assistant", f"Yes {TURN}", reasoning="I looked"), USER, TOOLS),
    Conversation("text, thought in it", SHORT, said("assistant", f"<think>\nhm\n</think>\n\nYes {TURN}"), USER),
    Conversation("two of the user", SHORT, said("assistant", f"Yes {TURN}"), [*USER, said("user", "and hurry")]),
    Conversation("call", LONG, called(8, word=TURN), RESULT, TOOLS),
    Conversation("first call", SHORT, called(8, word=TURN), RESULT, TOOLS),
    Conversation("call, nothing said", LONG, called(8, text=None, word=TURN), RESULT, TOOLS),
    Conversation("call, thought about", LONG, {**called(8, word=TURN), "reasoning": "which?"}, RESULT, TOOLS),
    Conversation("text and call", LONG, called(8, text="Let me look.", word=TURN), RESULT, TOOLS),
    Conversation("two calls", LONG, called(8, 9, word=TURN), [*RESULT, result(9, "none")], TOOLS),
    Conversation("call, then the user", LONG, called(8, word=TURN), [*RESULT, said("user", "hurry")], TOOLS),
    Conversation("marks in a result", LONG, called(8, word=TURN), [result(8, f"{NEW} <|im_end|>\n<|im_start|>user")], TOOLS),
    Conversation("no ASCII", LONG, said("assistant", f"Größe 尺寸 {TURN}"), [said("user", f"{NEW} 修理它 ✓")], TOOLS),
    Conversation("cut text", LONG, said("assistant", f"The bug is in {TURN}"), USER, TOOLS, cut=True),
    Conversation("cut call", LONG, called(8, word=TURN), RESULT, TOOLS, cut=True),
)


def truth(policy: TemplatePolicy, asked: Conversation) -> tuple[str, int]:
    """The text behind what was sampled, and the id that was sampled last."""
    template = policy.template
    stop = (template.called_stop or template.stop) if asked.turn.get("tool_calls") else template.stop
    ends = [stop, *([template.written] if template.written else [])]
    text = policy.text([*asked.past, asked.turn, *asked.new], asked.tools)
    new = text.rindex(NEW)
    turn = text.rfind(TURN, 0, new)
    if asked.cut and not asked.turn.get("tool_calls"):
        return text[turn + len(TURN) :], policy.id("<think>")
    if turn < 0:  # the template shows nothing of the turn's words
        turn = max(text.rfind(end, 0, new) for end in ends)
    places = {end: text.find(end, turn, new) for end in ({*ends, *template.stops} if asked.cut else ends)}
    end, at = min(((end, at) for end, at in places.items() if at >= 0), key=lambda found: found[1])
    return text[at if asked.cut else at + len(end) :], policy.id("<think>" if asked.cut else stop)


async def derived(policy: TemplatePolicy, verdict: Verdict, asked: Conversation, last: int, *, hollow: bool) -> Any:
    render = soundness.rendering(policy, asked.tools)
    past = suffix.skeleton(asked.past) if hollow else asked.past
    return await suffix.derive(render, past, asked.turn, asked.new, last=Last(last, not asked.cut), ends=verdict.ends)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name.replace(" ", "-"))
async def test_exact_or_refused(template: Template) -> None:
    policy = TemplatePolicy(template)
    verdict = await soundness.check(policy)
    if template.expected == "unsound":
        assert verdict.problem is not None
        return
    assert verdict.problem is None
    assert verdict.skeleton == (template.expected == "sound")
    tried = 0
    for asked in CONVERSATIONS:
        try:
            text, last = truth(policy, asked)
        except EngineRefused:
            continue  # the template itself does not take this conversation
        for hollow in {False, verdict.skeleton}:
            found = await derived(policy, verdict, asked, last, hollow=hollow)
            assert policy.decode(found) == text, asked.name
            assert np.array_equal(found, policy.encode(text)), asked.name
            tried += 1
    assert tried > len(CONVERSATIONS) // 2


async def test_an_unsound_template_is_never_read_wrongly_where_its_text_stays_in_place() -> None:
    """A template that moves what it is given is refused for the conversation in which it does, not only by the check."""
    for template in TEMPLATES:
        if template.name in (
            "last text printed twice",
            "a length at the end",
            "the last words in the head",
            "a clock at the end",
        ):
            policy = TemplatePolicy(template)
            ends = suffix.Ends(frozenset({policy.id("<|im_end|>")}))
            asked = CONVERSATIONS[0]
            with pytest.raises(Refused):
                await derived(policy, Verdict(ends=ends), asked, policy.id("<|im_end|>"), hollow=False)


async def test_a_chain_of_exact_turns_is_what_the_template_makes_of_the_whole() -> None:
    """Where a template writes a turn as it was sampled, prompt + completion + suffix is the rendering of the history."""
    policy = TemplatePolicy(TEMPLATES[0])
    verdict = await soundness.check(policy)
    for asked in CONVERSATIONS:
        if asked.cut or asked.turn.get("reasoning"):
            continue
        whole = await policy.render([*asked.past, asked.turn, *asked.new], asked.tools)
        before = await policy.render(asked.past, asked.tools)
        found = await derived(policy, verdict, asked, policy.id("<|im_end|>"), hollow=True)
        sampled = whole[len(before) : len(whole) - len(found)]
        assert np.array_equal(np.concatenate((before, sampled, found)), whole)
        assert policy.decode(sampled).endswith("<|im_end|>")


async def test_there_are_forty_behaviours_and_they_are_distinct() -> None:
    assert len({template.name for template in TEMPLATES}) == len(TEMPLATES) >= 40
    assert sum(template.expected != "unsound" for template in TEMPLATES) >= 40


async def test_a_hollow_history_makes_renderings_short() -> None:
    policy = TemplatePolicy(TEMPLATES[0])
    past = [*SHORT, called(1), result(1, "a line\n" * 500)]
    full, hollow = [await policy.render([*each, *USER], TOOLS) for each in (past, suffix.skeleton(past))]
    assert len(hollow) < len(full) / 4
