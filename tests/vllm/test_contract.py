"""What the proxy and the learner count on: the ids and log-probabilities are the policy's, and new weights arrive whole."""

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evener.engines.sampler import EngineRefused
from evener.engines.scoring import Scorer
from evener.engines.token_in import given
from evener.errors import InfraError
from tests.vllm import reference
from tests.vllm.engine import ASKED, CONTEXT, TOLERANCE, Engine, Policies, ask, check_close, check_exact, connected
from tests.vllm.policies import BASH
from tests.vllm.process import MODEL, EngineProcess

pytestmark = pytest.mark.torch

VERSION = 4


@pytest.fixture
async def engine(tied: EngineProcess, policies: Policies) -> AsyncIterator[Engine]:
    """The engine with the weights that it was started with, under version `VERSION`."""
    async with connected(tied) as engine:
        await engine.serve(policies.random(1), VERSION)
        yield engine


def long_call(tokens: int) -> dict[str, Any]:
    """A call that does not end before it has so many tokens."""
    return {
        "model": MODEL,
        "messages": [ASKED],
        "max_tokens": tokens,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }


def some_time(engine: Engine) -> int:
    """Tokens that take the engine a second or more."""
    return 400 if engine.is_vllm else 1200


# what a sample is


@pytest.mark.parametrize(("temperature", "top_k"), [(0.5, -1), (1.0, -1), (1.3, 8)])
async def test_exact_log_probabilities_are_those_of_the_distribution_sampled_from(
    engine: Engine, policies: Policies, temperature: float, top_k: int
) -> None:
    request = ask(temperature=temperature)
    request.top_k = top_k
    sample = await engine.sampler.sample(request)
    assert sample.prompt_ids.tolist() == reference.prompt_ids(policies.random(1), [ASKED], [BASH])
    check_exact(policies.random(1), sample, temperature=temperature, top_k=top_k)


async def test_exact_calls_that_run_at_once_and_share_a_prefix(engine: Engine, policies: Policies) -> None:
    asked = [ask({"role": "user", "content": f"write the number {i} " * (1 + i)}, max_tokens=8 + 4 * i) for i in range(6)]
    for sample in await asyncio.gather(*map(engine.sampler.sample, asked)):
        check_exact(policies.random(1), sample)


async def test_exact_a_prompt_given_as_ids_is_used_as_it_is(engine: Engine, policies: Policies) -> None:
    prompt = [(7 * i) % 500 for i in range(90)]
    body = long_call(12) | {"kv_transfer_params": {"prompt_token_ids": prompt}}
    reply = await engine.post("/v1/chat/completions", body)
    assert reply["prompt_token_ids"] == prompt
    choice = reply["choices"][0]
    check_close(policies.random(1), prompt, choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]])


async def test_a_tool_call_is_parsed_and_its_tokens_stay(engine: Engine, policies: Policies) -> None:
    await engine.serve(policies.taught, VERSION + 1)
    first = await engine.sampler.sample(ask(temperature=0.2, max_tokens=60))
    assert first.finish_reason == "tool_calls"
    assert [(call.name, json.loads(call.arguments)) for call in first.tool_calls] == [("bash", {"command": "ls"})]
    assert not first.content
    said = reference.text_of(policies.taught, first.completion_ids)
    assert said == '<tool_call>\n{"name": "bash", "arguments": {"command":"ls"}}\n</tool_call><|im_end|>'
    check_exact(policies.taught, first, temperature=0.2)

    call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    history = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "notes.txt"},
    ]
    second = await engine.sampler.sample(ask(*history, temperature=0.2, max_tokens=60))
    assert (second.content, second.tool_calls, second.finish_reason) == ("Done.", [], "stop")
    assert reference.text_of(policies.taught, second.completion_ids) == "Done.<|im_end|>"
    check_exact(policies.taught, second, temperature=0.2)


async def test_exact_a_chain_of_ids_gives_each_token_the_probability_that_a_whole_row_gives_it(
    engine: Engine, policies: Policies
) -> None:
    """A conversation that goes on as ids, with tools: one row, whose importance ratio is 1 before any training."""
    prompt = reference.prompt_ids(policies.random(1), [ASKED], [BASH])
    row, sampled, logprobs = list(prompt), np.zeros(0, np.int64), np.zeros(0, np.float32)
    for turn in range(3):
        request = ask(ASKED, max_tokens=10)
        request.kv_transfer_params = given(np.array(row, np.int32))
        sample = await engine.sampler.sample(request)
        assert sample.prompt_ids.tolist() == row
        sampled = np.append(sampled, np.arange(len(row), len(row) + len(sample.completion_ids)))
        logprobs = np.append(logprobs, sample.logprobs)
        row += sample.completion_ids.tolist()
        row += reference.prompt_ids(policies.random(1), [{"role": "user", "content": f"turn {turn}"}], None)
    async with Scorer(engine.process.url) as scorer:
        whole = await scorer.score(await scorer.model(), np.array(row, np.int32))
    np.testing.assert_allclose(np.exp(whole[sampled - 1] - logprobs), 1.0, atol=TOLERANCE, rtol=0)
    expected = reference.logprobs(policies.random(1), row[:1], row[1:])
    np.testing.assert_allclose(whole, expected, atol=TOLERANCE, rtol=0)


async def test_status_probe_and_count(engine: Engine) -> None:
    status = await engine.sampler.status()
    assert (status.model, status.window, status.version) == (MODEL, CONTEXT, VERSION)
    assert await engine.sampler.probe(MODEL) == "tokens"
    request = ask(max_tokens=1)
    assert await engine.sampler.tokenize(request) == (await engine.sampler.sample(request)).prompt_tokens


