"""Chat Completions: what is passed on as it is can always be passed on, recorded and read again."""

import json
import random

import msgspec
import numpy as np
import pytest

from evener.engines.sampler import ToolCall
from evener.trace.record import decode, encode
from evener_proxy.canonical import CallError, Reply
from evener_proxy.dialects.chat import ChatDialect
from tests.unit.proxy.dialects.mutation import mutated
from tests.unit.trace.test_record import make

DIALECT = ChatDialect()
CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BODY = {
    "model": "tiny",
    "messages": [
        {"role": "developer", "content": "be terse"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL, CALL | {"id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "call_2", "content": ""},
        {"role": "system", "content": "in the middle"},
        {"role": "user", "content": "text 1.5"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}],
    "temperature": 0.5,
    "seed": 7,
    "stop": ["x"],
    "max_tokens": 99,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logit_bias": {"5": -1},
}
REPLY = Reply(
    id="0" * 24,
    created=1,
    content="hi",
    reasoning="hm",
    tool_calls=[ToolCall("call_1", "bash", '{"command": "l')],
    finish_reason="tool_calls",
    stop_reason=None,
    prompt_tokens=3,
    completion_tokens=2,
)


def test_calls_of_one_turn_that_share_an_id_are_told_apart_with_their_results():
    def result(text):
        return {"role": "tool", "tool_call_id": "call_1", "content": text}

    turn = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL, CALL]}
    alone = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    sent = [turn, result("1"), result("2"), result("3"), alone, result("4"), {"role": "user", "content": "on"}]
    request = DIALECT.parse(json.dumps({"messages": sent}).encode(), "")
    messages = [json.loads(bytes(message)) for message in request.messages]
    assert [call["id"] for call in messages[0]["tool_calls"]] == ["call_1", "call_1_2", "call_1_3"]
    assert [message["tool_call_id"] for message in messages[1:4]] == ["call_1", "call_1_2", "call_1_3"]
    assert [message["content"] for message in messages[1:4]] == ["1", "2", "3"]
    assert messages[4:] == sent[4:]


def test_what_has_ids_of_its_own_is_passed_on_byte_for_byte():
    call = '{"id" :"call_1", "type":"function","function":{"name":"x","arguments":"{\\"id\\": 1}"}}'
    messages = [
        f'{{"role":"assistant",  "content":null,"tool_calls":[{call}, {call.replace("call_1", "call_2")}]}}',
        '{"role":"tool","tool_call_id":"call_2", "content":"x"}',
    ]
    request = DIALECT.parse(('{"messages":[' + ",".join(messages) + "]}").encode(), "")
    assert [bytes(message).decode() for message in request.messages] == messages


def recorded(**request):
    """A request as its record gives it back."""
    tokens = np.zeros(1, np.int32)
    return decode(encode(make(1, tokens, tokens, request=request)), {}).request


def messages(request):
    return [json.loads(bytes(message)) for message in request.messages]


def test_messages_keep_their_place_and_thinking_its_name():
    request = DIALECT.parse(json.dumps(BODY).encode(), "")
    given = json.loads(json.dumps(BODY["messages"]))
    given[0]["role"] = "system"
    given[2]["reasoning"] = given[2].pop("reasoning_content")
    assert messages(request) == given
    assert request.systems == 1


def test_thinking_goes_out_and_comes_back():
    for stream in (False, True):
        request = DIALECT.parse(json.dumps(BODY | {"stream": stream}).encode(), "")
        assert b'"reasoning_content":"hm"' in DIALECT.render(request, REPLY)


@pytest.mark.parametrize("wrong", [b'{"messages":[{"role":"user","content":"\xff"}]}', b'{"messages":[{"role":' + b"[" * 5000])
def test_what_nobody_could_read_is_refused(wrong):
    with pytest.raises(CallError) as error:
        DIALECT.parse(wrong, "")
    assert error.value.status == 400


