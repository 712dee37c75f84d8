"""The decoder's forward pass. Invariant: what a row computes depends on its own tokens and the weights alone.

Keys and values of a row lie in two parts: a *trunk*, the prefix that many rows share and whose attention is computed
once for all of them, and the row's own *tail*. The two softmax parts are merged by their log-sum-exp, which is exact
(Juravsky et al., "Hydragen", 2024). The scheduler calls this module from its one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy
    from numpy.typing import NDArray
    from torch import Tensor

    from .weights import Architecture, Layer, Weights

PREFILL_CHUNK = 512  # tokens a pass: bounds the score matrices of a long prompt; larger was no faster
TAIL_STEP = 256  # tails grow by this many columns

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(eq=False)
class Trunk:
    """A prefix several rows share: its token ids and keys and values `[2, layers, kv_heads, len(ids), head_dim]`."""

    ids: NDArray[numpy.int32]
    kv: Tensor
    used: int = 0

    @property
    def length(self) -> int:
        """Tokens in the trunk."""
        return len(self.ids)


class Group(NamedTuple):
    """Rows of one pass that share a trunk. `mask` is `[rows, 1, 1 | group x tokens, tail]`, 0 or -inf."""

    rows: slice | Tensor  # in the key-value store
    batch: slice | Tensor  # the same rows in the pass
    trunk: Trunk | None
    mask: Tensor


class Rows:
    """Keys and values of the tails, `[2, layers, rows, kv_heads, columns, head_dim]`, columns growing on demand."""

    def __init__(self, arch: Architecture, rows: int) -> None:
        self.kv = torch.zeros(2, arch.layers, rows, arch.kv_heads, TAIL_STEP, arch.head_dim)

    def reserve(self, columns: int) -> None:
        """Make room for tails of `columns` tokens."""
        have = self.kv.shape[4]
        if columns > have:
            more = -(-(columns - have) // TAIL_STEP) * TAIL_STEP
            self.kv = functional.pad(self.kv, (0, 0, 0, more))

    def read(self, row: int, start: int, end: int) -> Tensor:
        """A copy of columns `start:end`, `[2, layers, kv_heads, end - start, head_dim]`."""
        return self.kv[:, :, row, :, start:end].clone()

    def write(self, row: int, kv: Tensor) -> None:
        """Put `kv` at the start of the row's tail."""
        self.reserve(kv.shape[3])
        self.kv[:, :, row, :, : kv.shape[3]] = kv

    def move(self, source: int, target: int, columns: int) -> None:
        """Copy a tail of `columns` tokens onto another row."""
        self.kv[:, :, target, :, :columns] = self.kv[:, :, source, :, :columns]


