"""One call through a real proxy: what the agent gets, what the engine is asked, what is captured."""

import asyncio

import numpy as np
import openai
import pytest
from aiohttp import web

from evener.api.types import Budget
from tests.unit.proxy.stub import eventually

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
CALL = {"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


def client(proxy, key) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key=key, max_retries=0)


def answers(engine, **message):
    async def behave(_, body):
        return web.json_response(engine.sample(body, **message))

    return behave


async def test_exact_recorded_tokens_are_those_that_the_engine_sampled(proxy, engine):
    session, key = await proxy.open()
    messages = [{"role": "system", "content": "be terse"}, {"role": "user", "content": "hi"}]
    for turn in range(5):
        status, reply = await proxy.chat(key, messages)
        assert status == 200
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
    records = await proxy.store.load(session)
    assert [record.number for record in records] == [1, 2, 3, 4, 5]
    for record, sampled in zip(records, engine.sampled, strict=True):
        assert record.prompt_ids.tolist() == sampled["prompt"]
        assert record.completion_ids.tolist() == sampled["ids"]
        assert np.array_equal(record.logprobs, np.array(sampled["logprobs"], np.float32))
        assert record.level == "tokens"


async def test_only_new_messages_are_stored_and_texts_once(proxy):
    session, key = await proxy.open()
    messages = [{"role": "system", "content": "be terse"}, {"role": "user", "content": "hi"}]
    for turn in range(3):
        _, reply = await proxy.chat(key, messages, tools=TOOLS)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
    records = await proxy.store.load(session)
    assert [len(record.request["messages"]) for record in records] == [1, 2, 2]
    assert [record.request["messages_base"] for record in records] == [0, 1, 2]
    digests = {record.request["tools_digest"] for record in records}
    digests |= {digest for record in records for digest in record.request["system_digests"]}
    texts = await proxy.store.texts(session, digests)
    assert set(texts) == digests
    assert len(texts) == 2


async def test_openai_sdk_without_streaming(proxy, engine):
    _, key = await proxy.open()
    engine.script.append(answers(engine, content="let me look", reasoning="hm", tool_calls=[CALL]))
    reply = await client(proxy, key).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], tools=TOOLS
    )
    choice = reply.choices[0]
    assert reply.id.startswith("chatcmpl-")
    assert reply.id != "chatcmpl-x"
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "let me look"
    assert choice.message.tool_calls[0].function.arguments == '{"command": "ls"}'
    assert choice.message.tool_calls[0].id.startswith("call_")
    assert reply.usage.completion_tokens == len(engine.sampled[0]["ids"])


async def test_openai_sdk_streamed(proxy, engine):
    session, key = await proxy.open()
    engine.script.append(answers(engine, content="let me look", reasoning="hm", tool_calls=[CALL, CALL]))
    stream = await client(proxy, key).chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "let me look"
    assert [call.index for call in calls] == [0, 1]
    assert len({call.id for call in calls}) == 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    assert all(not body.get("stream") for body in engine.asked)
    (record,) = await proxy.store.load(session)
    assert [call["id"] for call in record.reply["tool_calls"]] == [call.id for call in calls]


async def test_sampling_is_the_sessions_whatever_the_agent_asks(proxy, engine):
    session, key = await proxy.open()
    await proxy.chat(
        key, temperature=0.1, top_p=0.5, top_k=3, frequency_penalty=1, logit_bias={"5": 100}, n=4, seed=1, stop="x"
    )
    (asked,) = engine.asked
    sampling = {name: asked[name] for name in ("temperature", "top_p", "top_k", "stop", "model")}
    assert sampling == {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "stop": ["x"], "model": "served"}
    assert not {"logit_bias", "n", "seed"} & set(asked)
    neutral = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    assert neutral.items() <= asked.items(), "or the engine takes the model's own"
    (record,) = await proxy.store.load(session)
    assert record.request["asked"]["temperature"] == 0.1
    assert record.request["asked"]["n"] == 4
    assert record.request["used"]["temperature"] == 0.7


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "bash"}}},
    ],
)
async def test_constrained_decoding_is_refused_in_training_only(proxy, engine, field):
    session, key = await proxy.open()
    status, reply = await proxy.chat(key, tools=TOOLS, **field)
    assert (status, reply["error"]["code"]) == (400, "constrained_decoding")
    assert engine.asked == []
    assert (await proxy.admin.read(session)).in_flight == 0
    _, key = await proxy.open(purpose="eval")
    assert (await proxy.chat(key, tools=TOOLS, **field))[0] == 200
    assert next(iter(field)) in engine.asked[0]


