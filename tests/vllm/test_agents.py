"""Unmodified agents do a task of three turns on real vLLM, in both prompt modes: their tokens are vLLM's, exact.

The policy is taught here, from what each agent asked a scripted engine a moment before, and then has to say it by itself: what
it reads at last was rendered, tokenised and parsed by vLLM.
"""

import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evener.api import Sampling
from evener.api.types import PromptMode
from evener.errors import Outcome
from tests.harnesses.agents import AGENTS as ALL
from tests.harnesses.agents import Agent
from tests.harnesses.engine import says
from tests.harnesses.rollout import Left, attempt, roll_out
from tests.harnesses.scenarios import task
from tests.vllm import reference
from tests.vllm.engine import TOLERANCE
from tests.vllm.policies import Conversation, Message, random_policy, rendered, teach, tokenizer_of
from tests.vllm.process import running

MODES: tuple[PromptMode, ...] = ("render", "token_in")
AGENTS = [agent for agent in ALL if agent.id in ("pi-chat", "mini-swe-agent")]
TEMPERATURE = 0.1
"""A taught policy says what it was taught with a probability of 0.98 a token and more; at this temperature nearly always."""

pytestmark = pytest.mark.torch


async def test_agents_do_a_task_of_three_turns(tmp_path: Path) -> None:
    conversations = [await recorded(agent, tmp_path / "scripted" / agent.id) for agent in AGENTS]
    tokenizer = tokenizer_of([rendered(each) for each in conversations] * 3, size=2048)
    start = random_policy(tmp_path / "untaught", tokenizer, seed=1, spread=0.05, context=8192)
    policy = teach(start, [*conversations, *map(echoed, conversations)], tmp_path / "policy", steps=400)
    with running("vllm", policy, tmp_path) as engine:
        for agent, mode in product(AGENTS, MODES):
            folder = tmp_path / f"{agent.id}-{mode}"
            sampling = Sampling(temperature=TEMPERATURE)
            left = await attempt(agent, engine.url, folder, sampling=sampling, prompt_mode=mode)
            check(policy, agent, left)
            if mode == "token_in":
                check_one_chain(left)


def check(policy: Path, agent: Agent, left: Left) -> None:
    assert (left.report.outcome, left.report.exit_code, left.hello) == (Outcome.FINISHED, 0, "hello"), left.text()
    assert [record.level for record in left.records] == ["tokens"] * len(turns(agent)), left.text()
    for record, turn in zip(left.records, turns(agent), strict=True):
        calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in turn.get("tool_calls", ())]
        assert [(each["name"], json.loads(each["arguments"])) for each in record.reply["tool_calls"]] == calls, left.text()
        expected = reference.logprobs(policy, record.prompt_ids, record.completion_ids, temperature=TEMPERATURE)
        np.testing.assert_allclose(record.logprobs, expected, atol=TOLERANCE, rtol=0)


def check_one_chain(left: Left) -> None:
    """Each prompt is the one before it, what was sampled then (tool calls, but for the last), and what is new."""
    for before, after in pairwise(left.records):
        assert after.request["prompt"]["from"] == before.number, left.text()
        whole = np.concatenate((before.prompt_ids, before.completion_ids))
        assert np.array_equal(after.prompt_ids[: len(whole)], whole), left.text()


async def recorded(agent: Agent, folder: Path) -> Conversation:
    """The conversation that an agent has with an engine which says what the policy is to say."""
    folder.mkdir(parents=True)
    seen = await roll_out(agent, lambda engine: [says(engine, **turn) for turn in turns(agent)], folder)
    assert seen.hello == "hello", seen.text()
    last = seen.engine.asked[-1]
    return Conversation([*map(_read, last["messages"]), _read({"role": "assistant", **turns(agent)[-1]})], last["tools"])


def echoed(conversation: Conversation) -> Conversation:
    """The same where an agent sends text back as vLLM's parser gives it: with the line's end that stood before the call."""
    messages = [
        each | {"content": each["content"] + "\n"} if each.get("tool_calls") and each.get("content") else each
        for each in conversation.messages
    ]
    return Conversation(messages, conversation.tools, given=1)


def turns(agent: Agent) -> list[dict[str, Any]]:
    """The turns of the harnesses' task, with arguments in the spelling of vLLM's parser."""
    found = task(agent, thinking=False)
    for turn in found:
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)
    return found


def _read(message: Message) -> Message:
    """A message as vLLM gives it to the template: arguments as objects."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return message | ({"tool_calls": calls} if calls else {})
