"""Responses in and out: golden files that a person can read, and the rules that they stand for."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener_proxy.canonical import CallError, Reply
from evener_proxy.dialects.responses import ResponsesDialect

GOLDEN = Path(__file__).parent / "golden" / "responses"
DIALECT = ResponsesDialect()
BASH = {"type": "function", "name": "bash", "parameters": {"type": "object"}}
A, B = "a" * 24, "b" * 24


def parse(**fields: Any):
    return DIALECT.parse(json.dumps({"model": "tiny", "input": "hi"} | fields).encode(), "/v1/responses")


def messages(items: list[Any], **fields: Any) -> list[dict[str, Any]]:
    return [json.loads(bytes(message)) for message in parse(input=items, **fields).messages]


def refusal(**fields: Any) -> CallError:
    with pytest.raises(CallError) as error:
        parse(**fields)
    assert (error.value.status, error.value.code) == (400, "invalid_request")
    return error.value


def reply(**fields: Any) -> Reply:
    values: dict[str, Any] = {
        "id": A,
        "created": 1,
        "content": None,
        "reasoning": None,
        "tool_calls": [],
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_tokens": 1,
        "completion_tokens": 1,
    }
    return msgspec.convert(values | fields, Reply)


def called(name: str, arguments: str, call_id: str = "call_1") -> dict[str, str]:
    return {"id": call_id, "name": name, "arguments": arguments}


def output(request, **fields: Any) -> list[dict[str, Any]]:
    return json.loads(DIALECT.render(request, reply(**fields)))["output"]


def message(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]} | fields


def call(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "bash", "arguments": "{}"} | fields


def result(**fields: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "output": "ok"} | fields


def request_of(name: str, **fields: Any):
    return parse(**(json.loads((GOLDEN / f"{name}.request.json").read_bytes()) | fields))


def reply_of(name: str) -> Reply:
    return msgspec.json.decode((GOLDEN / f"{name}.reply.json").read_bytes(), type=Reply)


def shown(request: Any) -> str:
    """The canonical request as its golden file shows it."""
    names = (
        "systems",
        "tool_choice",
        "response_format",
        "max_tokens",
        "constrained",
        "hosted_tools",
        "asked",
        "messages",
        "tools",
    )
    document = {name: getattr(request, name) for name in names}
    return json.dumps(json.loads(msgspec.json.encode(document)), indent=2) + "\n"


@pytest.mark.parametrize("name", ["history", "tools"])
def test_a_request_becomes_canonical(name):
    assert shown(request_of(name)) == (GOLDEN / f"{name}.canonical.json").read_text()


@pytest.mark.parametrize("name", ["full", "truncated"])
def test_a_reply_is_rendered_in_both_forms(name):
    streamed = DIALECT.render(request_of("tools", stream=True), reply_of(name))
    assert streamed.decode() == (GOLDEN / f"{name}.stream.txt").read_text()
    whole = json.loads(DIALECT.render(request_of("tools"), reply_of(name)))
    assert whole == json.loads((GOLDEN / f"{name}.response.json").read_bytes())


def test_a_string_is_a_user_message_after_the_instructions():
    request = parse(input="hi", instructions="be terse")
    assert [json.loads(bytes(each)) for each in request.messages] == [
        {"role": "system", "content": "be terse"},
        {"role": "user", "content": "hi"},
    ]
    assert request.systems == 1


def test_items_of_one_turn_are_one_message_with_and_without_ids():
    with_ids = [
        {"type": "reasoning", "id": f"rs_{A}", "summary": [{"type": "summary_text", "text": "hm"}]},
        message("look", id=f"msg_{A}"),
        call("call_1", id=f"fc_{A}_0"),
        call("call_2", id=f"fc_{A}_1"),
    ]
    without = [{name: value for name, value in item.items() if name != "id"} for item in with_ids]
    assert messages(with_ids) == messages(without)
    (turn,) = messages(with_ids)
    assert (turn["reasoning"], turn["content"], [each["id"] for each in turn["tool_calls"]]) == (
        "hm",
        "look",
        ["call_1", "call_2"],
    )


def test_turns_in_a_row_stay_apart():
    assert len(messages([message("one", id=f"msg_{A}"), message("two", id=f"msg_{B}")])) == 2
    assert len(messages([message("one", id=f"msg_{A}"), call("call_1", id=f"fc_{B}_0")])) == 2
    assert len(messages([message("one"), message("two")])) == 2
    assert len(messages([call("call_1"), message("two")])) == 2
    assert len(messages([message("one"), {"type": "reasoning", "summary": []}, message("two")])) == 2
    assert len(messages([call("call_1"), result(call_id="call_1"), call("call_2")])) == 3


def test_encrypted_content_tells_turns_apart_where_ids_are_dropped():
    def sealed(reply_id):
        return {"type": "reasoning", "summary": [], "encrypted_content": f"evener_{reply_id}"}

    assert len(messages([sealed(A), message("one"), sealed(B), call("call_1")])) == 2


def test_calls_of_one_turn_with_results_in_between_are_one_message():
    items = [
        call("call_1", id=f"fc_{A}_0"),
        result(call_id="call_1"),
        call("call_2", id=f"fc_{A}_1"),
        result(call_id="call_2"),
        {"role": "user", "content": "on"},
    ]
    found = messages(items)
    assert [each["role"] for each in found] == ["assistant", "tool", "tool", "user"]
    assert [each["id"] for each in found[0]["tool_calls"]] == ["call_1", "call_2"]


MINTED = [f"call_{'a' * 20}000{index}" for index in range(3)]


def test_the_ids_of_calls_tell_one_reply_where_items_have_none():
    items = [message("look")]
    for call_id in MINTED:
        items += [call(call_id), result(call_id=call_id, output=call_id)]
    found = messages([*items, call(f"call_{'b' * 20}0000"), {"role": "user", "content": "on"}])
    assert [each["role"] for each in found] == ["assistant", "tool", "tool", "tool", "assistant", "user"]
    assert found[0]["content"] == "look"
    assert [each["id"] for each in found[0]["tool_calls"]] == MINTED
    assert [(each["tool_call_id"], each["content"]) for each in found[1:4]] == [(each, each) for each in MINTED]


def test_ids_of_items_and_of_calls_name_the_same_reply():
    mixed = [message("look", id=f"msg_{A}"), result(call_id="x"), call(MINTED[0])]
    assert [each["role"] for each in messages(mixed)] == ["assistant", "tool"]
    other = [message("look", id=f"msg_{B}"), result(call_id="x"), call(MINTED[0])]
    assert [each["role"] for each in messages(other)] == ["assistant", "tool", "assistant"]


def test_a_repeated_id_is_the_nearest_calls_that_waits():
    turn = [message("look"), call("call_0"), call("call_0"), result(call_id="call_0", output="1")]
    found = messages([*turn, result(call_id="call_0", output="2"), message("on"), call("call_0"), result(call_id="call_0")])
    assert [each["id"] for each in found[0]["tool_calls"]] == ["call_0", "call_0_2"]
    assert [(each["tool_call_id"], each["content"]) for each in found[1:3]] == [("call_0", "1"), ("call_0_2", "2")]
    assert found[4]["tool_call_id"] == found[3]["tool_calls"][0]["id"] == "call_0"
    late = messages([call("call_0"), message("on"), call("call_0"), call("call_0"), result(call_id="call_0")])
    assert late[-1]["tool_call_id"] == late[1]["tool_calls"][0]["id"]


def test_results_without_ids_are_paired_by_name_then_order():
    calls = [call("call_1", name="read"), call("call_2", name="bash"), call("call_3", name="read")]
    results = [result(name="bash"), result(), result(name="read")]
    assert [each["tool_call_id"] for each in messages([*calls, *results])[1:]] == ["call_2", "call_1", "call_3"]
    nameless = [{**call("x"), "call_id": None}, {**call("x"), "call_id": None}, result(), result()]
    turn, first, second = messages(nameless)
    assert [each["id"] for each in turn["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]
    assert first["tool_call_id"] != second["tool_call_id"]
    assert refusal(input=[result()]).param == "input[0].call_id"


def test_empty_contents_are_the_same_bytes():
    def canonical(item):
        return bytes(parse(input=[item, {"role": "user", "content": "x"}]).messages[0])

    for role in ("user", "assistant", "system"):
        empty = [{"role": role, "content": content} for content in (None, "", [], [{"type": "input_text", "text": ""}])]
        assert len({canonical(item) for item in [*empty, {"role": role}]}) == 1
    with_call = [[message("", content=content), call("call_1")] for content in (None, "", [])]
    assert len({json.dumps(messages(items)) for items in [*with_call, [call("call_1")]]}) == 1


def test_instructions_in_the_middle_keep_their_place():
    request = parse(
        instructions="a",
        input=[{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}, {"role": "system", "content": "d"}],
    )
    assert [json.loads(bytes(each))["role"] for each in request.messages] == ["system", "system", "user", "system"]
    assert request.systems == 2


def test_unknown_parts_keep_their_text_or_say_that_they_are_not_shown():
    parts = [{"type": "novel", "text": "kept"}, {"type": "novel", "data": 1}, "plain"]
    (found,) = messages([{"role": "user", "content": parts}])
    kept, shown, plain = (part["text"] for part in found["content"])
    assert (kept, plain) == ("kept", "plain")
    assert "novel" in shown
    (turn,) = messages([{"role": "assistant", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}])
    assert "not shown" in turn["content"]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "novel", "text": "kept"}, "kept"),
        ({"type": "novel", "content": [{"type": "input_text", "text": "kept"}]}, "kept"),
        ({"type": "novel_output", "call_id": "nobody's", "output": "kept"}, "kept"),
        ({"type": "novel", "summary": [{"text": "kept"}], "status": "completed"}, "kept"),
        ({"type": "novel_call", "arguments": {"a": "kept"}}, '{"a":"kept"}'),
    ],
)
def test_unknown_items_reach_the_model_as_text(item, text):
    found = messages([{"role": "user", "content": "hi"}, item, {"role": "user", "content": "on"}])
    assert found[1] == {"role": "user", "content": text}


def test_an_unknown_item_of_the_assistant_or_of_a_call_keeps_its_side():
    found = messages([message("look"), {"type": "novel", "role": "assistant", "text": "kept"}, call("call_1")])
    assert [(each["role"], each["content"]) for each in found] == [("assistant", "look"), ("assistant", "kept")]
    found = messages([call("call_1"), {"type": "novel_output", "call_id": "call_1", "output": "kept"}])
    assert found[1] == {"role": "tool", "tool_call_id": "call_1", "content": "kept"}


def test_an_update_of_settings_is_no_word_to_the_model():
    update = {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}}
    assert len(messages([{"role": "user", "content": "hi"}, update])) == 1
    update["text"] = {"format": {"type": "json_schema"}}
    assert refusal(input=[{"role": "user", "content": "hi"}, update]).param == "input[1].text.format"


@pytest.mark.parametrize("kind", ["novel", "compaction", "compaction_trigger"])
def test_an_item_that_nobody_can_read_is_refused_by_its_place(kind):
    error = refusal(input=[{"role": "user", "content": "hi"}, {"type": kind, "encrypted_content": "x"}])
    assert error.param == "input[1]"


@pytest.mark.parametrize("field", [{"previous_response_id": "resp_1"}, {"conversation": "c"}, {"conversation": {"id": "c"}}])
def test_what_needs_state_is_refused_by_name(field):
    assert refusal(**field).param == next(iter(field))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "b", "arguments": {}}]}, "input[0].arguments"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [BASH], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(fields, param):
    assert refusal(**fields).param == param


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"input": 3}', b'{"input": "\xff"}', b'{"input": "\\ud800"}', b'{"input":' + b"[" * 9999]
)
def test_a_malformed_body_is_400(body):
    with pytest.raises(CallError) as error:
        DIALECT.parse(body, "/v1/responses")
    assert error.value.status == 400


def test_a_compressed_body_is_named():
    with pytest.raises(CallError, match="zstd"):
        DIALECT.parse(b"\x28\xb5\x2f\xfd....", "/v1/responses")


def test_forced_choices_and_formats_are_constrained_and_take_the_chat_form():
    forced = parse(tools=[BASH], tool_choice="required")
    assert (forced.constrained, bytes(forced.tool_choice)) == ("tool_choice", b'"required"')
    named = parse(tools=[{"type": "custom", "name": "patch"}], tool_choice={"type": "custom", "name": "patch"})
    assert json.loads(bytes(named.tool_choice)) == {"type": "function", "function": {"name": "patch"}}
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    formed = parse(text={"format": schema})
    assert formed.constrained == "text.format"
    assert json.loads(bytes(formed.response_format)) == {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
    }
    free = parse(tools=[BASH], tool_choice="auto", text={"format": {"type": "text"}, "verbosity": "low"})
    assert (free.constrained, free.tool_choice, free.response_format) == (None, None, None)


def test_allowed_tools_are_all_that_the_model_sees():
    tools = [BASH, {"type": "function", "name": "read"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "read"}]}
    request = parse(tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in json.loads(bytes(request.tools))] == ["read"]
    assert request.constrained is None
    assert parse(tools=tools, tool_choice=choice | {"mode": "required"}).constrained == "tool_choice"


def test_tools_of_one_name_stay_apart():
    request = parse(
        tools=[
            {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b"}]},
            {"type": "function", "name": "a__b"},
            {"type": "custom", "name": "a__b"},
        ]
    )
    names = [tool["function"]["name"] for tool in json.loads(bytes(request.tools))]
    assert names == ["a__b_3", "a__b", "a__b_2"]
    items = output(request, tool_calls=[called(name, '{"input":"x"}') for name in names])
    assert [(item["type"], item["name"], item.get("namespace")) for item in items] == [
        ("function_call", "b", "a"),
        ("function_call", "a__b", None),
        ("custom_tool_call", "a__b", None),
    ]
    history = [*items, {"role": "user", "content": "on"}]
    turn = json.loads(bytes(parse(tools=json.loads(bytes(request.repeated["tools"])), input=history).messages[0]))
    assert [each["function"]["name"] for each in turn["tool_calls"]] == names


def test_a_call_that_comes_back_without_its_namespace_is_the_same_call():
    tools = [{"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b"}]}]
    (item,) = output(parse(tools=tools), tool_calls=[called("a__b", "{}")])
    assert messages([item], tools=tools) == messages([item | {"namespace": None}], tools=tools)


def test_items_of_the_vendors_tools_are_counted_and_leave_a_turn_whole():
    hosted = [{"type": "web_search_call", "id": "ws_1"}, {"type": "tool_search_call", "execution": "server", "arguments": {}}]
    found = messages([message("look"), *hosted, call("call_1"), result(call_id="call_1")])
    assert [each["role"] for each in found] == ["assistant", "tool"]
    assert parse(input=[message("look"), *hosted], tools=[{"type": "web_search"}]).hosted_tools == 3


def test_tools_that_the_history_adds_are_listed_and_replace_earlier_ones():
    added = {"type": "additional_tools", "role": "developer", "tools": [{**BASH, "description": "new"}, {**BASH, "name": "x"}]}
    request = parse(tools=[BASH], input=[added, {"role": "user", "content": "hi"}])
    tools = [tool["function"] for tool in json.loads(bytes(request.tools))]
    assert [(tool["name"], tool.get("description")) for tool in tools] == [("bash", "new"), ("x", None)]


def test_arguments_without_the_shape_of_an_item_arrive_as_the_models_own_text():
    request = parse(tools=[{"type": "custom", "name": "patch"}, {"type": "local_shell"}, {"type": "apply_patch"}])
    calls = [
        called("patch", "*** Begin"),
        called("patch", '{"other": 1}'),
        called("local_shell", '{"command": "ls"}'),
        called("apply_patch", '{"type": "update_file", "path": "a"}'),
        called("unknown", "{"),
    ]
    items = output(request, tool_calls=calls)
    assert [item["input"] for item in items[:2]] == ["*** Begin", '{"other": 1}']
    assert [(item["type"], item["name"], item["arguments"]) for item in items[2:]] == [
        ("function_call", each["name"], each["arguments"]) for each in calls[2:]
    ]


def test_only_the_last_item_of_a_truncated_reply_is_incomplete():
    request = parse(tools=[BASH])
    document = json.loads(
        DIALECT.render(request, reply(content="x", tool_calls=[called("bash", '{"com')], finish_reason="length"))
    )
    assert (document["status"], document["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in document["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize("finish", ["stop", "tool_calls", "repetition"])
def test_other_ends_are_complete(finish):
    assert json.loads(DIALECT.render(parse(), reply(content="x", finish_reason=finish)))["status"] == "completed"


def test_a_reply_of_nothing_has_an_empty_message():
    assert [item["type"] for item in output(parse())] == ["message"]
    assert [item["type"] for item in output(parse(), reasoning="hm")] == ["reasoning"]


def test_encrypted_reasoning_is_given_where_it_is_asked_for():
    sealed = output(parse(include=["reasoning.encrypted_content"]), reasoning="hm")[0]["encrypted_content"]
    assert A in sealed
    assert output(parse(), reasoning="hm")[0]["encrypted_content"] is None


def test_a_response_repeats_the_request_on_one_line():
    pretty = json.dumps({"model": "tiny", "input": "hi", "tools": [BASH], "metadata": {"a": "b"}, "stream": True}, indent=2)
    streamed = DIALECT.render(DIALECT.parse(pretty.encode(), ""), reply(content="x"))
    for event in streamed.strip().split(b"\n\n"):
        kind, data = event.split(b"\n")
        assert json.loads(data.removeprefix(b"data: "))["type"] == kind.removeprefix(b"event: ").decode()
    last = json.loads(data.removeprefix(b"data: "))["response"]
    assert (last["tools"], last["metadata"]) == ([BASH], {"a": "b"})


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (503, "engine_unavailable", "server_error"),
        (429, "busy", "rate_limit_exceeded"),
        (400, "invalid_request", "invalid_prompt"),
        (403, "session_sealed", "session_sealed"),
    ],
)
def test_a_late_error_ends_both_forms(status, code, told):
    error = CallError(status, code, "down", param="messages")
    events = DIALECT.late_error(parse(stream=True), error).decode().strip().split("\n\n")
    kinds = [event.split("\n")[0].removeprefix("event: ") for event in events]
    assert kinds == ["response.created", "response.in_progress", "error", "response.failed"]
    failed = json.loads(DIALECT.late_error(parse(), error))
    assert (failed["status"], failed["error"]["code"]) == ("failed", told)
    raised = json.loads(events[2].split("\ndata: ")[1])
    assert (raised["code"], raised["param"], raised["error"]["message"]) == (code, "input", "down")


@pytest.mark.parametrize("late", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_keep_alives_are_events_of_the_response_that_they_precede(late, fails):
    request = parse(stream=True)
    keep_alive = DIALECT.framing(request).keep_alive
    sent = b""
    for _ in range(late):
        sent += keep_alive(request)
        request.kept += 1
    sent += DIALECT.late_error(request, CallError(503, "x", "down")) if fails else DIALECT.render(request, reply(content="x"))
    events = [json.loads(event.split("\ndata: ")[1]) for event in sent.decode().strip().split("\n\n")]
    kinds = [event["type"] for event in events]
    assert kinds[: late + 1] == ["response.created", *["response.in_progress"] * late]
    assert kinds.count("response.created") == 1
    assert kinds[-1] == ("response.failed" if fails else "response.completed")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
