"""What is delivered comes back as the turn that it was, whatever an agent drops; and no body at all makes the dialect fail."""

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.engines.sampler import ToolCall
from evener_proxy.canonical import CallError, Reply
from evener_proxy.dialects.responses import ResponsesDialect
from evener_proxy.messages import assistant_message
from tests.unit.proxy.dialects.test_responses import GOLDEN, request_of

DIALECT = ResponsesDialect()
TOOLS = [
    {"type": "function", "name": "bash"},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
    {"type": "custom", "name": "patch"},
]
FUZZED = 10_000

texts = st.text(st.characters(codec="utf-8"), max_size=9)
functions = st.tuples(st.sampled_from(["bash", "agents__spawn", "unknown"]), texts)
customs = st.tuples(st.just("patch"), texts.map(lambda text: msgspec.json.encode({"input": text}).decode()))
replies = st.builds(
    Reply,
    id=st.integers(0, 2**96 - 1).map("{:024x}".format),
    created=st.integers(0, 2**31),
    content=st.none() | texts,
    reasoning=st.none() | texts,
    tool_calls=st.lists(functions | customs, max_size=3).map(
        lambda calls: [ToolCall(f"call_{index}", *call) for index, call in enumerate(calls)]
    ),
    finish_reason=st.sampled_from(["stop", "length", "tool_calls", "repetition", "content_filter"]),
    stop_reason=st.none(),
    prompt_tokens=st.integers(0, 9),
    completion_tokens=st.integers(0, 9),
)


def canonical(reply: Reply) -> bytes:
    """The assistant message of a reply."""
    text = reply.content or (None if reply.tool_calls else "")
    return bytes(assistant_message(text, reply.reasoning or None, reply.tool_calls))


def delivered(reply: Reply, *, stream: bool) -> list[dict[str, Any]]:
    """The output items that an agent gets."""
    request = DIALECT.parse(json.dumps({"model": "m", "input": "hi", "tools": TOOLS, "stream": stream}).encode(), "")
    body = DIALECT.render(request, reply)
    if not stream:
        return json.loads(body)["output"]
    events = [json.loads(event.split(b"\ndata: ")[1]) for event in body.strip().split(b"\n\n")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ends = [event for event in events if event["type"] in ("response.completed", "response.incomplete", "response.failed")]
    assert ends == events[-1:]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == ends[0]["response"]["output"]
    return done


def echoed(item: dict[str, Any], drop: frozenset[str], empty: Any) -> dict[str, Any]:
    """An item as an agent sends it back: without some fields, an empty content in one of its forms."""
    kept = {name: value for name, value in item.items() if name not in drop}
    if item["type"] == "message" and not item["content"][0]["text"]:
        return kept | {"content": empty}
    return kept


@settings(max_examples=80)
@given(
    turns=st.lists(replies, min_size=1, max_size=3, unique_by=lambda reply: reply.id),
    drop=st.frozensets(st.sampled_from(["id", "status", "encrypted_content"])),
    empty=st.sampled_from([None, "", []]),
    stream=st.booleans(),
)
def test_turns_come_back_as_they_were(turns, drop, empty, stream):
    history: list[dict[str, Any]] = []
    expected: list[bytes] = []
    for reply in turns:
        history += [echoed(item, drop, empty) for item in delivered(reply, stream=stream)]
        expected.append(canonical(reply))
        history.append({"role": "user", "content": "go on"})
        expected.append(b'{"role":"user","content":"go on"}')
    request = DIALECT.parse(json.dumps({"model": "m", "input": history, "tools": TOOLS}).encode(), "")
    assert [bytes(message) for message in request.messages] == expected


@settings(max_examples=40)
@given(turns=st.lists(replies, min_size=2, max_size=3, unique_by=lambda reply: reply.id), stream=st.booleans())
def test_turns_with_nothing_between_them_come_back_apart(turns, stream):
    history = [item for reply in turns for item in delivered(reply, stream=stream)]
    request = DIALECT.parse(json.dumps({"model": "m", "input": history, "tools": TOOLS}).encode(), "")
    assert [bytes(message) for message in request.messages] == [canonical(reply) for reply in turns]


@settings(max_examples=40)
@given(reply=replies, extra=st.lists(texts, min_size=1, max_size=3))
def test_a_longer_history_begins_with_the_shorter_one(reply, extra):
    history = [{"role": "user", "content": "hi"}, *delivered(reply, stream=False)]
    shorter = DIALECT.parse(json.dumps({"input": history, "tools": TOOLS}).encode(), "").messages
    history += [{"type": "function_call_output", "call_id": call.id, "output": "ok"} for call in reply.tool_calls]
    history += [{"role": "user", "content": text} for text in extra]
    longer = DIALECT.parse(json.dumps({"input": history, "tools": TOOLS}).encode(), "").messages
    assert [bytes(message) for message in longer[: len(shorter)]] == [bytes(message) for message in shorter]


SEEDS = [(GOLDEN / f"{name}.request.json").read_bytes() for name in ("history", "tools")]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "\udcff",
    "x" * 9,
    [],
    {},
    [[]],
    {"type": 1},
    [{"type": "function"}],
    ["x"],
    {"a": {"b": [1]}},
]


