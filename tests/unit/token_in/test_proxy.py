"""A conversation is one chain of exact tokens in ``token_in``, whatever the agent does to its history that means nothing."""

import contextlib
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import fakeredis
import pytest

from evener.api.types import Budget
from evener.trace import forks
from evener.trace.graph import build_graph
from evener.trace.prefix import HEADS_KEPT
from evener.trace.record import CallRecord
from evener_proxy.token_in import history
from evener_proxy.token_in.refusals import Refusal
from tests.unit.proxy.stub import Proxy, running_proxy, serving
from tests.unit.token_in.engine import TemplateEngine, same
from tests.unit.token_in.templates import TEMPLATES

Message = dict[str, Any]
NAMED = {template.name: template for template in TEMPLATES}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "run",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
OPENING = [{"role": "system", "content": "You are a coder."}, {"role": "user", "content": "Find the bug in a.py"}]
SAYS = (
    'Let me look. \n<tool_call>\n{"name": "bash",  "arguments": {"command":"ls -la"}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"arguments": {"command" : "cat a.py"}, "name": "bash"}\n</tool_call>\n'
    '<tool_call>\n{"name":"bash","arguments":{"command":"cat b.py", "wait": 1.0}}\n</tool_call><|im_end|>',
    "  The bug is in b.py. \n<|im_end|>",
    '<think>\nmend\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {"command": "true"}}\n</tool_call><|im_end|>',
    "Done.<|im_end|>",
)


@contextlib.asynccontextmanager
async def running(engine: TemplateEngine, redis: Any = None) -> AsyncIterator[Proxy]:
    async with serving(engine), running_proxy(engine, redis or fakeredis.FakeAsyncRedis(), retry_s=1.0) as proxy:
        yield proxy


