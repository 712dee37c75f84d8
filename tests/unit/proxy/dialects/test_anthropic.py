"""Anthropic's Messages without a proxy: what a request becomes, what a reply looks like, and what comes back of it."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.engines.sampler import ToolCall
from evener_proxy.canonical import CallError, CallRequest, Reply
from evener_proxy.dialects.anthropic import AnthropicDialect
from evener_proxy.messages import assistant_message
from tests.unit.proxy.dialects.mutation import mutated

GOLDEN = Path(__file__).parent / "golden" / "anthropic"
REQUESTS = sorted(path.parent.name for path in GOLDEN.glob("*/request.json"))
REPLIES = sorted(path.parent.name for path in GOLDEN.glob("*/sampled.json"))
dialect = AnthropicDialect()


def parse(body: dict[str, Any]) -> CallRequest:
    return dialect.parse(json.dumps(body).encode(), "/v1/messages")


def history(*turns: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The canonical messages of these turns."""
    request = parse({"model": "tiny", "max_tokens": 10, "messages": list(turns), **fields})
    return [json.loads(bytes(message)) for message in request.messages]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def plain(request: CallRequest) -> dict[str, Any]:
    """A request as JSON, without what is not there."""
    fields = {name: getattr(request, name) for name in CallRequest.__slots__ if name != "kept"}
    decoded = json.loads(msgspec.json.encode(fields))
    return {name: value for name, value in decoded.items() if value is not None}


def reply(**fields: Any) -> Reply:
    values: dict[str, Any] = {
        "id": "0123456789abcdef01234567",
        "created": 1,
        "content": None,
        "reasoning": None,
        "tool_calls": [],
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_tokens": 20,
        "completion_tokens": 5,
    }
    return Reply(**(values | fields))


def events(stream: bytes) -> list[dict[str, Any]]:
    """The data of each event of a stream, whose name they repeat."""
    found: list[dict[str, Any]] = []
    for frame in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


def accumulated(stream: bytes) -> dict[str, Any]:
    """The message that a client makes of a stream."""
    (opened, *middle, delta, stopped) = events(stream)
    assert (opened["type"], delta["type"], stopped["type"]) == ("message_start", "message_delta", "message_stop")
    message = opened["message"]
    texts = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    partial: dict[int, str] = {}
    for event in middle:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, added = message["content"][event["index"]], event["delta"]
            if added["type"] == "input_json_delta":
                partial[event["index"]] = partial.get(event["index"], "") + added["partial_json"]
            else:
                block[texts[added["type"]]] += added[texts[added["type"]]]
        else:
            assert event == {"type": "content_block_stop", "index": len(message["content"]) - 1}
    for index, text in partial.items():
        message["content"][index]["input"] = json.loads(text)
    message["usage"] |= delta["usage"]
    return message | delta["delta"]


@pytest.mark.parametrize("case", REQUESTS)
def test_golden_requests(case):
    request = dialect.parse((GOLDEN / case / "request.json").read_bytes(), "/v1/messages?beta=true")
    assert plain(request) == json.loads((GOLDEN / case / "canonical.json").read_bytes())


@pytest.mark.parametrize("case", REPLIES)
def test_golden_replies(case):
    sampled = msgspec.json.decode((GOLDEN / case / "sampled.json").read_bytes(), type=Reply)
    request = {"model": "tiny", "max_tokens": 10, "messages": [user("hi")], "stop_sequences": ["DONE"]}
    assert json.loads(dialect.render(parse(request), sampled)) == json.loads((GOLDEN / case / "reply.json").read_bytes())
    assert dialect.render(parse(request | {"stream": True}), sampled).decode() == (GOLDEN / case / "stream.txt").read_text()