@pytest.mark.parametrize("body", [b"{", b"{}", b'{"messages": []}', b'{"messages": [{"role": 1}]}', b'{"messages": "x"}'])
async def test_a_malformed_request_is_400_and_leaves_no_call(proxy, engine, body):
    session, key = await proxy.open()
    async with proxy.http.post(proxy.url + "/v1/chat/completions", data=body, headers={"x-api-key": key}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert engine.asked == []
    assert (await proxy.admin.seal(session)).sealed.committed == 0


async def test_the_developer_role_reaches_the_engine_as_system(proxy, engine):
    _, key = await proxy.open()
    await proxy.chat(key, [{"role": "developer", "content": "be terse"}, {"role": "user", "content": "hi"}])
    assert [message["role"] for message in engine.asked[0]["messages"]] == ["system", "user"]


async def test_two_hundred_calls_at_once(proxy, engine):
    sessions = [await proxy.open() for _ in range(20)]
    keys = [key for _, key in sessions] * 10
    results = await asyncio.gather(*(proxy.chat(key, [{"role": "user", "content": f"call {i}"}]) for i, key in enumerate(keys)))
    assert {status for status, _ in results} == {200}
    recorded = {
        (tuple(record.prompt_ids.tolist()), tuple(record.completion_ids.tolist()))
        for session, _ in sessions
        for record in await proxy.store.load(session)
    }
    assert recorded == {(tuple(each["prompt"]), tuple(each["ids"])) for each in engine.sampled}
    assert len(recorded) == 200


async def test_versions_are_the_engines_word_where_it_says(proxy, engine):
    engine.versions, engine.version = True, 7
    session, key = await proxy.open()
    await proxy.chat(key)
    (record,) = await proxy.store.load(session)
    assert set(record.versions.tolist()) == {7}
    assert record.version_completion == 7


async def test_bounded_staleness_an_engine_with_its_first_weights_gets_no_call(proxy, engine):
    session, key = await proxy.open(oldest_version=2)
    status, reply = await proxy.chat(key)
    assert (status, reply["error"]["code"]) == (503, "engine_unavailable")
    assert engine.asked == []
    engine.version = 3
    assert (await proxy.chat(key))[0] == 200
    assert (await proxy.admin.read(session)).fault is None


@pytest.mark.parametrize("says", [True, False])
async def test_a_pinned_session_refuses_another_version(proxy, engine, says):
    engine.versions, engine.version = says, 3
    session, key = await proxy.open(version=3, purpose="eval")

    async def right() -> bool:
        return (await proxy.chat(key))[0] == 200

    await eventually(right)
    committed = len(await proxy.store.load(session))
    engine.version = 4
    status, reply = await proxy.chat(key)
    assert (status, reply["error"]["code"]) == (503, "version_changed")
    state = await proxy.admin.read(session)
    assert state.fault == "version_changed"
    assert len(await proxy.store.load(session)) == committed


async def test_level_text_is_refused_in_training_and_kept_in_evaluation(proxy, engine):
    def without_ids(body):
        reply = engine.sample(body)
        reply["prompt_token_ids"] = reply["choices"][0]["token_ids"] = reply["choices"][0]["logprobs"] = None
        return reply

    async def behave(_, body):
        return web.json_response(without_ids(body))

    engine.script += [behave, behave]
    session, key = await proxy.open()
    assert (await proxy.chat(key))[0] == 503
    assert (await proxy.admin.read(session)).fault == "engine_level"
    session, key = await proxy.open(purpose="eval")
    assert (await proxy.chat(key))[0] == 200
    (record,) = await proxy.store.load(session)
    assert (record.level, len(record.completion_ids)) == ("text", 0)


async def test_max_tokens_stays_within_window_and_budget(proxy, engine):
    engine.window = 2000
    _, key = await proxy.open(budget=Budget(sampled_tokens=500))
    await asyncio.sleep(1.2)  # the engine's status is asked for every second
    await proxy.chat(key, max_tokens=300)
    assert engine.asked[-1]["max_tokens"] == 300
    assert engine.tokenized == 0
    long = [{"role": "user", "content": "x" * 1600}]
    await proxy.chat(key, long, max_tokens=100_000)
    assert engine.tokenized == 1
    assert engine.asked[-1]["max_tokens"] == 2000 - len(engine.prompt({"messages": long}))
    _, key = await proxy.open(budget=Budget(sampled_tokens=50_000))
    await proxy.chat(key, long, max_tokens=100_000)
    assert "max_tokens" not in engine.asked[-1]
