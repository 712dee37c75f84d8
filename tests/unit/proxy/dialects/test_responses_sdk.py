"""OpenAI's own client against the running proxy: both forms, tools, thinking, errors, models."""

import asyncio
import json

import openai
import pytest
from aiohttp import web
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseIncompleteEvent,
    ResponseReasoningItem,
)

from tests.unit.proxy.stub import fails

TOOLS = [
    {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "agents", "description": "x", "tools": [{"type": "function", "name": "spawn"}]},
    {"type": "web_search"},
]


def client(proxy, key) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key=key, max_retries=0)


def tool(name, arguments):
    return {"id": "chatcmpl-tool-1", "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [tool("bash", '{"command":  "ls"}'), tool("patch", '{"input": "+x"}'), tool("agents__spawn", "{}")]


def answers(engine, *, finish=None, late=0.0, **message):
    async def behave(_, body):
        await asyncio.sleep(late)
        reply = engine.sample(body, **message)
        reply["choices"][0]["finish_reason"] = finish or reply["choices"][0]["finish_reason"]
        return web.json_response(reply)

    return behave


def checked(response, engine):
    reasoning, message, function, custom, named = response.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.summary[0].text == "hm"
    assert message.content[0].text == response.output_text == "let me look"
    assert isinstance(function, ResponseFunctionToolCall)
    assert (function.name, function.arguments, function.namespace) == ("bash", '{"command":  "ls"}', None)
    assert isinstance(custom, ResponseCustomToolCall)
    assert (custom.name, custom.input) == ("patch", "+x")
    assert (named.name, named.namespace) == ("spawn", "agents")
    assert len({call.call_id for call in (function, custom, named)}) == 3
    assert response.status == "completed"
    assert response.usage.output_tokens == len(engine.sampled[0]["ids"])
    assert response.usage.input_tokens == len(engine.sampled[0]["prompt"])


async def test_without_streaming(proxy, engine):
    session, key = await proxy.open()
    engine.script.append(answers(engine, content="let me look", reasoning="hm", tool_calls=CALLS))
    response = await client(proxy, key).responses.create(model="tiny", input="hi", tools=TOOLS, metadata={"a": "b"})
    checked(response, engine)
    assert (response.metadata, response.model, len(response.tools)) == ({"a": "b"}, "tiny", 4)
    (record,) = await proxy.store.load(session)
    assert (record.dialect, record.completion_ids.tolist()) == ("responses", engine.sampled[0]["ids"])
    assert [call["id"] for call in record.reply["tool_calls"]] == [item.call_id for item in response.output[2:]]
    assert [each["function"]["name"] for each in engine.asked[0]["tools"]] == ["bash", "patch", "agents__spawn"]


async def test_streamed(proxy, engine):
    _, key = await proxy.open()
    engine.script.append(answers(engine, content="let me look", reasoning="hm", tool_calls=CALLS))
    stream = await client(proxy, key).responses.create(model="tiny", input="hi", tools=TOOLS, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert isinstance(events[-1], ResponseCompletedEvent)
    checked(events[-1].response, engine)
    for event in events:
        if index := getattr(event, "output_index", None):
            item_id = getattr(event, "item_id", None) or event.item.id
            assert item_id == events[-1].response.output[index].id


async def test_the_clients_own_accumulator(proxy, engine):
    _, key = await proxy.open()
    engine.script.append(answers(engine, content="let me look", reasoning="hm", tool_calls=CALLS))
    async with client(proxy, key).responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        checked(await stream.get_final_response(), engine)
    assert "response.output_text.delta" in kinds
    assert "response.custom_tool_call_input.delta" in kinds


async def test_a_turn_that_is_sent_back_extends_the_history(proxy, engine):
    session, key = await proxy.open()
    history = [{"role": "user", "content": "hi"}]
    for turn in range(3):
        engine.script.append(answers(engine, content=f"turn {turn}", reasoning="hm", tool_calls=CALLS))
        response = await client(proxy, key).responses.create(
            model="tiny", input=history, tools=TOOLS, instructions="be terse", include=["reasoning.encrypted_content"]
        )
        history += response.output
        for item in response.output[2:]:
            kind = "custom_tool_call_output" if item.type == "custom_tool_call" else "function_call_output"
            history.append({"type": kind, "call_id": item.call_id, "output": f"{turn}"})
    asked = [body["messages"] for body in engine.asked]
    assert [len(messages) for messages in asked] == [2, 6, 10]
    assert asked[1][:2] == asked[0]
    assert asked[2][:6] == asked[1]
    assert asked[1][2]["reasoning"] == "hm"
    assert asked[1][2]["tool_calls"][0]["function"]["arguments"] == '{"command":  "ls"}'
    assert [record.request["messages_base"] for record in await proxy.store.load(session)] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_is_cut_is_incomplete(proxy, engine, stream):
    _, key = await proxy.open()
    engine.script.append(answers(engine, content="let", finish="length"))
    got = await client(proxy, key).responses.create(model="tiny", input="hi", stream=stream)
    if stream:
        last = [event async for event in got][-1]
        assert isinstance(last, ResponseIncompleteEvent)
        got = last.response
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_limits_reach_the_engine_and_wishes_the_record(proxy, engine):
    session, key = await proxy.open()
    await client(proxy, key).responses.create(model="tiny", input="hi", max_output_tokens=7, temperature=0.1, top_p=0.5)
    assert (engine.asked[0]["max_tokens"], engine.asked[0]["temperature"], engine.asked[0]["top_p"]) == (7, 0.7, 1.0)
    (record,) = await proxy.store.load(session)
    assert record.request["asked"] == {"temperature": 0.1, "top_p": 0.5, "max_output_tokens": 7}


@pytest.mark.parametrize(
    "field",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "bash"}},
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
    ],
)
async def test_constrained_decoding_is_refused_in_training_only(proxy, engine, field):
    _, key = await proxy.open()
    with pytest.raises(openai.BadRequestError, match="constrained"):
        await client(proxy, key).responses.create(model="tiny", input="hi", tools=TOOLS, **field)
    assert engine.asked == []
    _, key = await proxy.open(purpose="eval")
    await client(proxy, key).responses.create(model="tiny", input="hi", tools=TOOLS, **field)
    assert {"tool_choice", "response_format"} & set(engine.asked[0])


