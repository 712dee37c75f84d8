"""Closed by default: who may enter, what a spent budget or a sealed session says, and what the admin side tells."""

import asyncio

import pytest
from aiohttp import web

from evener.api.types import Budget
from evener.errors import InfraError
from evener.proxy_admin import ProxyAdmin, SessionConflict
from tests.unit.proxy.stub import fails, session_spec

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer sk-evener-no"}, {"Authorization": "Basic x"}, {"x-api-key": ""}]
)
async def test_closed_by_default_no_session_no_answer(proxy, engine, headers):
    async with proxy.http.post(proxy.url + "/v1/chat/completions", json=BODY, headers=headers) as response:
        assert response.status == 401
        assert (await response.json())["error"]["code"] == "invalid_api_key"
    assert engine.asked == []


async def test_a_key_is_taken_wherever_clients_put_it(proxy):
    _, key = await proxy.open()
    places = [{"Authorization": f"Bearer {key}"}, {"x-api-key": key}, {"x-goog-api-key": key}]
    for headers in places:
        async with proxy.http.post(proxy.url + "/v1/chat/completions", json=BODY, headers=headers) as response:
            assert response.status == 200
    async with proxy.http.post(proxy.url + f"/v1/chat/completions?key={key}", json=BODY) as response:
        assert response.status == 200


async def test_the_key_is_not_in_redis(proxy):
    _, key = await proxy.open()
    await proxy.chat(key)
    stored = b""
    for name in await proxy.redis.keys("*"):
        is_hash = await proxy.redis.type(name) == b"hash"
        values = (await proxy.redis.hgetall(name)).values() if is_hash else [await proxy.redis.get(name)]
        stored += b"".join([name, *values])
    assert key.removeprefix("sk-evener-").encode() not in stored


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("POST", "/v1beta/models/tiny", 405),
        ("POST", "/v1beta/models/tiny:embedContent", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/", 404),
        ("GET", "/v1/sessions/x", 404),
        ("GET", "/metrics", 404),
    ],
)
async def test_anything_else_is_an_error_in_the_dialect_and_leaves_no_call(proxy, method, path, status):
    session, key = await proxy.open()
    async with proxy.http.request(method, proxy.url + path, headers={"x-api-key": key}) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"]
    assert (await proxy.admin.seal(session)).sealed.aborted == 0


@pytest.mark.parametrize(
    ("path", "headers", "body", "marks"),
    [
        ("/v1/messages/batches", {}, {}, {"type"}),
        ("/v1beta/models/x:embedContent", {}, {}, {"status"}),
        ("/v2/anything", {"anthropic-version": "2023-06-01"}, {}, {"type"}),
        ("/v2/anything", {"x-goog-api-key": "k"}, {}, {"status"}),
        ("/", {}, {"contents": []}, {"status"}),
        ("/", {}, {"messages": [], "system": "x"}, {"type"}),
        ("/", {}, {"messages": []}, {"param"}),
        ("/", {}, None, {"param"}),
    ],
)
async def test_an_unknown_path_is_404_in_the_callers_dialect(proxy, path, headers, body, marks):
    async with proxy.http.post(proxy.url + path, json=body, headers=headers) as response:
        error = (await response.json())["error"]
        assert response.status == 404
    assert path in error["message"]
    assert marks <= set(error)
    assert ("param" in error) == (marks == {"param"})


