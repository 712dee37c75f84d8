"""Token ids are read as JSON says, whatever their number of digits and however they are written."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.engines.token_ids import token_ids


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