async def test_a_prompt_that_fills_the_window_is_refused_as_that(engine: Engine) -> None:
    with pytest.raises(EngineRefused) as refused:
        await engine.sampler.sample(ask({"role": "user", "content": "list the files " * CONTEXT}))
    assert refused.value.context_full


# what runs meanwhile


async def test_a_caller_that_leaves_ends_its_calls(engine: Engine) -> None:
    calls = [asyncio.ensure_future(engine.post("/v1/chat/completions", long_call(CONTEXT - 400))) for _ in range(8)]
    await asyncio.sleep(1.0)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls), "the calls were over before anybody left"
    started = time.monotonic()
    await engine.post("/pause?mode=wait")  # ends when no call runs any more
    waited = time.monotonic() - started
    await engine.sink.resume()
    assert waited < 3


async def test_a_pause_holds_calls_and_loses_none(engine: Engine, policies: Policies) -> None:
    running = asyncio.ensure_future(engine.post("/v1/chat/completions", long_call(some_time(engine))))
    await asyncio.sleep(0.3)
    await engine.sink.pause()
    queued = asyncio.ensure_future(engine.sampler.sample(ask(max_tokens=3)))
    done, _ = await asyncio.wait({running, queued}, timeout=1.5)
    assert done == set()
    await engine.sink.resume()
    choice = (await running)["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", some_time(engine))
    check_exact(policies.random(1), await queued)


# new weights


async def test_published_weights_are_served_under_their_version(engine: Engine, policies: Policies) -> None:
    for seed in (2, 3):
        await engine.serve(policies.random(seed), VERSION + seed)
        assert await engine.sink.version() == VERSION + seed
        assert (await engine.sampler.status()).version == VERSION + seed
        check_exact(policies.random(seed), await engine.sampler.sample(ask()))


async def test_the_prefix_cache_is_cleared_with_the_weights(engine: Engine, policies: Policies) -> None:
    request = ask({"role": "user", "content": "a long prompt, which every call repeats " * 40})
    for seed in (1, 2, 1):
        await engine.serve(policies.random(seed), VERSION + seed)
        for _ in range(2):  # the second from the cache
            check_exact(policies.random(seed), await engine.sampler.sample(request))


@dataclass(frozen=True)
class Generated:
    """What a call sampled, and the version of the weights that sampled each of its tokens."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]


async def generate(engine: Engine, prompt: list[int], tokens: int) -> Generated:
    """A call whose reply names a version a token: vLLM's route for ids, the chat route of the CPU engine."""
    if engine.is_vllm:
        sampling = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
        body = {"model": MODEL, "token_ids": prompt, "sampling_params": sampling, "return_token_ids": True}
        reply = await engine.post("/inference/v1/generate", body)
    else:
        body = long_call(tokens) | {"kv_transfer_params": {"prompt_token_ids": prompt}}
        reply = await engine.post("/v1/chat/completions", body)
    choice = reply["choices"][0]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    runs = choice["weight_versions"]
    assert [run["start"] for run in runs] == [0, *(run["end"] for run in runs[:-1])]
    versions = [int(run["version"]) for run in runs for _ in range(run["start"], run["end"])]
    return Generated(choice["token_ids"], logprobs, versions)


async def test_a_call_goes_on_over_an_update_and_each_token_has_its_version(engine: Engine, policies: Policies) -> None:
    prompt = reference.prompt_ids(policies.random(1), [ASKED], [BASH])
    running = asyncio.ensure_future(generate(engine, prompt, some_time(engine)))
    await asyncio.sleep(0.3)
    await engine.serve(policies.random(2), VERSION + 1)
    got = await running
    assert len(got.ids) == len(got.logprobs) == len(got.versions) == some_time(engine)
    assert sorted(set(got.versions)) == [VERSION, VERSION + 1], "the call did not run at the update"
    cut = got.versions.index(VERSION + 1)
    assert got.versions == [VERSION] * cut + [VERSION + 1] * (len(got.ids) - cut)
    check_close(policies.random(1), prompt, got.ids[:cut], got.logprobs[:cut])
    check_close(policies.random(2), [*prompt, *got.ids[:cut]], got.ids[cut:], got.logprobs[cut:])


def spoilt(policy: Path, folder: Path, how: str) -> Path:
    """A policy whose weights cannot be loaded."""
    import torch
    from safetensors.torch import load_file, save_file

    if how == "nowhere":
        return folder
    shutil.copytree(policy, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    if how == "missing":
        del tensors[name]
    elif how == "unexpected":
        tensors["model.layers.9.mlp.down_proj.weight"] = tensors[name].clone()
    elif how == "misshapen":
        tensors[name] = tensors[name][:-1].clone()
    elif how == "not finite":
        tensors[name][0, 0] = torch.nan
    save_file(tensors, file)
    if how == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return folder


@pytest.mark.parametrize("how", ["missing", "unexpected", "misshapen", "not finite", "truncated", "nowhere"])
async def test_bad_weights_change_nothing(engine: Engine, policies: Policies, tmp_path: Path, how: str) -> None:
    with pytest.raises(InfraError) as refused:
        await engine.serve(spoilt(policies.random(2), tmp_path / "spoilt", how), VERSION + 1)
    assert refused.value.cause == "engine_error"
    assert await engine.sink.version() == VERSION
    check_exact(policies.random(1), await engine.sampler.sample(ask()))


async def test_an_update_that_is_not_finished_changes_nothing(engine: Engine, policies: Policies) -> None:
    await engine.post("/start_weight_update", {})
    await engine.post("/update_weights", {"update_info": {"path": str(policies.random(2))}})
    check_exact(policies.random(1), await engine.sampler.sample(ask()))
    await engine.serve(policies.random(3), VERSION + 1)
    check_exact(policies.random(3), await engine.sampler.sample(ask()))
