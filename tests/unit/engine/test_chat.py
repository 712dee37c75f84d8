"""Tokenising in pieces, the template's view of messages, and Hermes tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .conftest import BASH, MARKUP, SPECIAL

pytestmark = pytest.mark.torch
FIXTURE = Path(__file__).parents[2] / "fixtures" / "engine" / "tool_call_real.json"


@pytest.fixture(scope="module")
def chat(policy: Path) -> Any:
    from evener_engine.chat import Chat

    return Chat(policy)


piece = st.one_of(st.sampled_from([*SPECIAL, *MARKUP, " ", "\n", "<|", "|>", "<", "é", "the "]), st.text(max_size=6))


@given(parts=st.lists(piece, max_size=30))
def test_pieces_give_the_ids_of_the_whole_text(chat: Any, parts: list[str]) -> None:
    text = "".join(parts)
    assert chat.encode(text) == chat.tokenizer(text, add_special_tokens=False).input_ids
    assert chat.encode(text) == chat.tokenizer(text, add_special_tokens=False).input_ids  # from the cache


def test_a_special_token_that_looks_around_is_no_boundary() -> None:
    from tokenizers import AddedToken

    from evener_engine.chat import _boundary

    plain = AddedToken("<|a|>", special=True, normalized=False)
    assert _boundary([plain]).pattern == r"<\|a\|>"
    for other in (
        AddedToken("<|b|>", special=True, normalized=False, lstrip=True),
        AddedToken("<|b|>", special=True, normalized=False, single_word=True),
        AddedToken("<|b|>", special=False, normalized=False),
    ):
        assert _boundary([plain, other]).pattern == r"<\|a\|>"
    assert _boundary([plain, AddedToken("x<|a", special=False, normalized=False)]) is None  # may overlap its start
    assert _boundary([plain, AddedToken("<|a|>>", special=False, normalized=False)]) is None  # longer, same start


def test_template_sees_joined_text_and_parsed_arguments(chat: Any) -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}

    def text(*messages: dict[str, Any]) -> str:
        return chat.decode(chat.render(list(messages), [BASH], {}), skip_special=False)

    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert "<|im_start|>user\na\nb<|im_end|>" in text(parts)
    parsed = text(parts, {"role": "assistant", "content": None, "tool_calls": [call('{"command":"ls"}')]})
    assert '"arguments": {"command": "ls"}}' in parsed
    broken = text(parts, {"role": "assistant", "content": None, "tool_calls": [call('{"command":')]})
    assert "command" in broken


def test_the_recorded_call_is_parsed_as_vllm_did() -> None:
    from evener_engine.chat import parse_reply

    message = json.loads(FIXTURE.read_text())["response"]["choices"][0]["message"]
    function = message["tool_calls"][0]["function"]
    reply = parse_reply('<tool_call>\n{"name": "bash", "arguments": {"command":"ls -la"}}\n</tool_call>')
    assert (reply.content, reply.tool_calls) == (None, [(function["name"], function["arguments"])])


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        '<tool_call>{"name": "bash", "arguments": {"command": "ls"}</tool_call>',
        '<tool_call>{"name": "bash"}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>',
        '<tool_call>["bash"]</tool_call>',
        '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>no</tool_call>',
        "<tool_call>",
    ],
)
def test_what_is_no_tool_call_stays_content(text: str) -> None:
    from evener_engine.chat import parse_reply

    assert parse_reply(text) == (text, [])


def test_text_before_several_calls_is_content() -> None:
    from evener_engine.chat import parse_reply

    one = '<tool_call>{"name": "a", "arguments": {"x": "é"}}</tool_call>'
    assert parse_reply("Look: " + one + one) == ("Look: ", [("a", '{"x": "é"}')] * 2)


def test_a_completion_with_a_tool_call_says_so(chat: Any) -> None:
    from evener_engine.sampling import Sampling
    from evener_engine.scheduler import Call
    from evener_engine.wire import ChatRequest, Completion

    text = 'Look.<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call><|im_end|>'
    call = Call([1], Sampling(100), lambda _: None, str)
    call.tokens = chat.encode(text)
    call.logprobs = [-0.5] * len(call.tokens)
    call.finish = "stop"
    body = Completion(call, ChatRequest([], tools=[BASH]), chat, "tiny", frozenset({2})).body()
    choice, recorded = body["choices"][0], json.loads(FIXTURE.read_text())["response"]["choices"][0]
    assert choice["finish_reason"] == recorded["finish_reason"] == "tool_calls"
    assert choice["message"].keys() == recorded["message"].keys()
    (tool_call,) = choice["message"]["tool_calls"]
    assert tool_call["id"].startswith("chatcmpl-tool-")
    assert tool_call.keys() == recorded["message"]["tool_calls"][0].keys()
    assert choice["message"]["content"] == "Look."
    plain = Completion(call, ChatRequest([], tools=[BASH], tool_choice="none"), chat, "tiny", frozenset({2})).body()
    assert plain["choices"][0]["finish_reason"] == "stop"
