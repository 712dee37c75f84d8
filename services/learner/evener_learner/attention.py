"""Attention over a prefix tree on the CPU: a token shared by several rows is attended to once, and no key is ever copied.

TRL packs the rows of a micro-batch into a prefix tree laid out in depth-first order, and calls a CUDA kernel with each
segment's whole path of keys gathered. Here the same attention is computed from blocks: each segment attends causally to
itself, and *all* segments below it, which lie next to each other in that order, attend to it in one unmasked block. Sixty-four
rows behind one 1,300-token prompt are then one large block and 64 small ones in place of 64 gathered copies of the prompt.

The blocks of one query are merged by their log-sum-exps. The backward pass hands the *merged* output and log-sum-exp to each
block's flash backward, which makes the blocks' gradients sum to the exact one (Dao et al., FlashAttention, 2022, section 3.1,
with the keys split over blocks). Called by the trainer's CPU seam alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions [start, end) of the packed row; the segments below it fill [end, subtree_end)."""

    start: int
    end: int
    subtree_end: int


def segments(cu_seqlens_q: list[int], cu_seqlens_k: list[int]) -> list[Segment]:
    """The tree's segments in depth-first order, from TRL's boundaries of segments (queries) and of their paths (keys).

    A segment's depth is its path without itself; its subtree ends before the next segment that lies no deeper.
    """
    bounds = list(pairwise(cu_seqlens_q))
    depths = [path[1] - path[0] - (end - start) for (start, end), path in zip(bounds, pairwise(cu_seqlens_k), strict=True)]
    subtree_ends = [cu_seqlens_q[-1]] * len(bounds)
    above: list[int] = []
    for index, depth in enumerate(depths):
        while above and depths[above[-1]] >= depth:
            subtree_ends[above.pop()] = bounds[index][0]
        above.append(index)
    return [Segment(start, end, below) for (start, end), below in zip(bounds, subtree_ends, strict=True)]


def _blocks(tree: list[Segment]) -> Iterator[tuple[slice, slice, bool]]:
    for segment in tree:
        own = slice(segment.start, segment.end)
        yield own, own, True
        if segment.subtree_end > segment.end:
            yield slice(segment.end, segment.subtree_end), own, False


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: list[Segment], scale: float) -> torch.Tensor:
        """Attention of q, k, v (1, heads, tokens, head size) over ``tree``; same shape."""
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:3], -math.inf)
        for queries, keys, causal in _blocks(tree):
            part, part_lse = _flash(q[:, :, queries], k[:, :, keys], v[:, :, keys], 0.0, causal, scale=scale)
            merged = torch.logaddexp(lse[:, :, queries], part_lse)
            weight = torch.exp(part_lse - merged).unsqueeze(-1)
            out[:, :, queries] = torch.lerp(out[:, :, queries], part, weight)
            lse[:, :, queries] = merged
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """Gradients of q, k, v: the sum of the blocks' own, each taken at the merged output."""
        (grad,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys, causal in _blocks(ctx.tree):
            block = _flash_backward(
                grad[:, :, queries],
                q[:, :, queries],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                0.0,
                causal,
                scale=ctx.scale,
            )
            grad_q[:, :, queries] += block[0]
            grad_k[:, :, keys] += block[1]
            grad_v[:, :, keys] += block[2]
        return grad_q, grad_k, grad_v, None, None


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """TRL's `tree_attention` on the CPU: query (1, heads, tokens, head size), key and value with as many or fewer heads.

    Returns (1, tokens, heads, head size) and no weights. Raises NotImplementedError for sliding windows and soft caps.
    """
    if sliding_window or softcap:
        raise NotImplementedError(
            f"{type(module).__name__}: sliding windows and soft caps are not trained on the CPU; train this policy on CUDA"
        )
    assert attention_mask is None, "the tree is the mask"
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    tree = segments(tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist())
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out: Any = _TreeAttention.apply(query, key, value, tree, scale)
    return out.transpose(1, 2).contiguous(), None