def careless(message: Message) -> Message:
    """The turn as agents send it back: arguments spelled anew, text trimmed and in a list, thinking dropped."""
    again: Message = {"role": "assistant", "content": None}
    if text := (message["content"] or "").strip():
        again["content"] = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    if message.get("tool_calls"):
        again["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": spelled(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return again


def spelled(arguments: str) -> str:
    """As JavaScript writes it."""
    return json.dumps(json.loads(arguments), separators=(",", ":")).replace("1.0", "1")


def answers(message: Message) -> list[Message]:
    """What the agent says next."""
    calls = message.get("tool_calls") or []
    if not calls:
        return [{"role": "user", "content": "Now mend it"}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": f"result of {call['id'][-4:]}"} for call in calls]


async def converse(
    proxies: list[Proxy], key: str, turns: int, messages: list[Message] | None = None, **fields: Any
) -> list[Message]:
    messages = list(messages or OPENING)
    for turn in range(turns):
        status, reply = await proxies[turn % len(proxies)].chat(key, messages, **({"tools": TOOLS} | fields))
        assert status == 200, reply
        said = reply["choices"][0]["message"]
        messages += [careless(said), *answers(said)]
    return messages


async def records_of(proxy: Proxy, session: str) -> list[CallRecord]:
    return await proxy.store.load(session)


def refusals(records: list[CallRecord]) -> list[str | None]:
    return [record.request["prompt"].get("refused") for record in records]


async def test_a_conversation_is_one_chain() -> None:
    engine = TemplateEngine(SAYS)
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in")
        await converse([proxy], key, 5)
        records = await records_of(proxy, session)
    assert refusals(records) == [Refusal.FIRST, None, None, None, None]
    assert [record.request["prompt"].get("from") for record in records] == [None, 1, 2, 3, 4]
    assert len(build_graph(records).roots) == 1
    for body, record, sampled in zip(engine.asked, records, engine.sampled, strict=True):
        assert same(record.prompt_ids, sampled["prompt"])
        assert engine.given(body) is None or same(engine.given(body), record.prompt_ids)
    for before, record in pairwise(records):
        suffix = engine.policy.decode(record.prompt_ids[len(before.tokens) :])
        assert same(record.prompt_ids[: len(before.tokens)], before.tokens)
        assert suffix.startswith("\n<|im_start|>")
        assert suffix.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert engine.policy.decode(records[2].prompt_ids).endswith(
        "</tool_call><|im_end|>\n<|im_start|>tool\nresult of 0000<|im_end|>\n"
        "<|im_start|>tool\nresult of 0001<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_the_same_conversation_rendered_has_many_roots_and_asks_the_engine_nothing_more() -> None:
    engine = TemplateEngine(SAYS)
    async with running(engine) as proxy:
        session, key = await proxy.open()
        await converse([proxy], key, 5, max_tokens=64)
        records = await records_of(proxy, session)
    assert len(build_graph(records).roots) == 5  # no turn comes back as it was sampled
    assert engine.tokenized == 0
    assert all("kv_transfer_params" not in body for body in engine.asked)
    assert all("prompt" not in record.request for record in records)


async def test_any_replica_goes_on_from_what_another_has_committed() -> None:
    engine, redis = TemplateEngine(SAYS), fakeredis.FakeAsyncRedis()
    async with running(engine, redis) as one, running_proxy(engine, redis, retry_s=1.0) as other:
        session, key = await one.open(prompt_mode="token_in")
        await converse([one, other], key, 5)
        records = await records_of(one, session)
    assert refusals(records) == [Refusal.FIRST, None, None, None, None]
    assert len(build_graph(records).roots) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda messages: messages[2]["content"][0].update(text="Let me think."), Refusal.UNMATCHED),
        (lambda messages: messages[1].update(content="Find the bug in c.py"), Refusal.UNMATCHED),
        (lambda messages: messages[0].update(content="You are a writer."), Refusal.UNMATCHED),
        (lambda messages: messages[2]["tool_calls"][0]["function"].update(arguments='{"command": "ls"}'), Refusal.UNMATCHED),
        (lambda messages: messages[2]["tool_calls"][0].update(id="call_" + "0" * 24), Refusal.UNMATCHED),
        (lambda messages: messages.__delitem__(2), Refusal.UNMATCHED),
        (lambda messages: messages.__delitem__(slice(3, None)), Refusal.NOTHING_NEW),
        (lambda messages: messages[3].update(content=[{"type": "image_url", "image_url": {"url": "data:,x"}}]), Refusal.MEDIA),
    ],
    ids=["text", "user", "system", "arguments", "another reply's id", "turn dropped", "nothing new", "media"],
)
async def test_what_the_agent_changes_on_purpose_is_a_plain_call(change: Any, reason: Refusal) -> None:
    engine = TemplateEngine(SAYS[:1])
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in")
        messages = await converse([proxy], key, 1)
        change(messages)
        if reason == Refusal.MEDIA:
            engine._render = lambda body: [1, 2, 3]  # type: ignore[method-assign]
        status, _ = await proxy.chat(key, messages, tools=TOOLS)
        records = await records_of(proxy, session)
    assert status == 200
    assert refusals(records) == [Refusal.FIRST, reason]
    assert engine.given(engine.asked[-1]) is None
    assert len(build_graph(records).roots) == 2


async def test_ids_that_an_agent_loses_do_not_matter() -> None:
    engine = TemplateEngine(SAYS[:1])
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in")
        messages = await converse([proxy], key, 1)
        messages[2]["tool_calls"][0]["id"] = messages[3]["tool_call_id"] = "bash-1"
        await proxy.chat(key, messages, tools=TOOLS)
        records = await records_of(proxy, session)
    assert refusals(records) == [Refusal.FIRST, None]


async def test_a_turn_that_the_agent_goes_back_to_is_gone_on_from_again() -> None:
    engine = TemplateEngine(SAYS)
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in")
        messages = await converse([proxy], key, 3)
        again = [*messages[:4], {"role": "user", "content": "Stop, do it otherwise"}]
        await proxy.chat(key, again, tools=TOOLS)
        records = await records_of(proxy, session)
    assert records[3].request["prompt"]["from"] == 1
    graph = build_graph(records)
    assert len(graph.roots) == 1
    assert graph.parent[records[3].call_id] == records[0].call_id


async def test_a_conversation_goes_on_after_any_number_of_a_sub_agents_calls() -> None:
    engine, redis = TemplateEngine(SAYS), fakeredis.FakeAsyncRedis()
    async with running(engine, redis) as proxy, running_proxy(engine, redis, retry_s=1.0) as other:
        session, key = await proxy.open(prompt_mode="token_in", budget=Budget(calls=100))
        messages = await converse([proxy], key, 1)
        aside = [{"role": "system", "content": "You look."}, {"role": "user", "content": "Who calls it?"}]
        await converse([proxy], key, HEADS_KEPT + 1, aside)
        for replica in (proxy, other):  # one that knows the session, and one that has to read it
            messages = await converse([replica], key, 1, messages)
        records = await records_of(proxy, session)
    assert [record.request["prompt"].get("from") for record in records[-2:]] == [1, HEADS_KEPT + 3]
    assert len(build_graph(records).roots) == 2


async def test_other_tools_make_another_prompt() -> None:
    engine = TemplateEngine(SAYS)
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in")
        messages = await converse([proxy], key, 1)
        await proxy.chat(key, messages, tools=[*TOOLS, {**TOOLS[0], "function": {**TOOLS[0]["function"], "name": "read"}}])
        assert refusals(await records_of(proxy, session)) == [Refusal.FIRST, Refusal.TOOLS_CHANGED]


async def test_an_engine_that_leaves_the_ids_aside_has_answered_the_plain_request() -> None:
    engine = TemplateEngine(SAYS, takes="messages")
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in")
        await converse([proxy], key, 2)
        records = await records_of(proxy, session)
    assert refusals(records) == [Refusal.FIRST, Refusal.NOT_ECHOED]
    assert engine.given(engine.asked[1]) is not None
    assert same(records[1].prompt_ids, engine.sampled[1]["prompt"])


async def test_an_engine_that_refuses_the_ids_is_asked_plainly() -> None:
    engine = TemplateEngine(SAYS, takes="none")
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in")
        await converse([proxy], key, 2)
        records = await records_of(proxy, session)
    assert refusals(records) == [Refusal.FIRST, Refusal.NOT_TAKEN]
    assert [engine.given(body) is None for body in engine.asked] == [True, False, True]


async def test_a_reply_that_was_cut_is_closed_as_the_template_would() -> None:
    engine = TemplateEngine(["The bug is in", '<tool_call>\n{"name": "bash", "arguments": {}}', "ok<|im_end|>"])
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in")
        await converse([proxy], key, 3, max_tokens=40)
        records = await records_of(proxy, session)
    assert refusals(records) == [Refusal.FIRST, None, None]
    suffixes = [engine.policy.decode(record.prompt_ids[len(before.tokens) :]) for before, record in pairwise(records)]
    assert suffixes == [
        "<|im_end|>\n<|im_start|>user\nNow mend it<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>tool\nresult of 0000<|im_end|>\n<|im_start|>assistant\n",
    ]


@pytest.mark.parametrize(
    ("echoed", "reasons"),
    [
        ({}, [None, None]),
        ({"reasoning_content": " look\n"}, [None, None]),
        ({"reasoning_content": ""}, [None, None]),
        ({"reasoning_content": "do not look"}, [Refusal.UNMATCHED, None]),
        ({"reasoning": "do not look"}, [Refusal.UNMATCHED, None]),
    ],
    ids=["dropped", "trimmed", "empty", "other words", "other words in the engine's field"],
)
async def test_thinking_may_be_dropped_but_not_changed(echoed: Message, reasons: list[str | None]) -> None:
    """What an agent writes in its place the policy sees; once it has, the chain goes on from there."""
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
    says = [f"<think>\nlook\n</think>\n\n{call}", "It is b.py.<|im_end|>", "Yes.<|im_end|>"]
    engine = TemplateEngine(says, NAMED["thinking kept"])
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in")
        messages = await converse([proxy], key, 1)
        messages[2] |= echoed
        await converse([proxy], key, 2, messages)
        records = await records_of(proxy, session)
    assert refusals(records) == [Refusal.FIRST, *reasons]
    shown = engine.policy.decode(records[2].prompt_ids)
    assert ("do not look" in shown) == (reasons[0] is not None)


@pytest.mark.parametrize("again", ["look", "look twice"])
async def test_thinking_that_a_rendered_prompt_shows_may_not_be_changed_either(again: str) -> None:
    """It is of a turn that is in the chain as the agent wrote it, in a prompt of its own or behind its parent."""
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
    for turns in (1, 2):
        says = [f"<think>\nlook\n</think>\n\n{call}"] * turns
        engine = TemplateEngine([*says, "It is b.py.<|im_end|>", "Yes.<|im_end|>", "No.<|im_end|>"], NAMED["thinking kept"])
        async with running(engine) as proxy:
            session, key = await proxy.open(prompt_mode="token_in")
            messages = await converse([proxy], key, turns)
            messages[-2]["reasoning_content"] = "do not look"
            place = len(messages) - 2
            messages = await converse([proxy], key, 2, messages)
            messages[place]["reasoning_content"] = again
            await converse([proxy], key, 1, messages)
            records = await records_of(proxy, session)
        edited, on, last = records[-3:]
        assert edited.request["prompt"].get("from") == (None if turns == 1 else 1)
        assert on.request["prompt"].get("from") == edited.number
        assert (f"<think>\n{again}\n</think>" in engine.policy.decode(last.prompt_ids)) or again == "look"
        # The chain with the first words is there; the one with these is not.
        assert last.request["prompt"].get("from") == (None if turns == 1 else 1) or again == "look"
        assert "do not look" not in engine.policy.decode(last.prompt_ids)


async def test_thinking_of_an_earlier_turn_may_not_be_changed_later_either() -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
    engine = TemplateEngine([f"<think>\nlook\n</think>\n\n{call}", "It is b.py.<|im_end|>"])
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in")
        messages = await converse([proxy], key, 2)
        messages[2]["reasoning_content"] = "do not look"
        await converse([proxy], key, 1, messages)
        records = await records_of(proxy, session)
    assert refusals(records) == [Refusal.FIRST, None, Refusal.UNMATCHED]


@pytest.mark.parametrize(("thinking", "reasons"), [("keep", [None, None]), ("strip", [None, Refusal.THINKING_DROPPED])])
async def test_thinking_that_the_template_strips_is_kept_or_stripped(thinking: str, reasons: list[str | None]) -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
    engine = TemplateEngine(
        [f"<think>\nlook\n</think>\n\n{call}", "It is b.py.<|im_end|>"], NAMED["thinking stripped before the last user"]
    )
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in", thinking=thinking)
        await converse([proxy], key, 3)
        records = await records_of(proxy, session)
    assert refusals(records) == [Refusal.FIRST, *reasons]
    assert ("look" in engine.policy.decode(records[2].prompt_ids)) == (thinking == "keep")


async def test_ids_that_fill_the_window_are_left_for_the_template_to_shorten() -> None:
    thought = "<think>\n" + "so it is " * 200 + "\n</think>\n\nNo.<|im_end|>"
    engine = TemplateEngine([thought, "Yes.<|im_end|>"], NAMED["thinking stripped before the last user"])
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in", budget=Budget(context_tokens=700))
        await converse([proxy], key, 2)
        records = await records_of(proxy, session)
    assert refusals(records) == [Refusal.FIRST, Refusal.CONTEXT_FULL]
    assert len(records[1].prompt_ids) < 700


async def test_a_template_that_cannot_be_read_is_named_before_a_run_begins() -> None:
    engine = TemplateEngine(SAYS, NAMED["no token ends a turn"])
    async with running(engine) as proxy:
        problem = await proxy.admin.prompt_problem()
        session, key = await proxy.open(prompt_mode="token_in")
        await converse([proxy], key, 2)
        records = await records_of(proxy, session)
    assert problem == f"{engine.url}: text, user: {Refusal.NO_STOP}"
    assert refusals(records) == [Refusal.UNSOUND, Refusal.UNSOUND]


async def test_a_template_that_can_be_read_has_no_problem() -> None:
    async with running(TemplateEngine()) as proxy:
        assert await proxy.admin.prompt_problem() is None


async def test_messages_that_nobody_can_compare_are_a_plain_call() -> None:
    engine = TemplateEngine()
    engine._render = lambda body: [1, 2, 3]  # type: ignore[method-assign]
    async with running(engine) as proxy:
        session, key = await proxy.open(prompt_mode="token_in")
        odd = [*OPENING, {"role": "assistant", "tool_calls": [7]}, {"role": "user", "content": "hm"}]
        status, _ = await proxy.chat(key, odd)
        records = await records_of(proxy, session)
    assert status == 200
    assert records[0].request["prompt"] == {"refused": Refusal.UNMATCHED}


def test_numbers_and_orders_of_arguments_are_values() -> None:
    one = history.read([{"role": "assistant", "content": None, "tool_calls": [_call('{"b": 1.0, "a": [1e2]}')]}])
    other = history.read([{"role": "assistant", "content": "", "tool_calls": [_call('{"a":[100],"b":1}')]}])
    third = history.read([{"role": "assistant", "content": "", "tool_calls": [_call('{"a":[100],"b":2}')]}])
    assert one.digests == other.digests != third.digests


def test_arguments_that_nobody_can_read_are_compared_as_text() -> None:
    """Nested too deeply, or cut within: a policy may sample either."""
    deep, cut = "[" * 100_000, '{"command": "ls'
    for arguments in (deep, cut):
        (turn,) = history.read([{"role": "assistant", "content": None, "tool_calls": [_call(arguments)]}]).turns.values()
        assert (turn.calls[0].arguments, turn.calls[0].valid) == (arguments, False)


def _call(arguments: str) -> Message:
    return {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}


def test_every_reason_is_a_cause_of_a_fork_or_says_no_more_than_the_graph() -> None:
    of_the_graph = {Refusal.FIRST, Refusal.UNMATCHED, Refusal.TOOLS_CHANGED, Refusal.NOTHING_NEW}
    assert set(Refusal) - of_the_graph == set(forks._REFUSED)


def test_which_result_answers_which_call_matters() -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [_call("{}"), {**_call("{}"), "id": "call_2"}]}
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": "done"} for n in (1, 2)]
    assert history.read([turn, *results]).digests != history.read([turn, *results[::-1]]).digests