async def test_errors_are_those_that_the_client_knows(proxy, engine):
    with pytest.raises(openai.AuthenticationError):
        await client(proxy, "wrong").responses.create(model="tiny", input="hi")
    session, key = await proxy.open()
    with pytest.raises(openai.BadRequestError) as wrong:
        await client(proxy, key).responses.create(model="tiny", input="hi", previous_response_id="resp_1")
    assert wrong.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        await client(proxy, key).responses.retrieve("resp_1")
    async with proxy.http.get(proxy.url + "/v1/responses", headers={"Authorization": f"Bearer {key}"}) as response:
        assert (response.status, response.headers["allow"]) == (405, "POST")
    engine.script += [fails(400, "This model's maximum context length is 9 tokens.", "input_tokens")]
    last = await client(proxy, key).responses.create(model="tiny", input="hi")
    assert (last.status, "context window" in last.output_text) == ("completed", True)
    engine.script += [fails(503)] * 20
    with pytest.raises(openai.InternalServerError):
        await client(proxy, key).responses.create(model="tiny", input="hi")
    await proxy.admin.seal(session)
    with pytest.raises(openai.PermissionDeniedError):
        await client(proxy, key).responses.create(model="tiny", input="hi")


async def test_a_compressed_body_is_refused(proxy):
    _, key = await proxy.open()
    headers = {"Authorization": f"Bearer {key}", "Content-Encoding": "zstd"}
    body = b"\x28\xb5\x2f\xfd\x00"
    async with proxy.http.post(proxy.url + "/v1/responses", data=body, headers=headers) as response:
        assert response.status == 400
        assert "zstd" in (await response.json())["error"]["message"]


async def test_a_late_error_is_raised_by_the_client(hasty, engine):
    async def late(request, body):
        await asyncio.sleep(0.5)
        return await fails(400, "too late")(request, body)

    engine.script.append(late)
    _, key = await hasty.open()
    stream = await client(hasty, key).responses.create(model="tiny", input="hi", stream=True)
    with pytest.raises(openai.APIError, match="too late"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_late_reply_is_kept_alive(hasty, engine, stream):
    engine.script.append(answers(engine, content="late", late=0.5))
    _, key = await hasty.open()
    got = await client(hasty, key).responses.create(model="tiny", input="hi", stream=stream)
    if stream:
        got = [event async for event in got][-1].response
    assert got.output_text == "late"


async def test_the_models_are_those_of_chat(proxy):
    _, key = await proxy.open()
    assert [model.id async for model in client(proxy, key).models.list()] == ["tiny"]
    assert (await client(proxy, key).models.retrieve("tiny")).object == "model"


async def test_what_an_agent_sends_raw_is_answered_in_events(proxy):
    _, key = await proxy.open()
    body = {"model": "tiny", "input": [{"role": "user", "content": "hi"}], "stream": True}
    async with proxy.http.post(proxy.url + "/v1/responses", json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = (await response.read()).decode().strip().split("\n\n")
    assert json.loads(events[-1].split("\ndata: ")[1])["type"] == "response.completed"
    assert "[DONE]" not in events[-1]
