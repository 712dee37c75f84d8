"""Chat Completions as a person reads it: requests and what they become, replies in both forms, and what comes back of them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.engines.sampler import ToolCall
from evener_proxy.canonical import CallError, CallRequest, Reply
from evener_proxy.dialects.chat import ChatDialect
from evener_proxy.dialects.chat_tools import as_custom

GOLDEN = Path(__file__).parent / "golden" / "chat"
REQUESTS = sorted(path.parent.name for path in GOLDEN.glob("*/request.json"))
REPLIES = sorted(path.parent.name for path in GOLDEN.glob("*/sampled.json"))
dialect = ChatDialect()


def parse(*messages: dict[str, Any], **fields: Any):
    return dialect.parse(json.dumps({"model": "tiny", "messages": [*messages], **fields}).encode(), "")


def plain(request: CallRequest) -> dict[str, Any]:
    """A request as JSON, without what is not there."""
    fields = {name: getattr(request, name) for name in CallRequest.__slots__ if name != "kept"}
    decoded = json.loads(msgspec.json.encode(fields))
    return {name: value for name, value in decoded.items() if value is not None}


def rendered(reply: Reply, *, stream: bool, **fields: Any) -> bytes:
    request = parse({"role": "user", "content": "hi"}, stream=stream, stream_options={"include_usage": True}, **fields)
    return dialect.render(request, reply)


def accumulated(stream: bytes) -> dict[str, Any]:
    """The completion that a client makes of a stream."""
    *datas, done = [line.removeprefix("data: ") for line in stream.decode().split("\n") if line]
    assert done == "[DONE]"
    *chunks, last = [json.loads(data) for data in datas]
    message: dict[str, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert chunk["usage"] is None
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                (call,) = value
                assert call.pop("index") == len(message.setdefault(name, []))
                message[name].append(call)
            else:
                message[name] = message.get(name, "") + value
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes[:-1] == [None] * (len(chunks) - 1)
    assert last["choices"] == []
    return {"message": message, "finish_reason": finishes[-1], "usage": last["usage"]}


@pytest.mark.parametrize("case", REQUESTS)
def test_golden_requests(case):
    request = dialect.parse((GOLDEN / case / "request.json").read_bytes(), "/v1/chat/completions")
    assert plain(request) == json.loads((GOLDEN / case / "canonical.json").read_bytes())


@pytest.mark.parametrize("case", REPLIES)
def test_golden_replies(case):
    sampled = msgspec.json.decode((GOLDEN / case / "sampled.json").read_bytes(), type=Reply)
    listed = GOLDEN / case / "tools.json"
    asked = {"tools": json.loads(listed.read_bytes())} if listed.exists() else {}
    assert json.loads(rendered(sampled, stream=False, **asked)) == json.loads((GOLDEN / case / "reply.json").read_bytes())
    assert rendered(sampled, stream=True, **asked).decode() == (GOLDEN / case / "stream.txt").read_text()


@given(st.text())
def test_the_text_of_a_custom_tool_goes_to_the_model_and_back(text):
    call = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": text}}
    turn = parse({"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}).messages[1]
    function = json.loads(bytes(turn))["tool_calls"][0]["function"]
    assert as_custom(ToolCall("call_1", function["name"], function["arguments"])) == call


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tool_choice": {"type": "custom", "custom": "patch"}}, "tool_choice.custom"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": []}}},
            "tool_choice.allowed_tools",
        ),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}}, "tool_choice"),
    ],
)
def test_a_tool_or_choice_that_says_nothing_is_refused(fields, param):
    with pytest.raises(CallError) as error:
        parse({"role": "user", "content": "hi"}, **fields)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(("mode", "constrained"), [("auto", None), ("required", "tool_choice")])
def test_of_allowed_tools_the_model_sees_only_these(mode, constrained):
    tools = [{"type": "custom", "custom": {"name": "patch"}}]
    tools += [{"type": "function", "function": {"name": name}} for name in ("bash", "read")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools[:2], {"type": "mcp"}]}}
    request = parse({"role": "user", "content": "hi"}, tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in json.loads(bytes(request.tools))] == ["patch", "bash"]
    assert request.tool_choice == (msgspec.Raw(b'"required"') if constrained else None)
    assert request.constrained == constrained


def test_a_choice_of_a_custom_tool_is_one_of_the_function():
    tools = [{"type": "custom", "custom": {"name": "patch"}}]
    request = parse({"role": "user", "content": "hi"}, tools=tools, tool_choice=tools[0])
    assert json.loads(bytes(request.tool_choice)) == {"type": "function", "function": {"name": "patch"}}
    assert request.constrained == "tool_choice"


_said = st.none() | st.text(max_size=20)
_calls = st.lists(st.tuples(st.text(max_size=8), st.text(max_size=12)), max_size=3)


@given(
    content=_said,
    reasoning=_said,
    calls=_calls,
    stream=st.booleans(),
    lost=st.sampled_from(["none", "calls", "results", "all"]),
    backwards=st.booleans(),
)
def test_an_echoed_reply_is_the_message_that_it_was(content, reasoning, calls, stream, lost, backwards):
    """Text, thinking and calls with the model's own arguments; results follow their calls, by id else in order."""
    made = [ToolCall(f"call_{index:024x}", name, arguments) for index, (name, arguments) in enumerate(calls)]
    reply = Reply(
        id="0" * 24,
        created=1,
        content=content,
        reasoning=reasoning,
        tool_calls=made,
        finish_reason="tool_calls" if made else "stop",
        stop_reason=None,
        prompt_tokens=3,
        completion_tokens=2,
    )
    document = json.loads(rendered(reply, stream=False))
    turn = document["choices"][0]["message"]
    if stream:
        whole = accumulated(rendered(reply, stream=True))
        assert (whole["finish_reason"], whole["usage"]) == (document["choices"][0]["finish_reason"], document["usage"])
        turn = whole["message"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": call.id} for call in made]
    if backwards and lost == "none":
        results.reverse()
    for each in turn.get("tool_calls", ()) if lost in ("calls", "all") else ():
        del each["id"]
    for each in results if lost in ("results", "all") else ():
        del each["tool_call_id"]
    _, back, *answers = [json.loads(bytes(each)) for each in parse({"role": "user", "content": "hi"}, turn, *results).messages]
    assert (back.get("content") or "", back.get("reasoning") or "") == (content or "", reasoning or "")
    got = [(call["function"]["name"], call["function"]["arguments"]) for call in back.get("tool_calls", ())]
    assert got == calls
    ids = [call["id"] for call in back.get("tool_calls", ())]
    assert len(set(ids)) == len(made)
    paired = {answer["tool_call_id"]: answer["content"] for answer in answers}
    assert paired == {mine: call.id for mine, call in zip(ids, made, strict=True)}
