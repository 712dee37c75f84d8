"""Gemini without a proxy: what a request becomes, what a reply looks like, and what comes back of it."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.engines.sampler import Sample, ToolCall
from evener_proxy.canonical import CallError, CallRequest, Reply, mint_reply
from evener_proxy.dialects.gemini import GeminiDialect, GeminiRequest
from evener_proxy.messages import assistant_message
from tests.unit.proxy.dialects.mutation import mutated

GOLDEN = Path(__file__).parent / "golden" / "gemini"
REQUESTS = sorted(path.parent.name for path in GOLDEN.glob("*/request.json"))
REPLIES = sorted(path.parent.name for path in GOLDEN.glob("*/sampled.json"))
DOCUMENT = "/v1beta/models/tiny:generateContent"
EVENTS = "/v1beta/models/tiny:streamGenerateContent?alt=sse"
ARRAY = "/v1beta/models/tiny:streamGenerateContent"
A, B = "call_" + 24 * "a", "call_" + 24 * "b"
dialect = GeminiDialect()


def parse(body: dict[str, Any], target: str = DOCUMENT) -> GeminiRequest:
    return dialect.parse(json.dumps(body).encode(), target)


def history(*contents: Any) -> list[dict[str, Any]]:
    """The canonical messages of these contents."""
    return [json.loads(bytes(message)) for message in parse({"contents": list(contents)}).messages]


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, **fields}}


def result(name: str | None, output: str, **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"output": output}, **fields}}


def plain(request: CallRequest) -> dict[str, Any]:
    """A request as JSON, without what is not there."""
    fields = {name: getattr(request, name) for name in (*CallRequest.__slots__, *GeminiRequest.__slots__) if name != "kept"}
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


def rendered(answer: Reply, target: str, **config: Any) -> bytes:
    return dialect.render(parse({"contents": "hi", "generationConfig": config}, target), answer)


def chunks(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(frame.removeprefix("data: ")) for frame in stream.decode().removesuffix("\r\n\r\n").split("\r\n\r\n")]


def parts_of(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for document in documents for part in document["candidates"][0]["content"]["parts"]]


@pytest.mark.parametrize("case", REQUESTS)
def test_golden_requests(case):
    request = dialect.parse((GOLDEN / case / "request.json").read_bytes(), DOCUMENT)
    assert plain(request) == json.loads((GOLDEN / case / "canonical.json").read_text())


@pytest.mark.parametrize("case", REPLIES)
def test_golden_replies(case):
    answer = msgspec.json.decode((GOLDEN / case / "sampled.json").read_bytes(), type=Reply)
    stream = rendered(answer, EVENTS)
    assert stream.replace(b"\r\n", b"\n") == (GOLDEN / case / "stream.txt").read_bytes()
    document = json.loads(rendered(answer, DOCUMENT))
    assert document == json.loads((GOLDEN / case / "reply.json").read_text())
    assert json.loads(rendered(answer, ARRAY)) == chunks(stream)
    assert parts_of(chunks(stream)) == parts_of([document])
    assert [key for chunk in chunks(stream) for key in chunk["candidates"][0] if key == "finishReason"] == ["finishReason"]
    assert chunks(stream)[-1]["usageMetadata"] == document["usageMetadata"]


def test_a_late_error_is_the_bare_envelope_and_in_an_array_its_only_element():
    error = CallError(503, "engine_unavailable", "gone", retry_after=5)
    for target in (DOCUMENT, EVENTS):
        assert dialect.late_error(parse({"contents": "hi"}, target), error) == dialect.error(error)
    assert json.loads(dialect.late_error(parse({"contents": "hi"}, ARRAY), error)) == [json.loads(dialect.error(error))]


@pytest.mark.parametrize(
    ("target", "name", "stream", "sse"),
    [
        ("/v1beta/models/tiny:generateContent", "tiny", False, False),
        ("/v1/models/org/tiny:1:streamGenerateContent?alt=sse", "org/tiny:1", True, True),
        ("/v1beta/models/models/x:streamGenerateContent?key=a:b&alt=sse", "models/x", True, True),
        ("/v1beta/models/tiny:streamGenerateContent?alt=json", "tiny", True, False),
    ],
)
def test_model_and_method_are_read_from_the_target(target, name, stream, sse):
    request = parse({"contents": "hi"}, target)
    assert (request.model, request.stream, request.sse) == (name, stream, sse)
    assert (dialect.framing(request).content_type == b"text/event-stream") == sse


def test_keep_alives_are_chunks_that_say_nothing():
    (chunk,) = chunks(dialect.framing(parse({"contents": "hi"}, EVENTS)).keep_alive)
    assert parts_of([chunk]) == [{"text": ""}]
    assert "finishReason" not in chunk["candidates"][0]


def test_results_follow_their_calls_by_id_else_by_name_else_by_order():
    calls = model(call("a", id="x"), call("b"), call("a"), call("c"))
    results = user(result("c", "3"), result("zz", "2"), result("a", "1"), result(None, "0", id="x"))
    messages = history(user({"text": "hi"}), calls, results)
    ids = [each["id"] for each in messages[1]["tool_calls"]]
    assert ids[0] == "x"
    assert len(set(ids)) == 4
    answered = {message["tool_call_id"]: message["content"] for message in messages[2:]}
    assert answered == {ids[0]: "0", ids[1]: "2", ids[2]: "1", ids[3]: "3"}
    assert [message["content"] for message in messages[2:]] == ["3", "2", "1", "0"]


def test_calls_that_share_an_id_stay_apart():
    messages = history(
        user(), model(call("a", id="x"), call("a", id="x")), user(result("a", "1", id="x"), result("a", "2", id="x"))
    )
    first, second = (each["id"] for each in messages[1]["tool_calls"])
    assert first != second
    assert [message["tool_call_id"] for message in messages[2:]] == [first, second]


def test_a_late_result_follows_its_own_turn():
    turns = [user(), model(call("a", id="x")), user({"text": "wait"}), model(call("a", id="y"))]
    messages = history(*turns, user(result("a", "old", id="x"), result("a", "new", id="y")))
    assert [(message["tool_call_id"], message["content"]) for message in messages[-2:]] == [("x", "old"), ("y", "new")]


def test_calls_in_contents_of_their_own_have_their_results():
    messages = history(user(), model(call("a")), model(call("b")), user(result("a", "1")), user(result("b", "2")))
    asked = [each["id"] for each in messages[1]["tool_calls"]]
    assert asked == [message["tool_call_id"] for message in messages[2:]]


def echo(answer: Reply, *, drop: str) -> list[dict[str, Any]]:
    """The parts of a reply, without ids (but for signatures), or without signatures, or without both."""
    parts = parts_of([json.loads(rendered(answer, DOCUMENT))])
    for part in parts:
        if "signatures" in drop:
            part.pop("thoughtSignature", None)
        if "ids" in drop and "functionCall" in part:
            del part["functionCall"]["id"]
    return parts


def sampled(content: str | None, *names: str) -> Reply:
    """A reply as it is minted."""
    calls = [ToolCall("engine's own", name, "{}") for name in names]
    ids = np.empty(0, np.int32)
    sample = Sample(
        level="text",
        prompt_ids=ids,
        completion_ids=ids,
        logprobs=np.empty(0, np.float32),
        versions=None,
        content=content,
        reasoning="hm",
        tool_calls=calls,
        finish_reason="tool_calls",
        stop_reason=None,
        prompt_tokens=1,
        completion_tokens=1,
    )
    return mint_reply(sample, dialect.call_prefix)


@pytest.mark.parametrize("drop", ["nothing", "ids", "signatures"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_one_reply_whose_calls_come_back_apart_is_one_turn_with_its_results(drop, interleaved):
    answer = sampled("look", "a", "b", "a")
    parts = echo(answer, drop=drop)
    ids = [None] * 3 if drop == "ids" else [each.id for each in answer.tool_calls]
    results = [result(each.name, str(n), **({"id": ids[n]} if ids[n] else {})) for n, each in enumerate(answer.tool_calls)]
    calls = [model(part) for part in parts[2:]]
    if interleaved:
        after = [content for pair in zip(calls, map(user, results), strict=True) for content in pair]
    else:
        after = [*calls, *map(user, results)]
    following = sampled("next", "b")
    messages = history(
        user({"text": "hi"}), model(*parts[:2]), *after, model(*echo(following, drop=drop)), user(result("b", "last"))
    )
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "tool", "assistant", "tool"]
    turn = messages[1]
    assert (turn["content"], turn["reasoning"]) == ("look", "hm")
    assert [each["function"]["name"] for each in turn["tool_calls"]] == ["a", "b", "a"]
    assert [each["id"] for each in turn["tool_calls"]] == [message["tool_call_id"] for message in messages[2:5]]
    assert [message["content"] for message in messages[2:5]] == ["0", "1", "2"]
    assert messages[6]["tool_call_id"] == messages[5]["tool_calls"][0]["id"]


def test_where_nothing_minted_came_back_a_result_ends_the_turn():
    parts = echo(sampled(None, "a", "b"), drop="ids signatures")
    thought, first, second = (model(part) for part in parts)
    together = history(user(), thought, first, second, user(result("a", "1")), user(result("b", "2")))
    assert [message["role"] for message in together] == ["user", "assistant", "tool", "tool"]
    apart = history(user(), thought, first, user(result("a", "1")), second, user(result("b", "2")))
    assert [message["role"] for message in apart] == ["user", "assistant", "tool", "assistant", "tool"]


def test_a_word_of_the_user_ends_the_turn_whatever_follows():
    _, first, second = echo(sampled(None, "a", "b"), drop="nothing")
    messages = history(user(), model(first), user(result("a", "1"), {"text": "wait"}), model(second), user(result("b", "2")))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user", "assistant", "tool"]


def test_a_repeated_id_is_the_nearest_calls_that_waits():
    turns = [model(call("a", id="call_0")), user(result("a", "1", id="call_0"))]
    messages = history(user(), *turns, model({"text": "on"}, call("a", id="call_0")), user(result("a", "2", id="call_0")))
    ids = [each["id"] for message in messages for each in message.get("tool_calls", [])]
    assert len(set(ids)) == 2
    assert [(message["tool_call_id"], message["content"]) for message in messages if message["role"] == "tool"] == [
        (ids[0], "1"),
        (ids[1], "2"),
    ]


def test_a_result_without_a_call_is_kept():
    messages = history(user(result("a", "1", id="x"), result("b", "2")))
    assert [message["content"] for message in messages] == ["1", "2"]
    assert messages[0]["tool_call_id"] == "x"


def test_contents_of_one_reply_are_one_message_and_others_stay_apart():
    answer = reply(content="hm", tool_calls=[ToolCall(A, "a", "{}"), ToolCall(B, "b", "{}")])
    text, first, second = parts_of([json.loads(rendered(answer, DOCUMENT))])
    together = history(user(), model(text, first, second))
    assert history(user(), model(text), model(first), model(second)) == together
    assert history(user(), model({"text": ""}), model(text, first), {"role": "model"}, model(second)) == together
    other = parts_of([json.loads(rendered(reply(id=24 * "f", content="next"), DOCUMENT))])
    assert len(history(user(), model(text, first, second), model(*other))) == 3
    assert len(history(user(), model({"text": "one"}), model({"text": "two"}))) == 3


@pytest.mark.parametrize("parts", [None, [], [{"text": ""}], {"text": ""}, "", [{}], [{"text": None}], [None]])
def test_empty_contents_are_one_thing(parts):
    assert history({"role": "model", "parts": parts}, {"parts": parts}) == history({"role": "model"}, {"role": "user"})


def test_the_text_of_unknown_parts_is_kept():
    unknown = {"novelty": {"text": "new"}, "thoughtSignature": "c2lnbmVk"}
    assert history(user({"text": "a"}, unknown, {"novelty": {}}), model(unknown)) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "new"}]},
        {"role": "assistant", "content": "new"},
    ]


def test_thinking_is_left_out_only_where_it_is_refused():
    answer = reply(content="hi", reasoning="hm")
    shown = rendered(answer, EVENTS, thinkingConfig={"includeThoughts": True})
    assert rendered(answer, EVENTS) == shown
    assert [part["text"] for part in parts_of(chunks(shown))] == ["hm", "hi"]
    hidden = rendered(answer, EVENTS, thinkingConfig={"includeThoughts": False})
    assert [part["text"] for part in parts_of(chunks(hidden))] == ["hi"]


@pytest.mark.parametrize(
    ("fields", "constrained", "sent"),
    [
        ({"toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}}, None, {}),
        ({"toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}}}, None, {}),
        ({"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}}, None, {"tool_choice": "none"}),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "any"}}},
            "toolConfig.functionCallingConfig.mode",
            {"tool_choice": "required"},
        ),
        (
            {"tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["b"]}}},
            "toolConfig.functionCallingConfig.mode",
            {"tool_choice": {"type": "function", "function": {"name": "b"}}},
        ),
        (
            {"generationConfig": {"responseMimeType": "application/json"}},
            "generationConfig.responseMimeType",
            {"response_format": {"type": "json_object"}},
        ),
        (
            {"generationConfig": {"responseJsonSchema": {"type": "array", "minItems": 1}}},
            "generationConfig.responseJsonSchema",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "response", "schema": {"type": "array", "minItems": 1}},
                }
            },
        ),
    ],
)
def test_constrained_decoding_is_named_and_passed_on(fields, constrained, sent):
    request = parse({"contents": "hi", "tools": [{"functionDeclarations": [{"name": "a"}, {"name": "b"}]}], **fields})
    assert request.constrained == constrained
    found = {name: getattr(request, name) for name in ("tool_choice", "response_format")}
    assert {name: json.loads(bytes(value)) for name, value in found.items() if value is not None} == sent
    assert len(json.loads(bytes(request.tools))) == 2


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": [{"role": "assistant", "parts": []}]}, "contents[0].role"),
        ({"contents": [{}, {"parts": [{}, {"text": 1}]}]}, "$.contents[1].parts[1].text"),
        ({"contents": [{"parts": 5}]}, "$.contents[0].parts[0]"),
        ({"contents": [{"parts": [{"functionCall": {"name": "a"}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"role": "model", "parts": [{"functionResponse": {}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": {"inlineData": {"mimeType": "text/plain", "data": "x"}}}]}, "inlineData.data"),
        ({"contents": "hi", "generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"contents": "hi", "generationConfig": {"maxOutputTokens": 2**31}}, "$.generationConfig.maxOutputTokens"),
        ({"contents": "hi", "generation_config": {"seed": "x"}}, "$.generationConfig.seed"),
        ({"contents": "hi", "tools": [{"functionDeclarations": [{}]}]}, "$.tools[0].functionDeclarations[0]"),
        ({"contents": "hi", "tools": [{}, {"functionDeclarations": {"name": 1}}]}, "$.tools[1].functionDeclarations[0].name"),
        ({"contents": "hi", "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig"),
        ({"contents": "hi", "cachedContent": "cachedContents/1"}, "cachedContent"),
    ],
)
def test_a_wrong_request_names_the_field(body, names):
    with pytest.raises(CallError) as raised:
        parse(body)
    assert raised.value.status == 400
    assert names in raised.value.message


def test_errors_are_googles():
    error = json.loads(dialect.error(CallError(429, "slow_down", "later", retry_after=7)))["error"]
    assert (error["code"], error["status"], error["message"]) == (429, "RESOURCE_EXHAUSTED", "later")
    assert error["details"][-1] == {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "7s"}
    statuses = {status: json.loads(dialect.error(CallError(status, "x", "y")))["error"]["status"] for status in (413, 502, 503)}
    assert statuses == {413: "INVALID_ARGUMENT", 502: "INTERNAL", 503: "UNAVAILABLE"}


names = st.text("abz_", min_size=1, max_size=6)
floats = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=6), json_values, max_size=3)
replies = st.builds(
    lambda content, reasoning, calls, finish: reply(
        content=content,
        reasoning=reasoning,
        tool_calls=[
            ToolCall(f"call_{index:024x}", name, msgspec.json.encode(args).decode()) for index, (name, args) in enumerate(calls)
        ],
        finish_reason=finish,
    ),
    st.none() | st.text(max_size=9),
    st.none() | st.text(max_size=9),
    st.lists(st.tuples(names, arguments), max_size=3),
    st.sampled_from(["stop", "length", "tool_calls", "content_filter", "repetition"]),
)


@given(replies, st.data())
def test_an_echoed_reply_is_the_canonical_message_again(answer, data):
    """Whatever of ids, signatures and the bounds of contents an agent drops."""
    expected = bytes(assistant_message(answer.content or None, answer.reasoning or None, answer.tool_calls))
    target = data.draw(st.sampled_from([DOCUMENT, EVENTS, ARRAY]))
    body = rendered(answer, target)
    parts = parts_of(chunks(body) if target == EVENTS else json.loads(body) if target == ARRAY else [json.loads(body)])
    dropped = data.draw(st.sampled_from(["nothing", "ids", "signatures", "prefixed ids", "empty parts added"]))
    for part in parts:
        if dropped == "ids" and "functionCall" in part:
            del part["functionCall"]["id"]
        if dropped == "signatures":
            part.pop("thoughtSignature", None)
        if dropped == "prefixed ids" and "functionCall" in part:
            part["functionCall"]["id"] = part["functionCall"]["name"] + "__" + part["functionCall"]["id"]
    if dropped == "empty parts added":
        parts = [{"text": ""}, *parts, {}]
    split = dropped in ("nothing", "prefixed ids", "empty parts added") and data.draw(st.booleans())
    contents = [model(part) for part in parts] if split else [model(*parts)]
    messages = parse({"contents": [user({"text": "hi"}), *contents, user({"text": "go on"})]}).messages
    assert [bytes(message) for message in messages[1:-1]] == [expected]


some_ids = st.none() | st.sampled_from(["x", "y", A, "a__" + A])
some_parts = st.one_of(
    st.builds(lambda text: {"text": text}, st.sampled_from(["", "hi"])),
    st.builds(lambda name, given: call(name, id=given), st.sampled_from("ab"), some_ids),
)
some_results = st.builds(lambda name, given: result(name, "done", id=given), st.sampled_from("ab"), some_ids)
some_contents = st.one_of(
    st.builds(lambda parts: model(*parts), st.lists(some_parts, max_size=3)),
    st.builds(lambda parts: user(*parts), st.lists(some_results | st.just({"text": "go on"}), max_size=3)),
)


@given(st.lists(some_contents, max_size=5), st.lists(some_contents, max_size=4))
def test_a_history_that_goes_on_keeps_its_messages(before, after):
    shorter = history(*before, user({"text": "hi"}))
    longer = history(*before, user({"text": "hi"}), *after)
    assert longer[: len(shorter)] == shorter
    ids = [each["id"] for message in longer for each in message.get("tool_calls", [])]
    assert len(set(ids)) == len(ids)


@given(replies)
def test_without_ids_and_signatures_only_the_ids_differ(answer):
    parts = parts_of([json.loads(rendered(answer, DOCUMENT))])
    bare = [{key: value for key, value in part.items() if key != "thoughtSignature"} for part in parts]
    for part in bare:
        if "functionCall" in part:
            part["functionCall"] = {key: value for key, value in part["functionCall"].items() if key != "id"}
    results = user(*(result(each.name, str(index)) for index, each in enumerate(answer.tool_calls)))
    messages = history(user({"text": "hi"}), model(*bare), results)
    ids = [each["id"] for each in messages[1].get("tool_calls", [])]
    assert len(set(ids)) == len(answer.tool_calls)
    assert sorted(ids) == sorted(message["tool_call_id"] for message in messages[2:] if message["role"] == "tool")
    renamed = [ToolCall(call_id, each.name, each.arguments) for call_id, each in zip(ids, answer.tool_calls, strict=True)]
    expected = assistant_message(answer.content or None, answer.reasoning or None, renamed)
    assert messages[1] == json.loads(bytes(expected))


def test_ten_thousand_wrong_requests_are_400_or_rendered():
    rng = random.Random(0)
    bodies = [(GOLDEN / case / "request.json").read_bytes() for case in REQUESTS]
    answers = [msgspec.json.decode((GOLDEN / case / "sampled.json").read_bytes(), type=Reply) for case in REPLIES]
    statuses: list[int] = []
    for _ in range(10_000):
        body, target = mutated(rng.choice(bodies), rng), rng.choice([DOCUMENT, EVENTS, ARRAY])
        try:
            request = dialect.parse(body, target)
        except CallError as error:
            statuses.append(error.status)
            json.loads(dialect.error(error))
            continue
        msgspec.msgpack.encode(request.asked)
        for answer in rng.sample(answers, 2):
            dialect.render(request, answer)
    assert set(statuses) == {400}
    assert 500 < len(statuses) < 8_000
