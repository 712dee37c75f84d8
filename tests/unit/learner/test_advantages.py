import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener_learner.advantages import advantages

rewards = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 1.1]), min_size=2, max_size=64)


def test_two_of_four_solved() -> None:
    assert advantages([1, 0, 1, 0]) == pytest.approx([1, -1, 1, -1])


@given(rewards)
def test_they_are_centred_and_of_unit_scale(values: list[float]) -> None:
    result = np.asarray(advantages(values))
    assert result.mean() == pytest.approx(0, abs=1e-6)
    if len(set(values)) > 1:
        assert result.std() == pytest.approx(1, abs=1e-6)


@given(rewards, st.floats(-5, 5))
def test_a_shift_of_every_reward_changes_nothing(values: list[float], shift: float) -> None:
    if len(set(values)) > 1:
        assert advantages([value + shift for value in values]) == pytest.approx(advantages(values), abs=1e-5)
