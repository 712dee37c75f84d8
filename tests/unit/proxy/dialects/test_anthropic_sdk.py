"""Anthropic's own client against a running proxy: what it understands of replies, streams, errors, counts and models."""

import asyncio
import json
from collections.abc import AsyncIterator

import anthropic
import pytest
from aiohttp import web

from evener.api.types import Budget
from tests.unit.proxy.stub import fails

TOOLS = [{"name": "bash", "description": "Run.", "input_schema": {"type": "object"}}]
CALL = {"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
BROKEN = {"id": "chatcmpl-tool-2", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls'}}
ASKED = {"model": "tiny", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def opened(proxy) -> AsyncIterator[tuple[str, anthropic.AsyncAnthropic]]:
    session, key = await proxy.open()
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key=key, max_retries=0) as client:
        yield session, client


@pytest.fixture
def client(opened) -> anthropic.AsyncAnthropic:
    return opened[1]


def answers(engine, *, choice=None, **message):
    async def behave(_, body):
        reply = engine.sample(body, **message)
        reply["choices"][0] |= choice or {}
        return web.json_response(reply)

    return behave


async def ask(client, *, stream, **fields) -> anthropic.types.Message:
    """One message, in either mode."""
    if not stream:
        return await client.messages.create(**(ASKED | fields))
    async with client.messages.stream(**(ASKED | fields)) as streamed:
        return await streamed.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_text_and_calls(opened, proxy, engine, stream):
    session, client = opened
    engine.script.append(answers(engine, content="let me look", reasoning="hm", tool_calls=[CALL, CALL]))
    message = await ask(client, stream=stream, tools=TOOLS)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *calls = message.content
    assert (thinking.thinking, text.text) == ("hm", "let me look")
    assert thinking.signature
    assert [call.input for call in calls] == [{"command": "ls"}] * 2
    assert len({call.id for call in calls}) == 2
    assert message.id.startswith("msg_")
    assert (message.role, message.model, message.stop_reason) == ("assistant", "tiny", "tool_use")
    (record,) = await proxy.store.load(session)
    assert record.dialect == "anthropic"
    assert [call["id"] for call in record.reply["tool_calls"]] == [call.id for call in calls]
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(record.prompt_ids), len(record.completion_ids))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_comes_back_as_it_was(client, engine, stream):
    """Each history that reaches the engine begins with the one before it, message by message."""
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        engine.script.append(answers(engine, content=None, reasoning="hm", tool_calls=[CALL, BROKEN]))
        message = await ask(client, stream=stream, tools=TOOLS, system="be terse", messages=messages)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"result of {block.id}"}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    first, second, third = (asked["messages"] for asked in engine.asked)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    roles = ["system", "user"] + ["assistant", "tool", "tool"] * 2
    assert [message["role"] for message in third] == roles
    assert [message["content"] for message in third[3:5]] == [f"result of {call['id']}" for call in third[2]["tool_calls"]]
    assert third[2]["reasoning"] == "hm"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_record_keeps_the_models_own_text_of_broken_arguments(opened, proxy, engine, stream):
    session, client = opened
    engine.script.append(answers(engine, tool_calls=[BROKEN]))
    message = await ask(client, stream=stream, tools=TOOLS)
    assert message.content[-1].input == {"INVALID_JSON": '{"command": "ls'}
    (record,) = await proxy.store.load(session)
    assert record.reply["tool_calls"][0]["arguments"] == '{"command": "ls'


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences_and_limits(client, engine, stream):
    engine.script += [
        answers(engine, choice={"stop_reason": "DONE"}),
        answers(engine, choice={"finish_reason": "length"}),
    ]
    message = await ask(client, stream=stream, stop_sequences=["DONE"], extra_body={"temperature": 0.1})
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "DONE")
    assert (engine.asked[0]["stop"], engine.asked[0]["max_tokens"]) == (["DONE"], 64)
    assert engine.asked[0]["temperature"] == 0.7
    assert (await ask(client, stream=stream)).stop_reason == "max_tokens"


async def test_the_beta_client_too(client, engine):
    message = await client.beta.messages.create(
        **ASKED,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        metadata={"user_id": "u"},
        thinking={"type": "adaptive"},
    )
    assert message.stop_reason == "end_turn"


