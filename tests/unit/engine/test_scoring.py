"""Tokens that were sampled get the same log-probabilities again, from the weights that are served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evener.engines.scoring import Scorer
from evener.errors import InfraError

from .conftest import CONTEXT, Server
from .rescore import span_logprobs
from .test_exact import ask

pytestmark = pytest.mark.torch


async def test_what_was_sampled_is_scored_the_same(server: Server, policy: Path) -> None:
    reply = await server.chat(**ask("list the files", seed=3))
    (choice,) = reply["choices"]
    ids = np.array(reply["prompt_token_ids"] + choice["token_ids"], np.int32)
    recorded = [each["logprob"] for each in choice["logprobs"]["content"]]
    async with Scorer(server.url) as scorer:
        scored = await scorer.score(await scorer.model(), ids)
    assert np.abs(scored[-len(recorded) :] - recorded).max() < 1e-4
    assert np.abs(scored - span_logprobs(policy, ids.tolist())).max() < 1e-4


@pytest.mark.parametrize("length", [2, CONTEXT])
async def test_any_length_that_fits_is_scored(server: Server, policy: Path, length: int) -> None:
    ids = np.arange(length, dtype=np.int32) * 7 % 490
    async with Scorer(server.url) as scorer:
        scored = await scorer.score("tiny", ids)
        assert np.abs(scored - span_logprobs(policy, ids.tolist())).max() < 1e-4
        for wrong in (ids[:1], np.array([1, 10**6], np.int32), np.ones(CONTEXT + 1, np.int32)):
            with pytest.raises(InfraError, match="400"):
                await scorer.score("tiny", wrong)
