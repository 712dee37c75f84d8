"""An error whose response head has left is an error for each SDK, streamed or not, and never a reply of nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import httpx2
import openai
import pytest
from google import genai
from google.genai import types

from tests.unit.proxy.stub import Proxy, fails

Ask = Callable[[Proxy, str, int], Awaitable[str]]


async def chat(proxy: Proxy, key: str, retries: int) -> str:
    client = openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key=key, max_retries=retries)
    reply = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    return reply.choices[0].message.content or ""


async def responses(proxy: Proxy, key: str, retries: int) -> str:
    client = openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key=key, max_retries=retries)
    return (await client.responses.create(model="tiny", input="hi")).output_text


async def messages(proxy: Proxy, key: str, retries: int) -> str:
    client = anthropic.AsyncAnthropic(base_url=proxy.url, api_key=key, max_retries=retries)
    reply = await client.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
    return "".join(block.text for block in reply.content if block.type == "text")


async def gemini(proxy: Proxy, key: str, retries: int) -> str:
    options = types.HttpOptions(base_url=proxy.url, retry_options=types.HttpRetryOptions(attempts=1 + retries))
    async with genai.Client(api_key=key, http_options=options).aio as client:
        return (await client.models.generate_content(model="tiny", contents="hi")).text or ""


ASKS: dict[str, Ask] = {"chat": chat, "responses": responses, "anthropic": messages, "gemini": gemini}
RAISED = (openai.APIConnectionError, anthropic.APIConnectionError, httpx2.RemoteProtocolError, aiohttp.ClientPayloadError)


def late(status: int) -> Callable[[Any, Any], Awaitable[Any]]:
    async def behave(request: Any, body: Any) -> Any:
        await asyncio.sleep(0.5)
        return await fails(status, "too late")(request, body)

    return behave


@pytest.mark.parametrize("name", ASKS)
async def test_a_late_error_of_a_document_is_raised(hasty, engine, name):
    engine.script.append(late(400))
    session, key = await hasty.open()
    with pytest.raises(RAISED):
        await ASKS[name](hasty, key, 0)
    assert await hasty.store.load(session) == []
    async with hasty.http.get(hasty.admin_url + "/metrics") as response:
        assert 'evener_proxy_errors_total{code="invalid_request"} 1\n' in await response.text()


@pytest.mark.parametrize("name", ["chat", "responses", "anthropic"])
async def test_a_late_error_is_asked_again_by_the_client_and_is_one_call(hasty, engine, name):
    engine.script.append(late(400))
    session, key = await hasty.open()
    assert await ASKS[name](hasty, key, 1) == "reply 0"
    assert len(await hasty.store.load(session)) == 1


async def test_a_late_error_says_what_it_was_before_it_breaks_off(hasty, engine):
    engine.script.append(late(400))
    _, key = await hasty.open()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    seen = b""
    async with hasty.http.post(hasty.url + "/v1/chat/completions", json=body, headers={"x-api-key": key}) as response:
        while b"too late" not in seen:
            seen += await response.content.readany()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