async def test_tokens_are_counted_by_the_engine_and_leave_no_call(opened, proxy, engine):
    session, client = opened
    counted = await client.messages.count_tokens(model="tiny", messages=ASKED["messages"], system="be terse", tools=TOOLS)
    assert (engine.tokenized, engine.asked) == (1, [])
    message = await client.messages.create(**ASKED, system="be terse", tools=TOOLS)
    assert counted.input_tokens == message.usage.input_tokens
    assert len(await proxy.store.load(session)) == 1


async def test_models(client):
    listed = [model async for model in client.models.list()]
    assert [(model.id, model.type, model.display_name) for model in listed] == [("tiny", "model", "tiny")]
    model = await client.models.retrieve("tiny")
    assert model == listed[0]
    assert (model.max_input_tokens, model.created_at.year >= 2024) == (32768, True)
    with pytest.raises(anthropic.NotFoundError, match="other"):
        await client.models.retrieve("other")


@pytest.mark.parametrize("field", ["tool_choice", "output_config"])
async def test_constrained_decoding_is_refused_in_training_only(client, proxy, engine, field):
    wanted = {
        "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }[field]
    with pytest.raises(anthropic.BadRequestError, match=field):
        await client.messages.create(**ASKED, tools=TOOLS, **{field: wanted})
    assert engine.asked == []
    _, key = await proxy.open(purpose="eval")
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key=key, max_retries=0) as other:
        await other.messages.create(**ASKED, tools=TOOLS, **{field: wanted})
    (asked,) = engine.asked
    passed = {name: asked.get(name) for name in ("tool_choice", "response_format")}
    schema = {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}}
    assert (
        passed
        == {
            "tool_choice": {"tool_choice": "required", "response_format": None},
            "output_config": {"tool_choice": None, "response_format": schema},
        }[field]
    )


async def test_errors_have_the_vendors_types(client, proxy, engine):
    async def raised(wanted, caller=client, **fields):
        with pytest.raises(wanted) as error:
            await caller.messages.create(**(ASKED | fields))
        assert error.value.body["type"] == "error"
        return error.value.body["error"]["type"]

    assert await raised(anthropic.BadRequestError, messages=[]) == "invalid_request_error"
    engine.script += [fails(503)] * 9
    assert await raised(anthropic.InternalServerError) == "overloaded_error"
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="sk-evener-no", max_retries=0) as stranger:
        assert await raised(anthropic.AuthenticationError, stranger) == "authentication_error"
    session, key = await proxy.open()
    await proxy.admin.seal(session)
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key=key, max_retries=0) as sealed:
        assert await raised(anthropic.PermissionDeniedError, sealed) == "permission_error"
    _, key = await proxy.open(budget=Budget(context_tokens=100))
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key=key, max_retries=0) as full:
        last = await full.messages.create(**(ASKED | {"messages": [{"role": "user", "content": "x" * 300}]}))
        assert (last.stop_reason, "context window" in last.content[0].text) == ("end_turn", True)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "kind"),
    [
        ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
        ("POST", "/v1/messages", {}, 401, "authentication_error"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("GET", "/v1/models", {"anthropic-version": "2023-06-01"}, 401, "authentication_error"),
        ("GET", "/v1/files", {"x-api-key": "sk-evener-no"}, 404, "not_found_error"),
    ],
)
async def test_the_dialect_is_told_by_path_and_headers(proxy, method, path, headers, status, kind):
    async with proxy.http.request(method, proxy.url + path, headers=headers) as response:
        assert response.status == status
        assert (await response.json())["error"]["type"] == kind


async def test_a_late_stream_is_kept_alive_and_its_error_raised(hasty, engine):
    async def late(request, body):
        await asyncio.sleep(0.5)
        return await fails(400, "too late")(request, body)

    async def slow(_, body):
        await asyncio.sleep(0.5)
        return web.json_response(engine.sample(body, content="here"))

    engine.script += [slow, slow, late]
    _, key = await hasty.open()
    async with hasty.http.post(
        hasty.url + "/v1/messages", data=json.dumps(ASKED | {"stream": True}), headers={"x-api-key": key}
    ) as response:
        raw = await response.read()
    assert raw.startswith(b'event: ping\ndata: {"type":"ping"}\n\nevent: ping\n')
    assert raw.count(b"event: message_stop") == 1
    async with anthropic.AsyncAnthropic(base_url=hasty.url, api_key=key, max_retries=0) as client:
        message = await ask(client, stream=True)
        assert message.content[0].text == "here"
        with pytest.raises(anthropic.APIStatusError, match="too late"):
            await ask(client, stream=True)
