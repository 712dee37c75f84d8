import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import TaskError
from evener_verifier import reward


def cause(json, text):
    with pytest.raises(TaskError) as caught:
        reward.parse(json, text, {})
    return caught.value.cause


@pytest.mark.parametrize("text", [b"1", b"0.5\n", b" 0 ", b"1e-3"])
def test_text(text):
    assert reward.parse(None, text, {}) == {"reward": float(text)}


def test_json_outranks_text_and_names_scores():
    assert reward.parse(b'{"reward": 1, "style": 0.25}', b"0", {}) == {"reward": 1.0, "style": 0.25}


def test_nothing_is_missing():
    assert cause(None, None) == "reward_missing"
    assert cause(b'{"style": 1}', b"1") == "reward_missing"


@pytest.mark.parametrize("text", [b"", b"yes", b"nan", b"inf", b"-0.1", b"1.01", b"1000000", b"\xff"])
def test_invalid_text(text):
    assert cause(None, text) == "reward_invalid"


@pytest.mark.parametrize(
    "json",
    [
        b"",
        b"1",
        b"[1]",
        b"{",
        b'{"reward": "1"}',
        b'{"reward": true}',
        b'{"reward": null}',
        b'{"reward": 2}',
        b'{"reward": NaN}',
        b'{"reward": 1, "style": -1}',
        b'{"reward": {"a": 1}}',
        b'{"reward": 1e999}',
    ],
)
def test_invalid_json(json):
    assert cause(json, b"1") == "reward_invalid"


@given(st.none() | st.binary(max_size=40), st.none() | st.binary(max_size=40))
def test_whatever_is_written_is_a_score_in_range_or_the_authors_fault(json, text):
    try:
        scores = reward.parse(json, text, {})
    except TaskError:
        return
    assert all(0 <= value <= 1 for value in scores.values())


def test_a_range_of_the_tasks_own_is_mapped():
    ranges = {"reward": (-10.0, 10.0), "speed": (0.0, 100.0)}
    assert reward.parse(b'{"reward": 5, "speed": 20, "style": 1}', None, ranges) == {"reward": 0.75, "speed": 0.2, "style": 1}
    assert reward.parse(None, b"-10", ranges) == {"reward": 0.0}
    for text in (b"11", b"nan", b"inf"):
        with pytest.raises(TaskError, match="not in \\[-10, 10\\]"):
            reward.parse(None, text, ranges)


def test_names_are_bounded():
    many = {"reward": 1} | {f"score-{number}": 0 for number in range(reward.MAX_NAMES)}
    for scores in (many, {"reward": 1, "": 0}, {"reward": 1, "x" * 65: 0}):
        assert cause(msgspec.json.encode(scores), None) == "reward_invalid"
