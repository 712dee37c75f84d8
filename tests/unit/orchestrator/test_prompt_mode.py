"""A run's prompt mode is decided once, before its first rollout, and every attempt of it has that one."""

import asyncio

import pytest

from evener.errors import InfraError
from tests.unit.orchestrator.world import everyone, run_file

TOKEN_IN = {"group_size": 2, "concurrent": 4, "prompt": "token_in", "thinking": "strip"}


@pytest.mark.parametrize(
    ("problem", "mode"), [(None, "token_in"), ("http://engine: call, result: no_stop", "render")], ids=["sound", "unsound"]
)
async def test_the_mode_is_decided_once_and_says_why(world, problem, mode):
    world.sessions.problem = problem
    await world.submit(run_file(rollouts=TOKEN_IN))
    async with everyone(world):
        await world.until(lambda state: state["rollouts"]["done"] > 0)
        world.sessions.problem = None if problem else "another"
        state = await world.until_over()
    assert (state["prompt"], state["prompt_reason"]) == (mode, problem or "")
    assert {(lease.prompt_mode, lease.thinking) for lease in world.leases} == {(mode, "strip")}


async def test_a_run_that_does_not_ask_is_rendered(world):
    world.sessions.problem = "not asked for"
    state = await world.submit()
    async with everyone(world):
        state = await world.until(lambda state: state["rollouts"]["done"] > 0)
    assert (state["prompt"], state["prompt_reason"]) == ("render", "")
    assert {lease.prompt_mode for lease in world.leases} == {"render"}


async def test_nothing_is_planned_before_the_engines_answer(world, monkeypatch):
    answers = asyncio.Event()

    async def ask() -> None:
        if not answers.is_set():
            raise InfraError("proxy_unavailable", "no engine answers")

    monkeypatch.setattr(world.sessions, "prompt_problem", ask)
    await world.submit(run_file(rollouts=TOKEN_IN))
    async with everyone(world):
        await asyncio.sleep(0.5)
        state = await world.api.get("/v1/runs/latest")
        assert (state["prompt"], state["rollouts"]["total"], world.leases) == ("unknown", 0, [])
        answers.set()
        state = await world.until(lambda state: state["rollouts"]["done"] > 0)
    assert state["prompt"] == "token_in"