@pytest.mark.parametrize("empty", [None, "", [], [{"type": "text", "text": ""}], ...])
def test_empty_contents_are_one(empty):
    turn = {} if empty is ... else {"content": empty}
    call = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", **turn}
    assert history({"role": "user", **turn}) == [user("")]
    assert history(user("a"), {"role": "assistant", **turn}, user("b"))[1] == {"role": "assistant", "content": ""}
    assert history(user("a"), {"role": "assistant", "content": [call]}, user([result]))[2:] == [
        {"role": "tool", "tool_call_id": "toolu_1", "content": ""}
    ]
    assert history(user("a"), {"role": "system", **turn}) == history(user("a")), "what says nothing is no instruction"
    assert history(user("a"), **({} if empty is ... else {"system": empty})) == [user("a")]


def test_leading_system_messages_are_counted_and_later_ones_keep_their_place():
    system = {"role": "system", "content": "s"}
    body = {"model": "tiny", "max_tokens": 1, "system": "top", "messages": [system, user("a"), system, user("b")]}
    request = parse(body)
    assert request.systems == 2
    assert [json.loads(bytes(message))["role"] for message in request.messages] == [
        "system",
        "system",
        "user",
        "system",
        "user",
    ]


def test_adjacent_assistant_turns_are_one_message():
    call = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"a": 1}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    split = [{"role": "assistant", "content": [block]} for block in (thinking, {"type": "text", "text": "t"}, call)]
    whole = {"role": "assistant", "content": [thinking, {"type": "text", "text": "t"}, call]}
    assert history(user("a"), *split, user("b")) == history(user("a"), whole, user("b"))
    assert len(history(user("a"), whole, user("b"))) == 3


def test_calls_without_ids_are_told_apart_and_paired_in_order():
    calls = [{"type": "tool_use", "name": "ls", "input": {"n": n}} for n in range(2)]
    results = [{"type": "tool_result", "content": str(n)} for n in range(2)]
    turns = [user("a"), {"role": "assistant", "content": calls}, user(results)]
    messages = history(*turns, turns[1], turns[2])
    called = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert len(set(called)) == 4
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == called
    assert messages[:4] == history(*turns)


def test_a_result_without_an_id_answers_the_call_that_is_left():
    calls = [{"type": "tool_use", "id": each, "name": "ls", "input": {}} for each in ("toolu_1", "toolu_2")]
    results = [{"type": "tool_result", "tool_use_id": "toolu_1"}, {"type": "tool_result"}]
    messages = history(user("a"), {"role": "assistant", "content": calls}, user(results))
    assert [message["tool_call_id"] for message in messages[2:]] == ["toolu_1", "toolu_2"]


def test_a_repeated_id_is_the_nearest_calls_that_waits():
    def calls(*ids):
        return {"role": "assistant", "content": [{"type": "tool_use", "id": each, "name": "ls", "input": {}} for each in ids]}

    def results(*texts):
        return user([{"type": "tool_result", "tool_use_id": "call_0", "content": text} for text in texts])

    messages = history(user("a"), calls("call_0", "call_0"), results("1", "2"), calls("call_0"), results("3"))
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert ids == ["call_0", "call_0_2", "call_0"]
    answered = [(message["tool_call_id"], message["content"]) for message in messages if message["role"] == "tool"]
    assert answered == list(zip(ids, "123", strict=True))


@pytest.mark.parametrize(
    ("content", "said"),
    [("no such file", "Error: no such file"), ("Error: gone", "Error: gone"), (None, "Error")],
)
def test_a_failed_tool_says_so(content, said):
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, "is_error": True}
    assert history(user([result]))[0]["content"] == said


@pytest.mark.parametrize(
    ("tool", "field"),
    [({"type": "any"}, "tool_choice"), ({"type": "tool", "name": "ls"}, "tool_choice"), ({"type": "auto"}, None)],
)
def test_forced_tool_choices_are_constrained(tool, field):
    tools = [{"name": "ls", "input_schema": {"type": "object"}}]
    body = {"model": "tiny", "max_tokens": 1, "messages": [user("a")], "tools": tools, "tool_choice": tool}
    request = parse(body)
    assert request.constrained == field
    assert request.parallel_tool_calls is None
    choice = parse(body | {"tool_choice": tool | {"disable_parallel_tool_use": True}})
    assert choice.parallel_tool_calls is False


