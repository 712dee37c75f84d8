"""A capture record comes back exactly as it went in, whatever it is a delta against."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.trace.prefix import (
    HEADS_BYTES,
    Head,
    find_base,
    find_messages_base,
    message_digests,
    pack_head,
    prefix_digests,
    unpack_heads,
)
from evener.trace.record import NO_BASE, Base, CallRecord, decode, decode_all, encode

int32s = st.integers(-(2**31), 2**31 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
documents = st.dictionaries(st.text(), json_values, max_size=4)


@st.composite
def records(draw) -> CallRecord:
    completion = draw(st.lists(int32s, max_size=30))
    logprobs = draw(st.lists(st.floats(-1e4, 0, width=32), min_size=len(completion), max_size=len(completion)))
    versions = draw(st.lists(st.integers(0, 4), min_size=len(completion), max_size=len(completion)))
    return CallRecord(
        call_id=draw(st.text()),
        session_id=draw(st.text()),
        number=draw(st.integers(1, 1000)),
        prompt_ids=np.array(draw(st.lists(int32s, max_size=40)), np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32),
        version_dispatch=draw(st.integers(0, 100)),
        version_completion=draw(st.integers(0, 100)),
        request=draw(documents),
        reply=draw(documents),
        dialect="chat",
        started=draw(st.floats(0, 1e10)),
        ended=draw(st.floats(0, 1e10)),
        delivered=draw(st.sampled_from(["yes", "no", "unknown"])),
        level=draw(st.sampled_from(["tokens", "text"])),
        engine=draw(st.text()),
    )


def assert_same(left: CallRecord, right: CallRecord) -> None:
    for name in CallRecord.__dataclass_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert np.array_equal(a, b)
        else:
            assert a == b, name


@given(records(), st.integers(0, 40), st.data())
def test_round_trip_against_any_base(record, shared, data):
    shared = min(shared, len(record.prompt_ids))
    base = Base(7, shared) if shared else NO_BASE
    tail = np.array(data.draw(st.lists(int32s, max_size=5)), np.int32)
    tokens = {7: np.concatenate((record.prompt_ids[:shared], tail))}
    assert_same(decode(encode(record, base), tokens, record.delivered), record)


@given(records(), st.data())
def test_a_cut_record_is_refused(record, data):
    whole = encode(record)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError):
        decode(whole[:cut], {})


@given(st.lists(st.lists(int32s, min_size=1, max_size=12), min_size=1, max_size=8), st.data())
def test_a_chain_comes_back_whole_and_a_base_is_always_a_true_prefix(turns, data):
    """As the proxy stores them: each call against the heads of the earlier ones, some with an edited history."""
    heads: list[Head] = []
    stored: dict[int, bytes] = {}
    originals: list[CallRecord] = []
    history = np.empty(0, np.int32)
    for number, turn in enumerate(turns, 1):
        if data.draw(st.booleans()):
            history = history[: data.draw(st.integers(0, len(history)))]
        prompt = np.concatenate((history, np.array(turn, np.int32)))
        completion = np.array(turn[::-1], np.int32)
        record = make(number, prompt, completion)
        lengths = [length for head in heads for length in (head.prompt, head.total)]
        digests = prefix_digests(record.tokens, [*lengths, len(prompt), len(record.tokens)])
        base = find_base(heads, {length: digests[length] for length in lengths if length <= len(prompt)})
        if base.number:
            assert np.array_equal(originals[base.number - 1].tokens[: base.shared], prompt[: base.shared])
        stored[number] = encode(record, base)
        heads.append(Head(number, len(prompt), len(record.tokens), 1, digests[len(prompt)], digests[len(record.tokens)], b""))
        originals.append(record)
        history = record.tokens
    for original, decoded in zip(originals, decode_all(stored, {}), strict=True):
        assert_same(original, decoded)


def make(number: int, prompt: np.ndarray, completion: np.ndarray, **fields) -> CallRecord:
    values = {
        "call_id": f"call-{number}",
        "session_id": "s.1",
        "number": number,
        "prompt_ids": prompt.astype(np.int32),
        "completion_ids": completion.astype(np.int32),
        "logprobs": np.full(len(completion), -0.5, np.float32),
        "versions": np.ones(len(completion), np.int32),
        "version_dispatch": 1,
        "version_completion": 1,
        "request": {},
        "reply": {},
        "dialect": "chat",
        "started": 0.0,
        "ended": 1.0,
        "delivered": "unknown",
        "level": "tokens",
        "engine": "http://engine",
    }
    return CallRecord(**(values | fields))


def test_heads_are_64_bytes_and_come_back():
    head = Head(3, 10, 20, 4, b"a" * 16, b"b" * 16, b"c" * 16)
    assert len(pack_head(head)) == 64
    assert HEADS_BYTES % 64 == 0
    assert unpack_heads(pack_head(head) * 3) == [head] * 3


def test_messages_are_told_apart_by_their_bounds():
    known = message_digests([b"ab", b"c"], [1, 2])
    other = message_digests([b"a", b"bc"], [1, 2])
    assert known[2] != other[2]
    head = Head(1, 0, 0, 2, b"", b"", known[2])
    assert find_messages_base([head], message_digests([b"ab", b"c", b"d"], [2])) == Base(1, 2)
    assert find_messages_base([head], message_digests([b"ab", b"x", b"d"], [2])) == NO_BASE


def test_capture_bytes_a_turn():
    """8,000-token prompts, 256-token replies, chained: the token data of a turn is a few KB."""
    rng = np.random.default_rng(0)
    first = make(1, rng.integers(0, 150000, 8000), rng.integers(0, 150000, 256))
    second = make(2, np.concatenate((first.tokens, rng.integers(0, 150000, 50))), rng.integers(0, 150000, 256))
    assert len(encode(second, Base(1, len(first.tokens)))) < 2600
