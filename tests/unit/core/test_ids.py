import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.ids import new_id, parse_session_id, session_id


def test_ids_are_uuid7_and_sort_by_time():
    made = [new_id() for _ in range(200)]
    assert all(uuid.UUID(i).version == 7 and uuid.UUID(i).variant == uuid.RFC_4122 for i in made)
    assert len(set(made)) == 200
    stamps = [i[:13] for i in made]
    assert stamps == sorted(stamps)


@given(st.integers(1, 999_999))
def test_session_id_round_trip(attempt: int):
    rollout = new_id()
    assert parse_session_id(session_id(rollout, attempt)) == (rollout, attempt)


ROLLOUT = "01a22a40-400e-731b-89db-6ae093faca2a"


@pytest.mark.parametrize("text", ["", "x.1", f"{ROLLOUT}", f"{ROLLOUT}.0", f"{ROLLOUT}.-1", f"{ROLLOUT}.1x", f" {ROLLOUT}.1"])
def test_what_is_no_session_is_refused(text: str):
    with pytest.raises(ValueError, match="is not a session id"):
        parse_session_id(text)