@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_structured_output_is_constrained(field):
    wanted: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object"}}
    asked = wanted if field == "output_format" else {"effort": "low", "format": wanted}
    request = parse({"model": "tiny", "max_tokens": 1, "messages": [user("a")], field: asked})
    assert request.constrained is not None
    assert request.constrained.startswith(field)
    assert request.response_format is not None
    assert json.loads(bytes(request.response_format))["json_schema"]["schema"] == {"type": "object"}
    assert parse({"model": "tiny", "max_tokens": 1, "messages": [user("a")], "output_config": {}}).constrained is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [user(["x"])]}, "messages.0.content.0"),
        ({"messages": [user([{"type": "text", "text": 1}])]}, "messages.0.content.0.text"),
        ({"messages": [user([{"type": "image"}])]}, "messages.0.content.0.source"),
        ({"messages": [user([{"type": "tool_result", "content": [3]}])]}, "messages.0.content.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]}, "messages.0.content.0.name"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x", "input": 1}]}]}, "content.0.input"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "9"}, "$.max_tokens"),
        ({"temperature": [1]}, "$.temperature"),
        ({"stop_sequences": ["x", " "]}, "stop_sequences.1"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "x", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "y"}}, "tool_choice.name"),
        ({"tools": [{"name": "x", "input_schema": {}}], "tool_choice": {"type": "most"}}, "tool_choice.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"system": 7}, "system"),
    ],
)
def test_a_wrong_body_is_told_which_field(change, field):
    with pytest.raises(CallError) as error:
        parse({"model": "tiny", "max_tokens": 1, "messages": [user("a")], **change})
    assert error.value.status == 400
    assert field in error.value.message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"finish_reason": "stop"}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": 7}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": "DONE"}, ("stop_sequence", "DONE")),
        ({"finish_reason": "stop", "stop_reason": "other"}, ("end_turn", None)),
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "content_filter"}, ("refusal", None)),
        ({"finish_reason": "repetition"}, ("end_turn", None)),
        ({"finish_reason": "tool_calls", "tool_calls": [ToolCall("toolu_1", "ls", "{}")]}, ("tool_use", None)),
        ({"finish_reason": "stop", "tool_calls": [ToolCall("toolu_1", "ls", "{}")]}, ("tool_use", None)),
        ({"finish_reason": "length", "tool_calls": [ToolCall("toolu_1", "ls", "{")]}, ("max_tokens", None)),
    ],
)
def test_stop_reasons_in_both_modes(fields, expected):
    request = {"model": "tiny", "max_tokens": 10, "messages": [user("hi")], "stop_sequences": ["DONE"]}
    document = json.loads(dialect.render(parse(request), reply(**fields)))
    streamed = accumulated(dialect.render(parse(request | {"stream": True}), reply(**fields)))
    assert (document["stop_reason"], document["stop_sequence"]) == expected
    assert streamed == document


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ('{"a": ', {"INVALID_JSON": '{"a": '}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": "\\ud800"}', {"INVALID_JSON": '{"a": "\\ud800"}'}),
        ('{"a":' * 5000, {"INVALID_JSON": '{"a":' * 5000}),
    ],
)
def test_arguments_that_are_no_object_are_held_by_one(arguments, given):
    sampled = reply(tool_calls=[ToolCall("toolu_1", "ls", arguments)], finish_reason="tool_calls")
    request = {"model": "tiny", "max_tokens": 10, "messages": [user("hi")]}
    document = json.loads(dialect.render(parse(request), sampled))
    assert document["content"][0]["input"] == given
    assert accumulated(dialect.render(parse(request | {"stream": True}), sampled)) == document


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_spacing = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")])
_objects = st.builds(
    lambda value, spacing: json.dumps(value, separators=spacing),
    st.dictionaries(st.text(max_size=5), _json, max_size=3),
    _spacing,
)
_calls = st.lists(st.tuples(st.text(max_size=8), _objects | st.text(max_size=8)), max_size=3)
_said = st.none() | st.text(max_size=20)


