"""Forward passes of many rows that share one prompt prefix, whose keys and values are computed once.

Invariant: for every row the result equals a plain forward pass over prefix + row. Called by make_policy.py and
simulate.py.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb


def prefix_cache(model: Qwen3ForCausalLM, prefix: list[int]) -> DynamicCache:
    """Keys and values of `prefix`, for one row; gradients flow through them unless disabled."""
    cache = DynamicCache(config=model.config)
    if prefix:
        model.model(input_ids=torch.tensor([prefix]), past_key_values=cache)
    return cache


def hidden_states(model: Qwen3ForCausalLM, prefix: list[int], rows: torch.Tensor) -> torch.Tensor:
    """Last hidden states (rows, length, width) of right-padded `rows` (rows, length), each after `prefix`."""
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(prefix_cache(model, prefix).layers if prefix else []):
        shape = (rows.shape[0], -1, -1, -1)
        cache.update(layer.keys.expand(shape), layer.values.expand(shape), index)
    positions = torch.arange(len(prefix), len(prefix) + rows.shape[1])[None]
    return model.model(input_ids=rows, past_key_values=cache, position_ids=positions).last_hidden_state


class Decoder:
    """Decodes many rows after one prefix; the prefix is attended to in place, never copied per row.

    Needs as many key heads as query heads. Keys and values of row i at its own position p lie in slot p, so padding
    that a row left behind is overwritten before it can be seen.
    """

    @torch.no_grad()
    def __init__(self, model: Qwen3ForCausalLM, prefix: list[int], rows: int, capacity: int) -> None:
        config = model.config
        assert config.num_key_value_heads == config.num_attention_heads
        self._model, self._offset, self._layers = model, len(prefix), prefix_cache(model, prefix).layers
        shape = (rows, config.num_attention_heads, capacity, config.head_dim)
        self._keys = [torch.zeros(shape) for _ in self._layers]
        self._values = [torch.zeros(shape) for _ in self._layers]

    @torch.no_grad()
    def logits(self, rows: torch.Tensor, ids: torch.Tensor, starts: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Logits (len(rows), vocabulary) after each row's token number `last` of `ids` (len(rows), T).

        `rows` are row numbers, `starts` the position of each row's first token, counted from the end of the prefix.
        """
        model = self._model
        slots = starts[:, None] + torch.arange(ids.shape[1])
        hidden = model.model.embed_tokens(ids)
        cos, sin = model.model.rotary_emb(hidden, slots + self._offset)
        seen = (torch.arange(int(slots.max()) + 1) <= slots[:, :, None])[:, None]
        for index, layer in enumerate(model.model.layers):
            mixed = self._attend(index, layer.self_attn, layer.input_layernorm(hidden), (cos, sin), rows, slots, seen)
            hidden = hidden + layer.self_attn.o_proj(mixed)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        final = hidden[torch.arange(len(rows)), last]
        return model.lm_head(model.model.norm(final))

    def _attend(
        self,
        index: int,
        attention: torch.nn.Module,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        slots: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        count, length, _ = hidden.shape
        shape = (count, length, -1, attention.head_dim)
        query = attention.q_norm(attention.q_proj(hidden).view(shape)).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(hidden).view(shape)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        keys, values = self._keys[index], self._values[index]
        keys[rows[:, None], :, slots] = key.transpose(1, 2)
        values[rows[:, None], :, slots] = attention.v_proj(hidden).view(shape)
        past = self._layers[index]
        query = query * attention.scaling
        window = seen.shape[-1]
        own = (query @ keys[rows, :, :window].mT).masked_fill(~seen, float("-inf"))
        heads = query.transpose(0, 1).reshape(query.shape[1], count * length, -1)
        shared = (heads @ past.keys[0].mT).view(-1, count, length, self._offset).transpose(0, 1)
        weights = torch.cat((shared, own), -1).softmax(-1)
        shared, own = weights.split((self._offset, window), -1)
        heads = shared.transpose(0, 1).reshape(query.shape[1], count * length, -1) @ past.values[0]
        mixed = heads.view(-1, count, length, attention.head_dim).transpose(0, 1) + own @ values[rows, :, :window]
        return mixed.transpose(1, 2).reshape(count, length, -1)