class Model:
    """Weights at work. `weights` may be replaced between passes; what was computed before is then the caller's."""

    def __init__(self, arch: Architecture, weights: Weights, context: int) -> None:
        self.arch = arch
        self.weights = weights
        self._cos, self._sin = arch.rotary(context)

    def prefill(self, ids: Sequence[int], rows: Rows, row: int, trunk: Trunk | None, known: int) -> Tensor:
        """Compute keys and values of `ids[known:]` behind `trunk`, given those before; the last logits `[1, vocab]`.

        `ids` counts from position 0, trunk included; at least one id must be unknown.
        """
        base = trunk.length if trunk else 0
        rows.reserve(len(ids) - base)
        repeat = self.arch.heads // self.arch.kv_heads
        hidden = torch.empty(0)
        for start in range(known, len(ids), PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, len(ids))
            group = Group(slice(row, row + 1), slice(0, 1), trunk, _causal(start - base, end - base, repeat))
            positions = torch.arange(start, end)[None]
            hidden = self._pass(torch.tensor([ids[start:end]]), positions, torch.tensor([[row]]), base, rows, [group])
        return functional.linear(hidden[:, -1], self.weights.head)

    def score(self, ids: Sequence[int]) -> Tensor:
        """Log-probability of each of `ids[1:]` given all before it, `[len(ids) - 1]`; no key or value is kept."""
        repeat = self.arch.heads // self.arch.kv_heads
        rows = Rows(self.arch, 1)
        rows.reserve(len(ids))
        tokens = torch.tensor(ids)
        scored: list[Tensor] = []
        for start in range(0, len(ids) - 1, PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, len(ids) - 1)
            group = Group(slice(0, 1), slice(0, 1), None, _causal(start, end, repeat))
            positions = torch.arange(start, end)[None]
            hidden = self._pass(tokens[None, start:end], positions, torch.tensor([[0]]), 0, rows, [group], every=True)
            logits = functional.linear(hidden[0], self.weights.head)
            scored.append(logits.log_softmax(-1).gather(-1, tokens[start + 1 : end + 1, None])[:, 0])
        return torch.cat(scored)

    def decode(self, tokens: Sequence[int], lengths: Sequence[int], trunks: Sequence[Trunk | None], rows: Rows) -> Tensor:
        """One token for each of the first rows, whose tails hold `lengths` tokens; logits `[rows, vocab]`."""
        count = len(tokens)
        rows.reserve(max(lengths) + 1)
        tails = torch.tensor(lengths)
        bases = torch.tensor([trunk.length if trunk else 0 for trunk in trunks])
        members: dict[Trunk | None, list[int]] = {}
        for index, trunk in enumerate(trunks):
            members.setdefault(trunk, []).append(index)
        groups: list[Group] = []
        for trunk, indices in members.items():
            where = slice(0, count) if len(members) == 1 else torch.tensor(indices)
            own = tails[where]
            hidden_columns = torch.arange(int(own.max()) + 1) > own[:, None]
            mask = torch.zeros(hidden_columns.shape).masked_fill_(hidden_columns, float("-inf"))
            groups.append(Group(where, where, trunk, mask[:, None, None]))
        positions = (bases + tails)[:, None]
        which = torch.arange(count)[:, None]
        hidden = self._pass(torch.tensor(tokens)[:, None], positions, which, bases[:, None], rows, groups)
        return functional.linear(hidden[:, -1], self.weights.head)

    def _pass(
        self,
        tokens: Tensor,
        positions: Tensor,
        which: Tensor,
        base: Tensor | int,
        rows: Rows,
        groups: list[Group],
        *,
        every: bool = False,
    ) -> Tensor:
        """Write keys and values of `tokens` `[rows, tokens]`; the normalised hidden states `[rows, tokens, hidden]` of the
        last token, or of `every` one.
        """
        weights, epsilon = self.weights, self.arch.epsilon
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        columns = positions - base
        hidden = functional.embedding(tokens, weights.embed)
        for index, layer in enumerate(weights.layers):
            keys, values = rows.kv[0, index], rows.kv[1, index]
            query, key, value = self._project(layer, hidden, cos, sin)
            keys[which, :, columns] = key
            values[which, :, columns] = value
            if (
                index == len(weights.layers) - 1 and tokens.shape[1] > 1 and not every
            ):  # nothing reads the other tokens' outputs
                hidden, query = hidden[:, -1:], query[:, -1:]
                groups = [group._replace(mask=group.mask[:, :, -1:]) for group in groups]
            attended = self._attend(index, query, keys, values, groups)
            hidden = hidden + functional.linear(attended, layer.out)
            normed = functional.rms_norm(hidden, hidden.shape[-1:], layer.post_norm, epsilon)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, -1)
            hidden = hidden + functional.linear(functional.silu(gate).mul_(up), layer.down)
        return functional.rms_norm(hidden, hidden.shape[-1:], weights.norm, epsilon)

    def _project(self, layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each `[rows, tokens, heads, head_dim]`."""
        arch = self.arch
        normed = functional.rms_norm(hidden, hidden.shape[-1:], layer.input_norm, arch.epsilon)
        qkv = functional.linear(normed, layer.qkv).unflatten(-1, (-1, arch.head_dim))
        both = qkv[..., : arch.heads + arch.kv_heads, :]
        if layer.qk_norm is not None:
            both = functional.rms_norm(both, both.shape[-1:], None, arch.epsilon) * layer.qk_norm
        both = both * cos + both.roll(arch.head_dim // 2, -1) * sin
        return both[..., : arch.heads, :], both[..., arch.heads :, :], qkv[..., arch.heads + arch.kv_heads :, :]

    def _attend(self, index: int, query: Tensor, keys: Tensor, values: Tensor, groups: list[Group]) -> Tensor:
        """Attention of `query` `[rows, tokens, heads, head_dim]`; `[rows, tokens, heads x head_dim]`."""
        if len(groups) == 1:
            return self._attend_group(index, query, keys, values, groups[0])
        attended = query.new_empty(*query.shape[:2], query.shape[2] * query.shape[3])
        for group in groups:
            attended[group.batch] = self._attend_group(index, query[group.batch], keys, values, group)
        return attended

    def _attend_group(self, index: int, query: Tensor, keys: Tensor, values: Tensor, group: Group) -> Tensor:
        rows, tokens = query.shape[:2]
        kv_heads, width = self.arch.kv_heads, self.arch.head_dim
        tail = group.mask.shape[-1]
        split = query.unflatten(2, (kv_heads, -1))  # [rows, tokens, kv_heads, repeat, head_dim]
        repeat = split.shape[3]
        shape = (rows, kv_heads, repeat, tokens)
        own = split.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, repeat * tokens, width)
        out, weight = _flash(own, keys[group.rows, :, :tail], values[group.rows, :, :tail], attn_mask=group.mask)
        out = out.reshape(*shape, width)
        if group.trunk is not None:
            trunk = group.trunk.kv[:, index]
            packed = split.permute(2, 0, 3, 1, 4).reshape(1, kv_heads, rows * repeat * tokens, width)
            common, common_weight = _flash(packed, trunk[0][None], trunk[1][None])
            common = common.reshape(kv_heads, rows, repeat, tokens, width).transpose(0, 1)
            common_weight = common_weight.reshape(kv_heads, rows, repeat, tokens).transpose(0, 1)
            share = torch.sigmoid(common_weight - weight.reshape(shape))[..., None]
            out = torch.lerp(out, common, share)
        return out.permute(0, 3, 1, 2, 4).reshape(rows, tokens, -1)


def _causal(start: int, end: int, repeat: int) -> Tensor:
    """The mask of tokens `start:end` of a tail over its first `end` columns, `[1, 1, repeat x tokens, end]`."""
    mask = torch.zeros(end - start, end)
    mask[:, start:].fill_(float("-inf")).triu_(1)
    return mask.repeat(repeat, 1)[None, None]
