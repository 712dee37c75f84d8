"""Google's own client against a running proxy with a scripted engine."""

import asyncio
import json

import pytest
from aiohttp import web
from google import genai
from google.genai import errors, types

from evener.api.types import Budget
from tests.unit.proxy.stub import fails

LS = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
PWD = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": '{"command": "pwd"}'}}
BASH = types.FunctionDeclaration(
    name="bash",
    description="Run a command.",
    parameters=types.Schema(type="OBJECT", properties={"command": types.Schema(type="STRING")}, required=["command"]),
)
TOOLS = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[BASH])])


def client(proxy, key) -> genai.Client:
    retries = types.HttpRetryOptions(attempts=1)
    return genai.Client(api_key=key, http_options=types.HttpOptions(base_url=proxy.url, retry_options=retries))


def answers(engine, *, finish=None, after=0.0, **message):
    async def behave(_, body):
        await asyncio.sleep(after)
        reply = engine.sample(body, **message)
        if finish is not None:
            reply["choices"][0]["finish_reason"] = finish
        return web.json_response(reply)

    return behave


async def test_a_document(proxy, engine):
    session, key = await proxy.open()
    engine.script.append(answers(engine, content="let me look", reasoning="hm", tool_calls=[LS, PWD]))
    reply = await client(proxy, key).aio.models.generate_content(model="tiny", contents="hi", config=TOOLS)
    parts = reply.candidates[0].content.parts
    assert reply.text == "let me look"
    assert [part.text for part in parts if part.thought] == ["hm"]
    assert [call.args for call in reply.function_calls] == [{"command": "ls"}, {"command": "pwd"}]
    assert reply.candidates[0].finish_reason == types.FinishReason.STOP
    assert reply.model_version == "tiny"
    assert reply.usage_metadata.candidates_token_count == len(engine.sampled[0]["ids"])
    assert reply.usage_metadata.total_token_count == len(engine.sampled[0]["ids"]) + len(engine.sampled[0]["prompt"])
    (record,) = await proxy.store.load(session)
    assert record.dialect == "gemini"
    assert [call["id"] for call in record.reply["tool_calls"]] == [call.id for call in reply.function_calls]
    assert record.reply["id"] == reply.response_id
    assert engine.asked[0]["tools"][0]["function"]["parameters"]["properties"] == {"command": {"type": "string"}}


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_stream(proxy, engine, blocking):
    _, key = await proxy.open()
    engine.script.append(answers(engine, content="let me\u2028look", reasoning="hm", tool_calls=[LS, PWD]))
    google = client(proxy, key)
    asked = {"model": "tiny", "contents": "hi", "config": TOOLS}
    if blocking:
        chunks = await asyncio.to_thread(lambda: list(google.models.generate_content_stream(**asked)))
    else:
        chunks = [chunk async for chunk in await google.aio.models.generate_content_stream(**asked)]
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
    assert [(part.text, part.thought) for part in parts[:2]] == [("hm", True), ("let me\u2028look", None)]
    assert [part.function_call.args for part in parts[2:]] == [{"command": "ls"}, {"command": "pwd"}]
    assert [chunk.candidates[0].finish_reason for chunk in chunks] == [None, None, None, types.FinishReason.STOP]
    assert chunks[0].usage_metadata.prompt_token_count == len(engine.sampled[0]["prompt"])
    assert chunks[-1].usage_metadata.candidates_token_count == len(engine.sampled[0]["ids"])
    assert len({chunk.response_id for chunk in chunks}) == 1