def echoed(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The turn as some agent sends it again: without what it has no use for, and marked for the vendor's cache."""
    blocks: list[dict[str, Any]] = []
    for block in message["content"]:
        kept = dict(block)
        if rng.random() < 0.5:
            kept.pop("signature", None)
        if rng.random() < 0.5:
            kept["cache_control"] = {"type": "ephemeral"}
        cut = rng.randrange(len(kept.get("text", "")) + 1)
        if kept["type"] == "text" and rng.random() < 0.5:
            blocks += [kept | {"text": kept["text"][:cut]}, kept | {"text": kept["text"][cut:]}]
        else:
            blocks.append(kept)
    turn: dict[str, Any] = {"role": "assistant", "content": blocks}
    if [block["type"] for block in blocks] == ["text"]:
        turn["content"] = rng.choice([blocks, blocks[0]["text"]])
    elif not blocks:
        turn = rng.choice([turn, {"role": "assistant"}, turn | {"content": None}, turn | {"content": ""}])
    return turn


@given(content=_said, reasoning=_said, calls=_calls, stream=st.booleans(), drop_ids=st.booleans(), rng=st.randoms())
def test_an_echoed_reply_is_the_message_that_it_was(content, reasoning, calls, stream, drop_ids, rng):
    made = [ToolCall(f"toolu_{index:024x}", name, arguments) for index, (name, arguments) in enumerate(calls, 1)]
    sampled = reply(content=content, reasoning=reasoning, tool_calls=made)
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 10, "messages": [user("hi")], "stream": stream}
    rendered = dialect.render(parse(body), sampled)
    message = accumulated(rendered) if stream else json.loads(rendered)
    turn = echoed(message, rng)
    if drop_ids:
        for block in turn.get("content") or ():
            if isinstance(block, dict):
                block.pop("id", None)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "r"} for call in made]
    if drop_ids:
        results = [{"type": "tool_result", "content": "r"} for _ in made]
    request = parse(body | {"messages": [user("hi"), turn, user(results or "go on")]})
    expected = [ToolCall(call.id, call.name, _normal(call.arguments)) for call in made]
    text = content or (None if made else "")
    assert bytes(request.messages[1]) == bytes(assistant_message(text, reasoning or None, expected))
    answered = [json.loads(bytes(each)).get("tool_call_id") for each in request.messages[2:]]
    assert answered == ([call.id for call in made] or [None])


def _normal(arguments: str) -> str:
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        value = None
    if not isinstance(value, dict):
        value = {"INVALID_JSON": arguments} if arguments.strip() else {}
    return msgspec.json.encode(value).decode()


def test_whatever_the_bytes_are_the_answer_is_a_request_or_a_400():
    rng = random.Random(20)
    seeds = [(GOLDEN / case / "request.json").read_bytes() for case in REQUESTS]
    replies = [msgspec.json.decode((GOLDEN / case / "sampled.json").read_bytes(), type=Reply) for case in REPLIES]
    taken, refused = 0, set[int]()
    for _ in range(10_000):
        body = mutated(rng.choice(seeds), rng)
        try:
            request = dialect.parse(body, "/v1/messages")
        except CallError as error:
            refused.add(error.status)
            continue
        taken += 1
        for message in request.messages:
            assert json.loads(bytes(message))["role"] in ("system", "user", "assistant", "tool")
        for request.stream in (False, True):
            rendered = dialect.render(request, rng.choice(replies))
            assert (accumulated(rendered) if request.stream else json.loads(rendered))["role"] == "assistant"
    assert refused == {400}
    assert 1000 < taken < 9000
