"""Prompts as ids on the real engine: its template can be read, and a conversation through the proxy is one exact chain."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fakeredis
import numpy as np
import pytest

from evener.api.types import Sampling
from evener.engines.token_in import TokenInRoute
from evener.engines.vllm import VllmSampler
from evener.trace import build_graph
from evener_proxy.token_in import soundness
from tests.unit.proxy.stub import StubEngine, running_proxy
from tests.unit.trace.sessions import rows_of

from .conftest import BASH, Server
from .rescore import span_logprobs

pytestmark = pytest.mark.torch
OPENING = [{"role": "system", "content": "You work in a folder."}, {"role": "user", "content": "list the files"}]


async def test_the_template_is_sound_and_the_ends_of_turns_are_found(server: Server) -> None:
    sampler = VllmSampler(server.url)
    try:
        route = TokenInRoute(sampler, "tiny")
        verdict = await soundness.check(route)
        end = await route.token("<|im_end|>")
        assert await route.token("two words") is None
    finally:
        await sampler.close()
    assert verdict.problem is None
    assert verdict.skeleton
    assert verdict.ends.stops == {end}
    assert ("inline", "user") not in verdict.strips


@pytest.mark.parametrize(("text", "finish"), [("<|im_end|>", "stop"), ("the", "length")])
async def test_allowed_tokens_alone_are_sampled(server: Server, text: str, finish: str) -> None:
    status, answer = await server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert status == 200
    allowed = answer["tokens"][:1]
    (choice,) = (await server.chat(messages=OPENING, max_tokens=2, logprobs=True, allowed_token_ids=allowed))["choices"]
    assert choice["finish_reason"] == finish
    assert set(choice["token_ids"]) == set(allowed)
    assert {entry["logprob"] for entry in choice["logprobs"]["content"]} == {0.0}


@pytest.mark.parametrize("allowed", [[], [10**6], [-1]])
async def test_tokens_that_there_are_not_cannot_be_allowed(server: Server, allowed: list[int]) -> None:
    status, answer = await server.post("/v1/chat/completions", {"messages": OPENING, "allowed_token_ids": allowed})
    assert (status, answer["error"]["param"]) == (400, "allowed_token_ids")


async def test_a_conversation_is_one_chain_whose_importance_ratios_are_one(server: Server, policy: Path) -> None:
    """Random weights say what no template writes the same way; most replies are cut. At lag 0 the ratio is 1 within 1e-3."""
    engine = cast("StubEngine", SimpleNamespace(url=server.url))
    async with running_proxy(engine, fakeredis.FakeAsyncRedis()) as proxy:
        session, key = await proxy.open(prompt_mode="token_in", sampling=Sampling(temperature=1.0))
        messages: list[dict[str, Any]] = list(OPENING)
        for turn in range(6):
            status, reply = await proxy.chat(key, messages, tools=[BASH], max_tokens=12)
            assert status == 200, reply
            said = reply["choices"][0]["message"]
            assert "tool_calls" not in said, "random weights call no tool"
            messages += [
                {"role": "assistant", "content": said["content"].strip()},
                {"role": "user", "content": f"go on {turn}"},
            ]
        records = await proxy.store.load(session)
    assert [record.request["prompt"].get("refused") for record in records] == ["first", *[None] * 5]
    graph = build_graph(records)
    assert len(graph.roots) == 1
    (sequence,) = rows_of(graph.calls.values())
    scored = np.array([0.0, *span_logprobs(policy, sequence.input_ids.tolist())])
    trained = sequence.loss_mask == 1
    assert trained.sum() == sum(len(record.completion_ids) for record in records)
    assert np.abs(np.exp(scored - sequence.logprobs)[trained] - 1).max() < 1e-3
