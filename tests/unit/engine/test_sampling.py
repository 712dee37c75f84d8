"""The sampler's distribution, its log-probabilities, and the prefix store's promise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.torch


def test_frequencies_follow_the_reported_probabilities() -> None:
    import torch

    from evener_engine.sampling import Sampling, sample

    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    how = Sampling(4000, temperature=0.7, seed=3)
    draws = how.draws(0)
    tokens, logprobs = sample(logits.expand(4000, 4), [how] * 4000, draws)
    expected = (logits[0] / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor(tokens), minlength=4) / 4000
    assert torch.allclose(counts, expected, atol=0.03)
    assert torch.allclose(torch.tensor(logprobs).exp(), expected[torch.tensor(tokens)])


def test_the_global_generator_is_left_alone() -> None:
    import torch

    from evener_engine.sampling import Sampling

    state = torch.get_rng_state()
    assert Sampling(5, seed=1).draws(0) == Sampling(5).draws(1) != Sampling(5).draws(2)
    assert torch.equal(torch.get_rng_state(), state)


@given(
    rows=st.lists(st.lists(st.floats(-60, 60, width=32), min_size=8, max_size=8), min_size=1, max_size=4),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.05, 1.0),
    draw=st.one_of(st.just(0.0), st.just(1 - 2**-24), st.floats(0, 0.999)),
)
@settings(max_examples=200)
def test_every_choice_is_possible_and_its_logprob_finite(
    rows: list[list[float]], temperature: float, top_k: int, top_p: float, draw: float
) -> None:
    import torch

    from evener_engine.sampling import Sampling, sample

    how = Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logprobs = sample(torch.tensor(rows), [how] * len(rows), [draw] * len(rows))
    for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
        assert -1e9 < logprob <= 0
        if temperature == 0:
            assert row[token] == max(row)
        elif 0 < top_k < 8:
            assert sum(value > row[token] for value in row) < top_k


@given(data=st.data())
@settings(max_examples=150)
def test_found_keys_belong_to_the_ids_asked_for(data: st.DataObject) -> None:
    """Each position's key holds a hash of the ids up to it, so a key from anywhere else is seen."""
    import numpy
    import torch

    from evener_engine import prefixes
    from evener_engine.model import Trunk

    def keys(ids: list[int], start: int) -> torch.Tensor:
        hashes = [float(hash(tuple(ids[: i + 1])) % 2**20) for i in range(start, len(ids))]
        return torch.tensor(hashes).reshape(1, 1, 1, -1, 1)

    moved: list[tuple[Trunk, Trunk]] = []
    store = prefixes.PrefixStore(lambda old, new: moved.append((old, new)))
    common_part = [1] * 70
    segments = st.sampled_from([[1] * 70, [2] * 300, [3], [4] * 10, [5] * 260])
    for key in range(data.draw(st.integers(1, 8))):
        ids = common_part[: data.draw(st.sampled_from([0, 40, 70]))]
        ids = ids + [t for part in data.draw(st.lists(segments, min_size=1, max_size=4)) for t in part]
        trunk, tail = store.match(numpy.asarray(ids, numpy.int32))
        base = trunk.length if trunk else 0
        known = tail.shape[3] if tail is not None else 0
        assert base + known < len(ids)
        if trunk is not None:
            assert trunk.ids.tolist() == ids[:base]
            assert torch.equal(trunk.kv, keys(ids[:base], 0))
        if tail is not None:
            assert torch.equal(tail, keys(ids[: base + known], base))
        if trunk is None and len(ids) > prefixes.TRUNK_MIN:
            trunk = Trunk(numpy.asarray(ids[:-1], numpy.int32), keys(ids[:-1], 0))
            store.hold(trunk)
            base = len(ids) - 1
        prompt = data.draw(st.integers(1, len(ids)))
        store.park(key, prefixes.Parked(numpy.asarray(ids, numpy.int32), prompt, trunk, keys(ids, base)))
    for old, new in moved:
        n = min(old.length, new.length)
        assert old.ids[:n].tolist() == new.ids[:n].tolist()
