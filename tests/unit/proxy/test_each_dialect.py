"""What holds in every dialect alike: errors keep their status, a spent budget is an answer, who leaves ends the sampling."""

import asyncio
import json

import pytest
from aiohttp import web

from evener.api.types import Budget
from evener_proxy import app
from evener_proxy.delivery import Patience
from evener_proxy.dialects.anthropic import AnthropicDialect
from evener_proxy.dialects.chat import ChatDialect
from evener_proxy.dialects.gemini import GeminiDialect
from evener_proxy.dialects.responses import ResponsesDialect
from tests.unit.proxy.asks import DIALECTS, TERMINAL, events, kind_of, question, said
from tests.unit.proxy.stub import eventually, fails, running_proxy

KINDS = {
    400: {"openai": "invalid_request_error", "anthropic": "invalid_request_error", "gemini": "INVALID_ARGUMENT"},
    401: {"openai": "authentication_error", "anthropic": "authentication_error", "gemini": "UNAUTHENTICATED"},
    413: {"openai": "invalid_request_error", "anthropic": "request_too_large", "gemini": "INVALID_ARGUMENT"},
    429: {"openai": "requests", "anthropic": "rate_limit_error", "gemini": "RESOURCE_EXHAUSTED"},
    500: {"openai": "server_error", "anthropic": "api_error", "gemini": "INTERNAL"},
    503: {"openai": "server_error", "anthropic": "overloaded_error", "gemini": "UNAVAILABLE"},
}


def asking(proxy, dialect, key, *, headers=None, **fields):
    path, body = question(dialect, **fields)
    return proxy.http.post(proxy.url + path, json=body, headers={"x-api-key": key, **(headers or {})})


async def answered(proxy, dialect, key, **fields):
    """Status, headers and body."""
    async with asking(proxy, dialect, key, **fields) as response:
        return response.status, response.headers, await response.read()


def slow(engine, seconds):
    async def behave(_, body):
        await asyncio.sleep(seconds)
        return web.json_response(engine.sample(body))

    return behave


def check_error(dialect, status, answer):
    got, _, body = answer
    document = json.loads(body)
    vendor = "openai" if dialect in ("chat", "responses") else dialect
    assert (got, kind_of(dialect, document)) == (status, KINDS[status][vendor])
    if dialect == "gemini":
        assert document["error"]["code"] == status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_error_keeps_its_status_in_the_dialects_envelope(engine, redis, dialect, stream):
    async with running_proxy(engine, redis, retry_s=0.0) as proxy:
        session, key = await proxy.open()
        check_error(dialect, 401, await answered(proxy, dialect, "sk-evener-no", stream=stream))
        for engines, status in ((400, 400), (413, 413), (429, 429), (404, 503), (502, 503)):
            engine.script = [fails(engines, "no")]
            answer = await answered(proxy, dialect, key, stream=stream)
            check_error(dialect, status, answer)
            assert answer[1].get("Retry-After") == ("5" if status in (429, 503) else None)
        assert (await proxy.admin.read(session)).in_flight == 0
        assert await proxy.store.load(session) == []


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_body_that_is_too_large_is_413(proxy, engine, dialect, monkeypatch):
    monkeypatch.setitem(app._read_body.__kwdefaults__, "limit", 1000)
    _, key = await proxy.open()
    check_error(dialect, 413, await answered(proxy, dialect, key, text="x" * 1000))
    assert engine.asked == []


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_fault_of_the_proxys_own_has_the_dialects_envelope(proxy, dialect, monkeypatch):
    for kind in (ChatDialect, ResponsesDialect, AnthropicDialect, GeminiDialect):
        monkeypatch.setattr(kind, "parse", lambda *_: 1 / 0)
    _, key = await proxy.open()
    check_error(dialect, 500, await answered(proxy, dialect, key))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_spent_budget_is_a_clean_last_answer(proxy, engine, dialect, stream):
    session, key = await proxy.open(budget=Budget(calls=1))
    await answered(proxy, dialect, key, stream=stream)
    status, headers, body = await answered(proxy, dialect, key, stream=stream)
    assert (status, headers["x-evener-budget"]) == (200, "calls")
    if stream:
        assert b"[evener] This session has ended" in body
        ends = [TERMINAL[dialect](data) for data in events(body)]
        assert ends == [False] * (len(ends) - 1) + [True]
    else:
        assert said(dialect, json.loads(body)).startswith("[evener] This session has ended")
    assert len(engine.asked) == len(await proxy.store.load(session)) == 1
    assert (await proxy.admin.read(session)).budget_spent == "calls"