async def test_an_unknown_path_is_404_however_long_the_body(proxy):
    body = {"messages": [{"role": "user", "content": "x" * 100_000}]}
    async with proxy.http.post(proxy.url + "/chat/completions", json=body, headers={"Authorization": "Bearer k"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")


async def test_models_are_the_sessions_policy(proxy):
    session, key = await proxy.open(policy="tiny")
    headers = {"x-api-key": key}
    async with proxy.http.get(proxy.url + "/v1/models", headers=headers) as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
    async with proxy.http.get(proxy.url + "/v1/models/tiny", headers=headers) as response:
        assert (await response.json())["id"] == "tiny"
    async with proxy.http.get(proxy.url + "/v1/models/other", headers=headers) as response:
        assert response.status == 404
    await proxy.admin.delete(session)
    async with proxy.http.get(proxy.url + "/v1/models", headers=headers) as response:
        assert response.status == 401


async def test_sealed_is_refused_and_deleted_is_unknown(proxy, engine):
    session, key = await proxy.open()
    assert (await proxy.chat(key))[0] == 200
    first = await proxy.admin.seal(session)
    assert first.sealed.committed == 1
    assert await proxy.admin.seal(session) == first
    status, reply = await proxy.chat(key)
    assert (status, reply["error"]["code"]) == (403, "session_sealed")
    await proxy.admin.delete(session)
    await proxy.admin.delete(session)
    assert (await proxy.chat(key))[0] == 401
    assert len(engine.asked) == 1
    with pytest.raises(InfraError) as error:
        await proxy.admin.read(session)
    assert error.value.cause == "session_lost"


async def test_a_session_is_opened_once_even_after_its_deletion(proxy):
    spec = session_spec()
    await proxy.admin.open(spec)
    with pytest.raises(SessionConflict):
        await proxy.admin.open(spec)
    await proxy.admin.delete(spec.session_id)
    with pytest.raises(SessionConflict):
        await proxy.admin.open(spec)


@pytest.mark.parametrize(
    ("budget", "name"),
    [(Budget(calls=2), "calls"), (Budget(sampled_tokens=12), "tokens"), (Budget(wall_s=0.4), "wall")],
)
async def test_a_spent_budget_ends_in_a_last_reply_outside_of_the_trace(proxy, engine, budget, name):
    session, key = await proxy.open(budget=budget)
    texts = []
    for _ in range(12):
        status, reply = await proxy.chat(key)
        assert status == 200
        texts.append(reply["choices"][0]["message"]["content"])
        if name == "wall":
            await asyncio.sleep(0.1)
    assert texts[0] == "reply 0"
    assert texts[-1].startswith("[evener] This session has ended")
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert len(await proxy.store.load(session)) == len(engine.asked) == sum("[evener]" not in text for text in texts)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with proxy.http.post(proxy.url + "/v1/chat/completions", json=body, headers={"x-api-key": key}) as response:
        assert response.headers["x-evener-budget"] == name
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    state = await proxy.admin.read(session)
    assert state.budget_spent == name
    assert state.in_flight == 0
    assert sum(len(each["ids"]) for each in engine.sampled) == state.sampled_tokens <= budget.sampled_tokens


async def test_concurrent_calls_never_sample_more_than_the_budget(proxy, engine):
    session, key = await proxy.open(budget=Budget(sampled_tokens=30, calls=100))
    results = await asyncio.gather(*(proxy.chat(key, max_tokens=9) for _ in range(20)))
    assert {status for status, _ in results} == {200}
    state = await proxy.admin.read(session)
    assert state.sampled_tokens == 30 == sum(len(each["ids"]) for each in engine.sampled)


async def test_exactly_the_budgeted_calls_reach_the_engine(proxy, engine):
    session, key = await proxy.open(budget=Budget(calls=7))
    results = await asyncio.gather(*(proxy.chat(key, [{"role": "user", "content": str(n)}]) for n in range(100)))
    last = [reply["choices"][0]["message"]["content"].startswith("[evener]") for _, reply in results]
    assert (len(engine.asked), last.count(False), len(await proxy.store.load(session))) == (7, 7, 7)


async def test_a_full_context_ends_the_session(proxy, engine):
    session, key = await proxy.open(budget=Budget(context_tokens=200))
    assert (await proxy.chat(key, max_tokens=20))[0] == 200
    _, reply = await proxy.chat(key, [{"role": "user", "content": "x" * 300}])
    assert "context window" in reply["choices"][0]["message"]["content"]
    assert (await proxy.admin.read(session)).budget_spent == "context"
    assert len(engine.asked) == 1


async def test_the_engines_context_error_is_a_full_context(proxy, engine):
    engine.script.append(fails(400, "This model's maximum context length is 2048 tokens. However, ...", "input_tokens"))
    session, key = await proxy.open()
    _, reply = await proxy.chat(key)
    assert "context window" in reply["choices"][0]["message"]["content"]
    assert (await proxy.admin.read(session)).budget_spent == "context"


async def test_the_admin_side_takes_its_token_only(proxy):
    for token in ("", "wrong", "Bearer"):
        async with ProxyAdmin(proxy.admin_url, token) as admin:
            with pytest.raises(InfraError) as error:
                await admin.read("x")
            assert error.value.cause == "proxy_refused"


async def test_metrics_and_readiness(proxy, engine):
    _, key = await proxy.open()
    await proxy.chat(key)
    await proxy.chat("sk-evener-no")
    async with proxy.http.get(proxy.admin_url + "/metrics") as response:
        text = await response.text()
    assert "evener_proxy_calls_total 1\n" in text
    assert 'evener_proxy_errors_total{code="invalid_api_key"} 1\n' in text
    async with proxy.http.get(proxy.admin_url + "/readyz") as response:
        assert response.status == 200
        assert (await response.json())["capture_levels"] == {engine.url: "tokens"}
    assert await proxy.admin.problem(oldest_version=engine.version) is None
    assert "waits for the policy's weights" in (await proxy.admin.problem(oldest_version=engine.version + 1) or "")
    async with proxy.http.get(proxy.admin_url + "/readyz?oldest_version=new") as response:
        assert response.status == 422
    async with proxy.http.get(proxy.url + "/healthz") as response:
        assert response.status == 200


async def test_a_call_waits_for_the_tokens_that_another_has_reserved(proxy, engine):
    async def slow(_, body):
        await asyncio.sleep(0.3)
        return web.json_response(engine.sample(body))

    engine.script.append(slow)
    _, key = await proxy.open(budget=Budget(sampled_tokens=100))
    await asyncio.gather(*(proxy.chat(key, [{"role": "user", "content": text}], max_tokens=90) for text in "ab"))
    used = len(engine.sampled[0]["ids"])
    assert [body["max_tokens"] for body in engine.asked] == [90, min(90, 100 - used)]


async def test_the_right_key_is_found_beside_a_dummy(proxy):
    _, key = await proxy.open()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    for dummy in ("", "dummy"):
        headers = {"x-api-key": dummy, "Authorization": f"Bearer {key}"}
        async with proxy.http.post(proxy.url + "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200


async def test_a_sealed_session_counts_nothing_and_lists_nothing(proxy, engine):
    session, key = await proxy.open()
    await proxy.admin.seal(session)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with proxy.http.post(proxy.url + "/v1/messages/count_tokens", json=body, headers={"x-api-key": key}) as response:
        assert response.status == 403
    async with proxy.http.get(proxy.url + "/v1/models", headers={"x-api-key": key}) as response:
        assert response.status == 403
    assert engine.tokenized == 0


REMOTE = "http://169.254.169.254/latest"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": REMOTE}}]}]},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": REMOTE}]}]}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": REMOTE}}]}]},
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": REMOTE}]}]}),
        (
            "/v1beta/models/tiny:generateContent",
            {"contents": [{"parts": [{"fileData": {"mimeType": "image/png", "fileUri": REMOTE}}]}]},
        ),
    ],
)
async def test_the_agent_can_only_sample_and_makes_no_engine_fetch(proxy, engine, path, body):
    _, key = await proxy.open()
    body = {"model": "tiny", "max_tokens": 9, **body}
    async with proxy.http.post(proxy.url + path, json=body, headers={"x-api-key": key}) as response:
        assert response.status == 400
        assert "inline" in await response.text()
    assert engine.asked == []
