"""How a reply ended is told from what the engine says and sampled; what is remembered of sessions is bounded."""

import dataclasses
from typing import Any

import fakeredis
import pytest

from evener.trace.record import CallRecord, int32
from evener.trace.store import TraceStore
from evener_proxy.token_in import history
from evener_proxy.token_in.prompts import Past, Prompts, last_of
from evener_proxy.token_in.refusals import Refusal, Refused
from evener_proxy.token_in.suffix import Ends, Last
from tests.unit.trace.test_record import make

END, OTHER = 7, 8
ENDS = Ends(frozenset({END}))


def past(*, last: int, finish: str, stopped_by: int | str | None = None, filled: bool = False) -> Past:
    turn, ids = history.Turn("", ()), int32([1, last])
    return Past(1, None, int32([5]), ids, 1, b"", None, turn, finish, stopped_by, filled, frozenset(), {})


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (past(last=END, finish="stop"), Last(END, True)),
        (past(last=END, finish="tool_calls", filled=True), Last(END, True)),
        (past(last=OTHER, finish="stop"), Last(OTHER, True)),  # an end that the template does not write
        (past(last=OTHER, finish="tool_calls"), Last(OTHER, True)),
        (past(last=OTHER, finish="length", filled=True), Last(OTHER, False)),
        (past(last=OTHER, finish="repetition"), Last(OTHER, False)),
        (past(last=OTHER, finish="stop", stopped_by="\n\n"), Last(OTHER, False)),  # by a text that the agent named
        (past(last=OTHER, finish="tool_calls", filled=True), None),  # a call that may lack its last characters
    ],
)
def test_how_a_reply_ended(reply: Past, expected: Last | None) -> None:
    if expected is not None:
        assert last_of(reply, ENDS) == expected
        return
    with pytest.raises(Refused, match=Refusal.END_UNCLEAR):
        last_of(reply, ENDS)


def call(number: int, prompt: list[int], **kept: Any) -> CallRecord:
    record = make(number, int32(prompt), int32([100 + number]))
    request = {"tools_digest": None, "used": {"max_tokens": 9}, "prompt": {"messages": 1, "history": "00", **kept}}
    reply = {
        "id": "0" * 24,
        "created": 0,
        "content": "ok",
        "reasoning": None,
        "tool_calls": [],
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_tokens": len(prompt),
        "completion_tokens": 1,
    }
    return dataclasses.replace(record, request=request, reply=reply)


def test_a_conversation_takes_as_much_as_its_own_tokens() -> None:
    prompts = Prompts(TraceStore(fakeredis.FakeAsyncRedis()))
    tokens = list(range(1000))
    for number in range(1, 21):
        record = call(number, tokens, **({"from": number - 1} if number > 1 else {"refused": "first"}))
        prompts.add("s", record)
        tokens = [*record.tokens.tolist(), 1]
    assert prompts._known["s"][20].tokens.tolist() == tokens[:-1]
    assert prompts._bytes < 2 * 4 * len(tokens) + 20 * 1024


def test_what_is_remembered_is_bounded() -> None:
    prompts = Prompts(TraceStore(fakeredis.FakeAsyncRedis()), bound=20_000)
    for session in range(20):
        prompts.add(f"s{session}", call(1, list(range(1000)), refused="first"))
    assert prompts._bytes <= 20_000
    assert list(prompts._known) == ["s16", "s17", "s18", "s19"]
    prompts.add("s0", call(2, [1, 2], **{"from": 1}))  # the call that it goes on from was forgotten
    assert 2 not in prompts._known["s0"]
