"""Choosing tokens. Invariant: a log-probability is that of the distribution its token was drawn from.

Each call draws its uniforms from a generator of its own, so neither the global generator nor the batch a call happens
to share changes what it samples. The scheduler calls `sample`; the server builds the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How one call samples. `temperature` 0 is greedy; `top_k` 0 is off; `stop` are strings, cut from the text; of the tokens
    only those `allowed` are drawn (None: all)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    allowed: tuple[int, ...] | None = None

    def draws(self, seed: int) -> list[float]:
        """One uniform number in [0, 1) a token, from the call's own seed, else from `seed`."""
        generator = torch.Generator().manual_seed(seed if self.seed is None else self.seed)
        return torch.rand(self.max_tokens, generator=generator).tolist()


def sample(logits: Tensor, how: Sequence[Sampling], draws: Sequence[float]) -> tuple[list[int], list[float]]:
    """Draw a token for each row of `logits` `[rows, vocab]`; ids and processed log-probabilities.

    Order as in vLLM: allowed tokens, temperature, top-k, top-p. A greedy row reports the distribution at temperature 1.
    """
    temperatures = torch.tensor([s.temperature or 1.0 for s in how])
    logits = _truncate(logits / temperatures[:, None], how)
    logprobs = logits.log_softmax(-1).clamp_(max=0.0)
    # float64: a float32 running sum over a vocabulary would shift the boundaries by more than a rare token's mass.
    cumulative = logprobs.double().exp_().cumsum(-1)
    # float32 draws stay below 1 by 6e-8, so the target stays below the total and never meets a token of probability 0.
    targets = torch.tensor(draws, dtype=torch.float64)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True)
    greedy = [s.temperature == 0 for s in how]
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy)[:, None], logits.argmax(-1, keepdim=True), tokens)
    chosen = logprobs.gather(-1, tokens)[:, 0].tolist()
    if not all(map(_finite, chosen)):
        raise FloatingPointError("the policy's logits are not finite: its weights overflow in float32")
    return tokens[:, 0].tolist(), chosen


def _finite(value: float) -> bool:
    return float("-inf") < value <= 0.0


def _truncate(logits: Tensor, how: Sequence[Sampling]) -> Tensor:
    for row, s in enumerate(how):
        if s.allowed is not None:
            kept = logits[row, list(s.allowed)]
            logits[row] = float("-inf")
            logits[row, list(s.allowed)] = kept
        if s.temperature == 0:
            continue
        if 0 < s.top_k < logits.shape[1]:
            floor = logits[row].topk(s.top_k).values[-1]
            logits[row].masked_fill_(logits[row] < floor, float("-inf"))
        if s.top_p < 1.0:
            ordered, order = logits[row].sort()
            drop = ordered.softmax(-1).cumsum(-1) <= 1.0 - s.top_p
            drop[-1] = False
            logits[row, order[drop]] = float("-inf")
    return logits