async def test_a_chat_sends_each_reply_back_as_one_message(proxy, engine):
    """The client keeps every chunk of a stream as a content of its own."""
    session, key = await proxy.open()
    engine.script += [
        answers(engine, content="let me look", reasoning="hm", tool_calls=[LS, PWD]),
        answers(engine, content="done"),
        answers(engine, content="bye"),
    ]
    chat = client(proxy, key).aio.chats.create(model="tiny", config=TOOLS)
    calls = [
        part.function_call
        async for chunk in await chat.send_message_stream("hi")
        for part in chunk.candidates[0].content.parts
        if part.function_call
    ]
    results = [types.Part.from_function_response(name="bash", response={"output": call.args["command"]}) for call in calls]
    async for _ in await chat.send_message_stream(results):
        pass
    await chat.send_message("thanks")
    first, second, third = (asked["messages"] for asked in engine.asked)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert second[1:] == [
        {
            "role": "assistant",
            "content": "let me look",
            "reasoning": "hm",
            "tool_calls": [
                {"id": calls[0].id, "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}},
                {"id": calls[1].id, "type": "function", "function": {"name": "bash", "arguments": '{"command":"pwd"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": calls[0].id, "content": "ls"},
        {"role": "tool", "tool_call_id": calls[1].id, "content": "pwd"},
    ]
    assert third[4:] == [{"role": "assistant", "content": "done"}, {"role": "user", "content": "thanks"}]
    records = await proxy.store.load(session)
    assert [record.request["messages_base"] for record in records] == [0, 1, 2]


async def test_everything_of_a_request_reaches_the_engine_or_the_record(proxy, engine):
    session, key = await proxy.open()
    image = types.Part.from_bytes(data=b"\xff\xfe\xfd", mime_type="image/png")
    config = types.GenerateContentConfig(
        system_instruction="be terse", temperature=0.1, top_k=3, max_output_tokens=77, stop_sequences=["END"], seed=5
    )
    await client(proxy, key).aio.models.generate_content(model="tiny", contents=["what is it?", image], config=config)
    (asked,) = engine.asked
    assert asked["messages"] == [
        {"role": "system", "content": "be terse"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is it?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,//79"}},
            ],
        },
    ]
    assert (asked["max_tokens"], asked["stop"], asked["temperature"]) == (77, ["END"], 0.7)
    (record,) = await proxy.store.load(session)
    assert record.request["asked"] == {
        "temperature": 0.1,
        "topK": 3,
        "maxOutputTokens": 77,
        "stopSequences": ["END"],
        "seed": 5,
    }


async def test_a_cut_reply_says_so(proxy, engine):
    _, key = await proxy.open()
    engine.script.append(answers(engine, content="a b", finish="length"))
    reply = await client(proxy, key).aio.models.generate_content(model="tiny", contents="hi")
    assert reply.candidates[0].finish_reason == types.FinishReason.MAX_TOKENS


async def test_arguments_that_are_no_json_reach_the_agent_and_the_record(proxy, engine):
    session, key = await proxy.open()
    bad = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": '{"command": "l'}}
    engine.script.append(answers(engine, content=None, tool_calls=[bad]))
    reply = await client(proxy, key).aio.models.generate_content(model="tiny", contents="hi", config=TOOLS)
    assert reply.function_calls[0].args == {"INVALID_JSON": '{"command": "l'}
    assert reply.candidates[0].finish_reason == types.FinishReason.STOP
    (record,) = await proxy.store.load(session)
    assert record.reply["tool_calls"][0]["arguments"] == '{"command": "l'


async def test_tokens_are_counted_as_the_engine_counts_them(proxy, engine):
    _, key = await proxy.open()
    counted = await client(proxy, key).aio.models.count_tokens(model="tiny", contents="hello")
    expected = engine.prompt({"messages": [{"role": "user", "content": "hello"}], "tools": None})
    assert counted.total_tokens == len(expected)
    inner = {"model": "models/tiny", "contents": [{"parts": [{"text": "hello"}]}], "systemInstruction": "be terse"}
    url = f"{proxy.url}/v1beta/models/tiny:countTokens?key={key}"
    async with proxy.http.post(url, json={"generateContentRequest": inner}) as response:
        assert json.loads(await response.read())["totalTokens"] > counted.total_tokens
    assert engine.asked == []


async def test_models(proxy, engine):
    _, key = await proxy.open(policy="org/tiny:1")
    google = client(proxy, key)
    model = await google.aio.models.get(model="org/tiny:1")
    assert (model.name, model.input_token_limit) == ("models/org/tiny:1", engine.window)
    assert [each.name async for each in await google.aio.models.list()] == ["models/org/tiny:1"]
    with pytest.raises(errors.ClientError) as raised:
        await google.aio.models.get(model="other")
    assert (raised.value.code, raised.value.status) == (404, "NOT_FOUND")
    assert (await google.aio.models.generate_content(model="org/tiny:1", contents="hi")).model_version == "org/tiny:1"


async def test_errors_have_googles_words(proxy, engine):
    session, key = await proxy.open(budget=Budget(calls=1))
    google = client(proxy, key)
    forced = types.GenerateContentConfig(response_mime_type="application/json")
    for code, status, asked in (
        (400, "INVALID_ARGUMENT", google.aio.models.generate_content(model="tiny", contents="hi", config=forced)),
        (401, "UNAUTHENTICATED", client(proxy, "wrong").aio.models.generate_content(model="tiny", contents="hi")),
        (404, "NOT_FOUND", google.aio.models.embed_content(model="tiny", contents="hi")),
        (404, "NOT_FOUND", google.aio.caches.list()),
    ):
        with pytest.raises(errors.ClientError) as raised:
            await asked
        assert (raised.value.code, raised.value.status) == (code, status)
        assert raised.value.message
    engine.script.append(fails(400, "bad tool", "tools"))
    with pytest.raises(errors.ClientError, match="bad tool"):
        await google.aio.models.generate_content(model="tiny", contents="hi")
    await google.aio.models.generate_content(model="tiny", contents="hi")
    last = await google.aio.models.generate_content(model="tiny", contents="hi")
    assert last.text.startswith("[evener] ")
    await proxy.admin.seal(session)
    with pytest.raises(errors.ClientError) as raised:
        await google.aio.models.generate_content(model="tiny", contents="hi")
    assert (raised.value.code, raised.value.status) == (403, "PERMISSION_DENIED")


async def test_a_failing_engine_is_unavailable_and_says_when_to_ask_again(proxy, engine):
    engine.script += [fails(503)] * 20
    _, key = await proxy.open()
    with pytest.raises(errors.ServerError) as raised:
        await client(proxy, key).aio.models.generate_content(model="tiny", contents="hi")
    assert (raised.value.code, raised.value.status) == (503, "UNAVAILABLE")
    assert raised.value.details["error"]["details"][-1]["retryDelay"] == "5s"


async def test_other_http_methods_are_refused(proxy):
    _, key = await proxy.open()
    async with proxy.http.put(proxy.url + "/v1beta/models/tiny:generateContent", headers={"x-goog-api-key": key}) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert json.loads(await response.read())["error"]["code"] == 405


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_late_reply_is_kept_alive_by_empty_texts(hasty, engine, blocking):
    engine.script.append(answers(engine, content="done", after=0.6))
    _, key = await hasty.open()
    google = client(hasty, key)
    if blocking:
        chunks = await asyncio.to_thread(lambda: list(google.models.generate_content_stream(model="tiny", contents="hi")))
    else:
        chunks = [chunk async for chunk in await google.aio.models.generate_content_stream(model="tiny", contents="hi")]
    assert len(chunks) > 2
    assert [chunk.text for chunk in chunks][-2:] == ["", "done"]
    assert [chunk.candidates[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_late_error_reaches_a_streaming_client(hasty, engine, blocking):
    async def late(request, body):
        await asyncio.sleep(0.5)
        return await fails(400, "too late")(request, body)

    engine.script.append(late)
    _, key = await hasty.open()
    google = client(hasty, key)

    async def stream():
        if blocking:
            return await asyncio.to_thread(lambda: list(google.models.generate_content_stream(model="tiny", contents="hi")))
        return [chunk async for chunk in await google.aio.models.generate_content_stream(model="tiny", contents="hi")]

    with pytest.raises(errors.ClientError, match="too late") as raised:
        await stream()
    assert (raised.value.code, raised.value.status) == (400, "INVALID_ARGUMENT")


async def test_a_stream_without_events_is_a_json_array(hasty, engine):
    async def late(request, body):
        await asyncio.sleep(0.5)
        return await fails(400, "too late")(request, body)

    engine.script += [answers(engine, content="done", reasoning="hm", after=0.5), late]
    _, key = await hasty.open()
    url = hasty.url + "/v1beta/models/tiny:streamGenerateContent"
    replies = []
    for _ in range(2):
        async with hasty.http.post(
            url, json={"contents": [{"parts": [{"text": "hi"}]}]}, headers={"x-goog-api-key": key}
        ) as response:
            assert response.headers["Content-Type"] == "application/json"
            replies.append(await response.read())
    assert replies[0].startswith(b" ")
    assert [chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in json.loads(replies[0])] == ["hm", "done"]
    assert json.loads(replies[1])[0]["error"]["message"] == "too late"
