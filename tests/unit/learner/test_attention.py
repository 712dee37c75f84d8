"""The blocks of the prefix tree give the attention, and the gradients, of each row on its own."""

import numpy as np
import pytest

pytestmark = pytest.mark.torch


def rows_of(seed: int) -> list[list[int]]:
    """Rows that share, fork, nest and stand alone."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 9, 7).tolist()
    forks = [prompt + rng.integers(0, 3, rng.integers(1, 9)).tolist() for _ in range(6)]
    return [*forks, prompt, [*prompt[:3], 1, 2], rng.integers(0, 9, 5).tolist()]


@pytest.mark.parametrize("seed", range(3))
def test_it_equals_dense_attention_under_the_tree_s_mask(seed: int) -> None:
    import torch

    from evener_learner.admission import Row
    from evener_learner.attention import tree_attention
    from evener_learner.trainer import pack

    torch.manual_seed(seed)
    rows = rows_of(seed)
    (tree,) = pack(
        [Row(np.array(r), np.r_[0, np.ones(len(r) - 1, int)], np.zeros(len(r), np.float32), 1.0) for r in rows], 10**6
    )
    packed = tree.pack()
    count = len(packed["input_ids"])
    assert count < sum(map(len, rows))

    mask = torch.zeros(count, count, dtype=torch.bool)
    bounds_q, bounds_k = packed["tree_cu_seqlens_q"].tolist(), packed["tree_cu_seqlens_k"].tolist()
    for segment in range(len(bounds_q) - 1):
        path = packed["tree_kv_index"][bounds_k[segment] : bounds_k[segment + 1]]
        for position in range(bounds_q[segment], bounds_q[segment + 1]):
            mask[position, path[path <= position]] = True

    q, k, v = (torch.randn(1, heads, count, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out, _ = tree_attention(
        torch.nn.Module(),
        q,
        k,
        v,
        None,
        tree_cu_seqlens_q=packed["tree_cu_seqlens_q"],
        tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
        scaling=0.3,
    )
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~mask, -torch.inf)
    dense = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)
    weight = torch.randn_like(out)
    torch.testing.assert_close(out, dense)
    torch.testing.assert_close(
        torch.autograd.grad((out * weight).sum(), (q, k, v)), torch.autograd.grad((dense * weight).sum(), (q, k, v))
    )


def test_a_sliding_window_is_refused() -> None:
    import torch

    from evener_learner.attention import tree_attention

    q = torch.zeros(1, 1, 2, 8)
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="sliding"):
        tree_attention(torch.nn.Module(), q, q, q, None, tree_cu_seqlens_q=bounds, tree_cu_seqlens_k=bounds, sliding_window=4)
