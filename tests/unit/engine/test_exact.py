"""Exactness: whatever was batched, shared, re-used or swapped, a log-probability is the one transformers computes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from .conftest import BASH, Server, build_policy
from .rescore import worst_difference

pytestmark = pytest.mark.torch
TOLERANCE = 1e-4
SYSTEM = {"role": "system", "content": "You work in a folder. Answer with a command, then say that it is done."}


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [SYSTEM, {"role": "user", "content": text}],
        "tools": [BASH],
        "logprobs": True,
        "ignore_eos": True,
        "max_tokens": 24,
    } | fields


async def test_batched_calls_with_a_shared_prefix_are_exact(server: Server, policy: Path) -> None:
    asked = [ask(f"write the number {i} " * (1 + i % 5), seed=i, max_tokens=8 + 3 * i) for i in range(20)]
    replies = await asyncio.gather(*(server.chat(**fields) for fields in asked))
    assert max(worst_difference(reply, {"1": policy}) for reply in replies) < TOLERANCE


async def test_a_session_that_grows_is_exact(server: Server, policy: Path) -> None:
    ids = (await server.chat(**ask("list the files", seed=1)))["prompt_token_ids"]
    for turn in range(4):
        reply = await server.chat(**ask("", seed=turn, kv_transfer_params={"prompt_token_ids": ids}))
        assert reply["prompt_token_ids"] == ids
        assert worst_difference(reply, {"1": policy}) < TOLERANCE
        ids = ids + reply["choices"][0]["token_ids"] + [2, 201, 1, 30 + turn]


async def test_a_long_prompt_after_short_ones_that_start_alike(server: Server, policy: Path) -> None:
    for length in (3, 20, 64, 65, 66, 200):  # below and above what makes a trunk
        ids = [(11 * j) % 497 for j in range(length)]
        reply = await server.chat(**ask("", kv_transfer_params={"prompt_token_ids": ids}))
        assert worst_difference(reply, {"1": policy}) < TOLERANCE


async def test_unrelated_prefixes_run_in_one_batch(server: Server, policy: Path) -> None:
    def prompt(seed: int, i: int) -> list[int]:
        return [(7 * j * (seed + 1) + seed) % 500 for j in range(100)] + [i]

    calls = [
        ask("", seed=i, max_tokens=20, kv_transfer_params={"prompt_token_ids": prompt(seed, i)})
        for i in range(4)
        for seed in range(3)
    ]
    calls += [ask("", kv_transfer_params={"prompt_token_ids": [i]}) for i in range(3)]
    replies = await asyncio.gather(*(server.chat(**fields) for fields in calls))
    assert max(worst_difference(reply, {"1": policy}) for reply in replies) < TOLERANCE


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.3])
async def test_temperature_is_in_the_logprobs_and_greedy_reports_the_raw_ones(
    server: Server, policy: Path, temperature: float
) -> None:
    reply = await server.chat(**ask("go on", temperature=temperature))
    assert worst_difference(reply, {"1": policy}, temperature or 1.0) < TOLERANCE


async def test_a_seed_fixes_the_sample_whatever_shares_the_batch(server: Server) -> None:
    fields = ask("say something", seed=7)
    alone = await server.chat(**fields)
    crowd = await asyncio.gather(server.chat(**fields), *(server.chat(**ask(f"other {i}")) for i in range(6)))
    assert crowd[0]["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert len({tuple(reply["choices"][0]["token_ids"]) for reply in crowd}) == 7


async def test_an_update_amid_generation_is_exact_on_both_sides(start_server: Any, policies: list[Path]) -> None:
    server: Server = start_server()
    versions = {str(i + 1): policy for i, policy in enumerate(policies)}
    calls = [asyncio.ensure_future(server.chat(**ask(f"count to {i}", seed=i, max_tokens=250 + i))) for i in range(6)]
    await asyncio.sleep(0.15)
    assert (await server.post("/pause?mode=keep&clear_cache=true"))[0] == 200
    await server.publish(policies[1], "2")
    assert (await server.post("/resume"))[0] == 200
    await asyncio.sleep(0.1)
    await server.publish(policies[2], "3")  # without a pause
    replies = await asyncio.gather(*calls)
    assert max(worst_difference(reply, versions) for reply in replies) < TOLERANCE
    cut = [reply for reply in replies if len(reply["choices"][0]["weight_versions"]) > 1]
    assert cut, "no call was running at an update: nothing was shown"
    after = await server.chat(**ask("count to 3", seed=1))
    assert after["choices"][0]["weight_versions"] == [{"version": "3", "start": 0, "end": 24}]
    assert worst_difference(after, versions) < TOLERANCE


async def test_a_llama_policy_is_exact(start_server: Any, tmp_path: Path) -> None:
    folder = build_policy(tmp_path / "llama", seed=5, kind="llama")
    server: Server = start_server(folder=folder)
    replies = await asyncio.gather(*(server.chat(**ask(f"task {i}", seed=i)) for i in range(4)))
    assert max(worst_difference(reply, {"1": folder}) for reply in replies) < TOLERANCE