def test_a_number_that_no_float_holds_is_recorded_as_its_text():
    request = DIALECT.parse(b'{"messages":[{"role":"user","content":1e999,"x":[2.5]}]}', "")
    assert recorded(messages=request.messages)["messages"] == [{"role": "user", "content": "1e999", "x": [2.5]}]


def test_ten_thousand_mutated_bodies():
    rng = random.Random(5)
    body, parsed, refused = json.dumps(BODY).encode(), 0, []
    for _ in range(10_000):
        try:
            request = DIALECT.parse(mutated(body, rng), "")
        except CallError as error:
            refused.append((error.status, json.loads(DIALECT.error(error))["error"]["type"]))
            continue
        parsed += 1
        told = {"messages": request.messages, "tools": request.tools or msgspec.Raw(b"null"), "asked": request.asked}
        assert recorded(**told).keys() == told.keys()
        assert DIALECT.render(request, REPLY)
    assert parsed > 1000
    assert set(refused) == {(400, "invalid_request_error")}


def test_a_name_that_is_written_with_escapes_is_still_that_name():
    fetched = r'{"role": "user", "content": [{"type": "image_url", "imag\u0065_ur\u006c": {"url": "http://10.0.0.1/x"}}]}'
    with pytest.raises(CallError) as error:
        DIALECT.parse(b'{"messages": [%b]}' % fetched.encode(), "")
    assert (error.value.status, error.value.param) == (400, "messages[0].content.image_url")
    thinking = rb'{"role": "assistant", "content": "\u00e9", "reasoning_c\u006fntent": "hm"}'
    (message,) = DIALECT.parse(b'{"messages": [%b]}' % thinking, "").messages
    assert json.loads(bytes(message)) == {"role": "assistant", "content": "é", "reasoning": "hm"}
    strict = rb'[{"type": "function", "function": {"name": "bash", "stri\u0063t": true}}]'
    request = DIALECT.parse(b'{"messages": [{"role": "user", "content": "x"}], "tools": %b}' % strict, "")
    assert json.loads(bytes(request.tools)) == [{"type": "function", "function": {"name": "bash"}}]
    plain = rb'{"role": "user", "content": "caf\u00e9"}'
    assert bytes(DIALECT.parse(b'{"messages": [%b]}' % plain, "").messages[0]) == plain


def test_strict_tools_would_constrain_the_engine():
    function = {"name": "bash", "parameters": {"type": "object"}}
    strict = [{"type": "function", "function": function | {"strict": True}}]
    request = DIALECT.parse(json.dumps(BODY | {"tools": strict}).encode(), "")
    assert json.loads(bytes(request.tools)) == [{"type": "function", "function": function}]


def test_tools_that_only_a_vendor_runs_are_left_out():
    function = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    hosted = [{"type": "web_search"}, {"type": "builtin_function", "function": {"name": "$web_search"}}]
    request = DIALECT.parse(json.dumps(BODY | {"tools": [hosted[0], function, hosted[1]], "tool_choice": "auto"}).encode(), "")
    assert (json.loads(bytes(request.tools)), request.hosted_tools) == ([function], 2)
    assert bytes(request.tool_choice) == b'"auto"'
    request = DIALECT.parse(json.dumps(BODY | {"tools": hosted, "tool_choice": "auto"}).encode(), "")
    assert (request.tools, request.tool_choice, request.hosted_tools) == (None, None, 2)


@pytest.mark.parametrize("tools", [{}, ["bash"], [{"type": 1}], "x"])
def test_tools_of_a_wrong_shape_are_refused(tools):
    with pytest.raises(CallError) as error:
        DIALECT.parse(json.dumps(BODY | {"tools": tools}).encode(), "")
    assert error.value.status == 400


def test_functions_that_tools_replaced_are_refused_rather_than_lost():
    with pytest.raises(CallError, match="functions"):
        DIALECT.parse(json.dumps(BODY | {"functions": [{"name": "f"}]}).encode(), "")