def mutated(document: Any, rng: random.Random) -> Any:
    """The document with one value, somewhere, replaced, removed or put elsewhere."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(document)
    holder, key = rng.choice(places)
    match rng.randrange(3):
        case 0:
            holder[key] = rng.choice(VALUES)
        case 1:
            del holder[key]
        case _:
            other, at = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[at])) if at in other or isinstance(other, list) else None
    return document


def broken(body: bytes, rng: random.Random) -> bytes:
    """The body with a few bytes changed, cut, doubled, or a number out of range."""
    at = rng.randrange(len(body))
    return rng.choice(
        [
            body[:at],
            body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :],
            body[:at] + b"\xff\xfe" + body[at:],
            body[:at] + body[at // 2 :],
            body.replace(b"0.2", rng.choice([b"NaN", b"1e999", b"-Infinity", b"1" * 400]), 1),
            body.replace(b'"low"', rng.choice([b'"\\ud800"', b"[" * 5000, b'{"a":' * 3000 + b"1" + b"}" * 3000]), 1),
            body.replace(b"{", b'{"input": "twice", ', 1),
        ]
    )


def answer(content: str | None, *calls: tuple[str, str], finish: str = "stop") -> Reply:
    return Reply(
        id="a" * 24,
        created=1,
        content=content,
        reasoning="hm",
        tool_calls=[ToolCall(f"call_{index}", *call) for index, call in enumerate(calls)],
        finish_reason=finish,
        stop_reason=None,
        prompt_tokens=1,
        completion_tokens=1,
    )


FEW = [
    answer("text"),
    answer(None, ("bash", "{"), ("apply_patch", '{"input": "x"}'), ("shell", '{"commands": ["x"]}'), finish="length"),
]


def test_no_body_makes_the_dialect_fail():
    rng = random.Random(5)
    parsed = 0
    for _ in range(FUZZED):
        seed = rng.choice(SEEDS)
        if rng.random() < 0.4:
            body = broken(seed, rng)
        else:
            document = json.loads(seed)
            for _ in range(rng.randint(1, 3)):
                document = mutated(document, rng)
            body = json.dumps(document).encode()
        try:
            request = DIALECT.parse(body, "/v1/responses")
        except CallError as error:
            if error.status != 400:
                raise
            continue
        parsed += 1
        for reply in FEW:
            DIALECT.render(request, reply)
    assert parsed > FUZZED // 10


@pytest.mark.parametrize("stream", [False, True])
def test_any_arguments_can_be_rendered(stream):
    request = request_of("tools", stream=stream)
    deep = '{"commands": ["x"], "command": ["x"], "path": "p", "type": "delete_file", "x": ' + "[" * 900 + "]" * 900 + "}"
    huge = '{"commands": ["x"], "command": ["x"], "path": "p", "type": "delete_file", "x": 1' + "0" * 400 + "}"
    for arguments in ("", "null", "[]", "{", deep, huge, '{"input": 3}', '{"commands": "x"}'):
        for name in ("agents__spawn", "agents__tell_2", "apply_patch", "local_shell", "shell", "apply_patch_2", "tool_search"):
            DIALECT.render(request, answer(None, (name, arguments)))