@pytest.mark.parametrize("first_byte", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_agent_that_leaves_aborts_the_engine_within_a_second(engine, redis, dialect, stream, first_byte):
    patience = Patience(grace_s=0.05 if first_byte else 60.0, keep_alive_s=0.05)
    async with running_proxy(engine, redis, patience=patience) as proxy:
        engine.script.append(slow(engine, 60))
        session, key = await proxy.open()
        began = asyncio.Event()

        async def ask():
            async with asking(proxy, dialect, key, stream=stream) as response:
                await response.content.readany()
                began.set()
                await response.read()

        agent = asyncio.create_task(ask())

        async def asked() -> bool:
            return len(engine.asked) == 1 and (began.is_set() or not first_byte)

        await eventually(asked)
        agent.cancel()

        async def aborted() -> bool:
            return engine.aborted == 1

        await eventually(aborted, seconds=1.0)

        async def released() -> bool:
            return (await proxy.admin.read(session)).in_flight == 0

        await eventually(released)
        assert began.is_set() == first_byte
        assert await proxy.store.load(session) == []


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_late_document_is_a_document_after_spaces(hasty, engine, dialect):
    engine.script.append(slow(engine, 0.6))
    _, key = await hasty.open()
    status, _, body = await answered(hasty, dialect, key)
    assert (status, body[:2], said(dialect, json.loads(body))) == (200, b"  ", "reply 0")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stream_has_one_terminal_event_and_it_is_the_last(hasty, engine, dialect, late):
    engine.script.append(slow(engine, 0.6 if late else 0.0))
    _, key = await hasty.open()
    _, _, body = await answered(hasty, dialect, key, stream=True)
    ends = [TERMINAL[dialect](data) for data in events(body)]
    assert ends == [False] * (len(ends) - 1) + [True]


def test_a_response_head_is_held_as_long_as_the_dialects_clients_surely_wait():
    graces = [dialect.grace_s for dialect in (ChatDialect, ResponsesDialect, AnthropicDialect, GeminiDialect)]
    assert (graces, Patience().grace_s) == ([10.0, 10.0, 10.0, 5.0], None)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_key_decides_the_session_whatever_else_an_agent_says(proxy, dialect):
    session, key = await proxy.open()
    other, _ = await proxy.open()
    names = ("session_id", "session-id", "x-session-id", "x-session-affinity", "conversation_id", "x-claude-code-session-id")
    status, _, _ = await answered(proxy, dialect, key, headers=dict.fromkeys(names, other))
    assert (status, len(await proxy.store.load(session)), len(await proxy.store.load(other))) == (200, 1, 0)


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1beta/models/tiny:countTokens"])
async def test_counting_needs_a_key(proxy, engine, path):
    dialect = "gemini" if "beta" in path else "anthropic"
    _, body = question(dialect)
    for headers in ({}, {"x-api-key": "sk-evener-no"}):
        async with proxy.http.post(proxy.url + path, json=body, headers=headers) as response:
            check_error(dialect, 401, (response.status, response.headers, await response.read()))
    assert engine.tokenized == 0


async def test_tools_that_only_a_vendor_runs_are_counted(proxy, engine):
    _, key = await proxy.open()
    tools = {
        "chat": [{"type": "web_search"}, {"type": "function", "function": {"name": "ls"}}],
        "responses": [{"type": "web_search"}, {"type": "function", "name": "ls", "parameters": {"type": "object"}}],
        "anthropic": [
            {"type": "web_search_20250305", "name": "web_search"},
            {"name": "ls", "input_schema": {"type": "object"}},
        ],
        "gemini": [{"googleSearch": {}}, {"functionDeclarations": [{"name": "ls"}]}],
    }
    for dialect, given in tools.items():
        path, body = question(dialect)
        async with proxy.http.post(proxy.url + path, json=body | {"tools": given}, headers={"x-api-key": key}) as response:
            assert response.status == 200
        assert [tool["function"]["name"] for tool in engine.asked[-1]["tools"]] == ["ls"]
    async with proxy.http.get(proxy.admin_url + "/metrics") as response:
        assert "evener_proxy_hosted_tools_total 4\n" in await response.text()


async def test_the_engine_is_asked_whole_and_under_an_id_of_our_own(proxy, engine):
    session, key = await proxy.open()
    engine.script.append(fails(500))
    for dialect in DIALECTS:
        await answered(proxy, dialect, key, stream=True, headers={"x-request-id": "theirs"})
    assert not any({"stream", "n"} & set(body) for body in engine.asked)
    calls = [record.call_id for record in await proxy.store.load(session)]
    assert [body["request_id"] for body in engine.asked] == [
        f"{calls[0]}-0",
        f"{calls[0]}-1",
        *(f"{each}-0" for each in calls[1:]),
    ]
