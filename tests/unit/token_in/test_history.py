"""Whatever an agent does to its history, it goes on from the longest one that says the same, and from none that it changed."""

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from evener.engines.sampler import ToolCall
from evener_proxy.canonical import Reply
from evener_proxy.token_in import history

Message = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """What a message means. ``calls``: arguments of tool calls; ``answers``: the place in the history and among its calls of
    the call that a result is of. ``reply``: the number of our reply that a turn is.
    """

    role: str
    text: str
    calls: tuple[str, ...] = ()
    answers: tuple[int, int] | None = None
    thinking: str = ""
    reply: int = 0

    @property
    def compared(self) -> tuple[Any, ...]:
        return self.role, self.text, self.calls, self.answers


Meaning = tuple[Said, ...]


@dataclass(frozen=True)
class Call:
    """A call that was made, as `history.find` sees it, and what its messages and its turn mean."""

    length: int
    digest: bytes
    turn: history.Turn
    above: "Call | None"
    whole: Meaning
    shown: dict[int, str]


def spelled(meaning: Meaning, rng: random.Random, *, thinks: bool) -> list[Message]:
    """The messages in one of the spellings in which agents send them; ``thinks``: with thinking."""
    ids: dict[tuple[int, int], str] = {}
    messages: list[Message] = []
    for place, said in enumerate(meaning):
        content = _content(said.text, rng, ends=said.role != "user")
        message: Message = {"role": said.role, **content}
        if said.thinking and thinks:
            message[rng.choice(["reasoning", "reasoning_content"])] = rng.choice(["", " ", "\n"]) + said.thinking
        ours = rng.random() < 0.5
        for index, arguments in enumerate(said.calls):
            ids[place, index] = minted(said.reply, index) if ours else f"bash-{place}-{index}"
            function = {"name": "bash", "arguments": _arguments(arguments, rng)}
            message.setdefault("tool_calls", []).append({"id": ids[place, index], "type": "function", "function": function})
        if said.answers is not None:
            message["tool_call_id"] = ids.get(said.answers, "nobody's")
        messages.append(message)
    return messages


def minted(reply: int, index: int) -> str:
    return f"call_{reply:020x}{index:04x}"


def _content(text: str, rng: random.Random, *, ends: bool) -> Message:
    if not text:
        return rng.choice([{}, {"content": None}, {"content": ""}, {"content": []}])
    text += rng.choice(["", " ", "\n"]) if ends else ""
    marks: Message = rng.choice([{}, {"cache_control": {"type": "ephemeral"}}])
    return rng.choice([{"content": text}, {"content": [{"type": "text", "text": text, **marks}]}])


def _arguments(command: str, rng: random.Random) -> Any:
    items = [("command", command), ("wait", rng.choice([1, 1.0]))]
    rng.shuffle(items)
    return rng.choice([json.dumps(dict(items)), json.dumps(dict(items), separators=(",", ":")), dict(items)])


def answered(number: int, rng: random.Random) -> tuple[Reply, Said]:
    """A reply of the policy, and what it means; some are alike."""
    text = rng.choice(["", "I look.", "Done."])
    calls = tuple(rng.choice(["ls", "cat a"]) for _ in range(rng.randrange(3))) if text != "Done." else ()
    said = Said("assistant", text or ("" if calls else "Done."), calls, thinking=rng.choice(["", "hm, so"]), reply=number)
    reply = Reply(
        id=f"{number:020x}0000",
        created=0,
        content=f" {said.text}\n" if said.text else None,
        reasoning=said.thinking or None,
        tool_calls=[ToolCall(minted(number, i), "bash", f'{{"wait": 1,  "command":"{each}"}}') for i, each in enumerate(calls)],
        finish_reason="stop",
        stop_reason=None,
        prompt_tokens=1,
        completion_tokens=1,
    )
    return reply, said


def new(whole: Meaning, rng: random.Random) -> Meaning:
    """What the agent says next."""
    last, place = whole[-1], len(whole) - 1
    if last.calls:
        order = rng.sample(range(len(last.calls)), len(last.calls))
        return tuple(Said("tool", rng.choice(["ok", "no"]), answers=(place, index)) for index in order)
    return (Said("user", rng.choice(["Go on", "Why?"])),)


def edited(meaning: Meaning, rng: random.Random) -> Meaning:
    """One message changed on purpose, or gone."""
    place = rng.randrange(len(meaning))
    said = meaning[place]
    if said.thinking and rng.random() < 0.3:
        changed = replace(said, thinking="no")
    elif said.calls and rng.random() < 0.5:
        changed = replace(said, calls=(said.calls[0] + " -a", *said.calls[1:]))
    elif said.answers is None and rng.random() < 0.3 and len(meaning) > 2:
        kept = [each if each.answers is None else replace(each, answers=None) for each in meaning]
        return tuple(kept[:place] + kept[place + 1 :])
    else:
        changed = replace(said, text=said.text + ", please")
    return (*meaning[:place], changed, *meaning[place + 1 :])


def begins(meaning: Meaning, whole: Meaning, *, thinks: bool) -> bool:
    """Whether what the agent sends begins with a history. A turn without thinking may be one whose thinking was dropped."""
    return len(whole) <= len(meaning) and all(
        now.compared == was.compared and (not thinks or now.thinking in ("", was.thinking))
        for now, was in zip(meaning, whole, strict=False)
    )


@given(st.integers(0, 2**32), st.integers(2, 12), st.booleans())
@settings(max_examples=300)
def test_a_history_goes_on_from_the_longest_one_that_says_the_same(seed: int, steps: int, thinks: bool) -> None:
    rng = random.Random(seed)
    opening = (Said("system", "You code."), Said("user", "Mend it"))
    calls: list[Call] = []
    for number in range(1, steps + 1):
        meaning = opening
        if calls and rng.random() < 0.9:
            whole = rng.choice(calls).whole
            meaning = (*whole, *new(whole, rng))
            meaning = edited(meaning, rng) if rng.random() < 0.3 else meaning
        asked = history.read(spelled(meaning, rng, thinks=thinks))
        found = history.find(asked, calls)
        expected = max((call.whole for call in calls if begins(meaning, call.whole, thinks=thinks)), key=len, default=())
        assert (found is None) == (expected == ())
        if found is not None:
            assert len(found.whole) == len(expected)
            assert begins(meaning, found.whole, thinks=thinks)
        reply, said = answered(number, rng)
        shown = asked.thoughts(found.length + 1 if found is not None else 0)
        calls.append(Call(asked.length, asked.digests[-1], history.turn_of(reply), found, (*meaning, said), shown))
