"""Token ids are read as JSON says, whatever their number of digits and however they are written."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.engines.token_ids import KNOWN_SESSIONS, Prompts, token_ids


@given(st.lists(st.integers(0, 2**31 - 1)), st.sampled_from([(",", ":"), (", ", ": "), (",\n", ":")]))
def test_ids_are_what_json_says(ids, separators):
    found = token_ids(json.dumps(ids, separators=separators).encode())
    assert found.tolist() == ids
    assert found.dtype == np.int32


@given(st.lists(st.integers(0, 10**8 - 1), min_size=1))
def test_the_fast_way_and_the_plain_way_agree(ids):
    assert token_ids(json.dumps(ids).encode()).tolist() == ids


@pytest.mark.parametrize(
    "text", ["", "[", "1", "[1,]", "[,1]", "[1,2", "1,2]", "[1.5]", '["1"]', "[1,null]", "[[1]]", "{}", "[2147483648]", "[1 2]"]
)
def test_anything_else_is_refused(text):
    with pytest.raises(msgspec.DecodeError):
        token_ids(text.encode())


def test_negative_ids_are_read_too():
    assert token_ids(b"[-1,2]").tolist() == [-1, 2]


IDS = st.lists(st.integers(0, 999999), max_size=8)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), IDS), max_size=20),
    st.integers(0, 200),
    st.sampled_from([",", ", "]),
)
def test_prompts_of_a_session_are_read_as_if_each_were_its_first(turns, bound, comma):
    """Whatever is extended, replaced or forgotten."""
    prompts = Prompts(bound)
    last: dict[str, list[int]] = {}
    for session, extends, new in turns:
        last[session] = [*last.get(session, []), *new] if extends else new
        text = json.dumps(last[session], separators=(comma, ":")).encode()
        assert prompts.read(session, text).tolist() == last[session]
        assert prompts._bytes <= bound
        assert prompts._bytes == sum(len(known.text) + known.ids.nbytes for known in prompts._known.values())


def test_prompts_of_short_sessions_are_bounded_too():
    """What is kept of one weighs more than its bytes, of which a day of them has few."""
    prompts = Prompts()
    for number in range(KNOWN_SESSIONS + 10):
        assert prompts.read(str(number), b"[1]").tolist() == [1]
    assert list(prompts._known) == [str(number) for number in range(10, KNOWN_SESSIONS + 10)]


def test_an_id_that_goes_on_is_another_one():
    prompts = Prompts()
    assert prompts.read("a", b"[1,2]").tolist() == [1, 2]
    assert prompts.read("a", b"[1,23,4]").tolist() == [1, 23, 4]
    with pytest.raises(msgspec.DecodeError):
        prompts.read("a", b"[1,23,4,]")
    assert prompts.read("a", b"[1,23,4,5]").tolist() == [1, 23, 4, 5]
