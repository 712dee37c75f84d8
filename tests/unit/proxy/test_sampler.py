"""Real replies of vLLM 0.32 (tests/fixtures/vllm), and replies that must not be believed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from pydantic import SecretStr

from evener.api.types import Budget
from evener.engines.replies import parse_reply
from evener.engines.sampler import EngineRefused, EngineUnavailable, SampleRequest, neutral_request
from evener.engines.vllm import VllmSampler
from evener.errors import InfraError
from tests.ports import free_port
from tests.unit.proxy.stub import StubEngine, eventually, fails, running_proxy

FIXTURES = Path(__file__).parents[2] / "fixtures" / "vllm"


def fixture(name: str) -> dict:
    return json.loads((FIXTURES / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["tool_call_real", "reasoning_parser", "stop_string"])
def test_ids_and_logprobs_are_the_engines(name):
    reply = fixture(name)
    choice = reply["choices"][0]
    sample = parse_reply(json.dumps(reply).encode())
    assert sample.prompt_ids.tolist() == reply["prompt_token_ids"]
    assert sample.completion_ids.tolist() == choice["token_ids"]
    assert np.array_equal(sample.logprobs, np.array([each["logprob"] for each in choice["logprobs"]["content"]], np.float32))
    assert (sample.prompt_ids.dtype, sample.completion_ids.dtype, sample.logprobs.dtype) == (np.int32, np.int32, np.float32)
    assert sample.level == "tokens"
    assert sample.reasoning == choice["message"]["reasoning"]
    assert (sample.finish_reason, sample.stop_reason) == (choice["finish_reason"], choice["stop_reason"])


def test_a_tool_calls_arguments_are_the_models_text():
    (call,) = parse_reply(json.dumps(fixture("tool_call_real")).encode()).tool_calls
    assert (call.name, call.arguments) == ("bash", '{"command": "ls -la"}')


@pytest.mark.parametrize("missing", ["prompt_token_ids", "token_ids", "logprobs"])
def test_some_of_the_token_data_are_no_data(missing):
    reply = fixture("tool_call_real")
    (reply if missing == "prompt_token_ids" else reply["choices"][0])[missing] = None
    sample = parse_reply(json.dumps(reply).encode())
    assert (sample.level, sample.flaw) == ("text", "prompt ids, token ids and log-probabilities are not all there")


def test_excluded_reasoning_nulls_the_tokens_and_is_level_text():
    sample = parse_reply(json.dumps(fixture("reasoning_excluded")).encode())
    assert (sample.level, sample.completion_tokens, len(sample.completion_ids)) == ("text", 15, 0)


def test_prompt_ids_are_the_replys_own_wherever_the_name_stands_beside_it():
    def believed(change, compact=True) -> list[int]:
        reply = fixture("tool_call_real")
        change(reply)
        return parse_reply(json.dumps(reply, separators=(",", ":") if compact else None).encode()).prompt_ids.tolist()

    def say(reply, **fields):
        reply["choices"][0]["message"].update(fields)

    own = fixture("tool_call_real")["prompt_token_ids"]
    for compact in (True, False):
        assert believed(lambda _: None, compact) == own
        assert believed(lambda reply: say(reply, content='{"prompt_token_ids":[1,2,3],"x":"\\"'), compact) == own
        assert believed(lambda reply: say(reply, annotations={"prompt_token_ids": [1, 2, 3]}), compact) == own
        assert believed(lambda reply: reply.pop("prompt_token_ids"), compact) == []
        assert believed(lambda reply: reply.update(prompt_token_ids=None), compact) == []
    with pytest.raises(InfraError):
        believed(lambda reply: reply.update(prompt_token_ids=["]"]))


def changed(change) -> bytes:
    reply = fixture("tool_call_real")
    change(reply, reply["choices"][0])
    return json.dumps(reply).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda _, choice: choice["token_ids"].pop(),
        lambda _, choice: choice["logprobs"]["content"].pop(),
        lambda reply, _: reply["usage"].update(completion_tokens=1),
        lambda reply, _: reply["prompt_token_ids"].pop(),
        lambda _, choice: choice["logprobs"]["content"][3].update(logprob=0.001),
        lambda _, choice: choice["logprobs"]["content"][3].update(logprob=None),
        lambda _, choice: choice["logprobs"]["content"][3].update(logprob=-1e300),
        lambda _, choice: choice["token_ids"].__setitem__(0, 2**40),
        lambda _, choice: choice.update(weight_versions=[{"version": "1", "start": 0, "end": 5}]),
    ],
)
def test_contradicting_token_data_is_not_kept(change):
    sample = parse_reply(changed(change))
    assert sample.flaw
    assert (sample.level, len(sample.prompt_ids), len(sample.completion_ids)) == ("text", 0, 0)
    assert sample.tool_calls[0].name == parse_reply(changed(lambda *_: None)).tool_calls[0].name


def test_tokens_that_are_named_by_id_must_be_the_ids():
    def name(_, choice, first=0):
        for place, (each, token) in enumerate(zip(choice["logprobs"]["content"], choice["token_ids"], strict=True)):
            each["token"] = f"token_id:{token + first * (place == 2)}"

    assert parse_reply(changed(name)).level == "tokens"
    assert "other tokens" in parse_reply(changed(lambda reply, choice: name(reply, choice, 1))).flaw


def test_versions_per_token():
    count = len(fixture("tool_call_real")["choices"][0]["token_ids"])
    runs = [{"version": "default", "start": 0, "end": 5}, {"version": "3", "start": 5, "end": count}]
    sample = parse_reply(changed(lambda _, choice: choice.update(weight_versions=runs)))
    assert sample.versions.tolist() == [0] * 5 + [3] * (count - 5)


def test_a_cut_call_may_be_asked_again():
    with pytest.raises(EngineUnavailable):
        parse_reply(changed(lambda _, choice: choice.update(finish_reason="abort")))


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"choices": [], "usage": {"prompt_tokens": 1}}'])
def test_a_malformed_reply_is_an_engine_fault(body):
    with pytest.raises(InfraError) as error:
        parse_reply(body)
    assert error.value.cause == "engine_error"


def request() -> SampleRequest:
    return neutral_request("served", [], 1.0)


@pytest.fixture
async def sampler(engine):
    sampler = VllmSampler(engine.url)
    yield sampler
    await sampler.close()


async def test_status_probe_and_tokenize(sampler, engine):
    engine.version = 5
    status = await sampler.status()
    assert (status.model, status.window, status.version) == ("served", engine.window, 5)
    assert await sampler.probe("served") == "tokens"
    assert await sampler.tokenize(request()) == len(b"null")


async def test_context_errors_are_told_apart(sampler, engine):
    async def full(_, __):
        return web.json_response(fixture("err_ctx"), status=400)

    taken = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    engine.script += [full, fails(400, "no", "tools"), fails(400, taken, "max_tokens"), fails(502)]
    with pytest.raises(EngineRefused) as refused:
        await sampler.sample(request())
    assert refused.value.context_full
    for _ in range(2):
        with pytest.raises(EngineRefused) as refused:
            await sampler.sample(request())
        assert not refused.value.context_full
    with pytest.raises(EngineUnavailable):
        await sampler.sample(request())


async def test_nobody_listening_is_unavailable():
    sampler = VllmSampler("http://127.0.0.1:9")
    with pytest.raises(EngineUnavailable):
        await sampler.sample(request())
    await sampler.close()


async def hosted(request: web.Request) -> web.Response:
    """An API that knows the published fields only, wants a key and gives no tokens."""
    if request.headers.get("Authorization") != "Bearer sk-vendor":
        return web.json_response({"error": {"message": "no key"}}, status=401)
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "small"}, {"id": "large"}]})
    if request.path != "/v1/chat/completions":
        return web.json_response({"error": {"message": "not found"}}, status=404)
    body = await request.json()
    if unknown := set(body) & {"top_k", "return_token_ids"}:
        return web.json_response({"error": {"message": f"Unrecognized request arguments: {unknown}"}}, status=400)
    message = {"role": "assistant", "content": f"I am {body['model']}"}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})


async def test_a_hosted_api_works_at_level_text(redis):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hosted)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engine = StubEngine(url=f"http://127.0.0.1:{port}")
    async with running_proxy(engine, redis, engine_key=SecretStr("sk-vendor"), engine_model="large") as proxy:
        session, key = await proxy.open(purpose="eval")

        async def answers() -> bool:
            return (await proxy.chat(key))[0] == 200

        await eventually(answers)
        _, reply = await proxy.chat(key, max_tokens=50)
        assert reply["choices"][0]["message"]["content"] == "I am large"
        record = (await proxy.store.load(session))[-1]
        assert (record.level, record.request["used"]["max_tokens"]) == ("text", 50)
        _, training = await proxy.open()
        assert (await proxy.chat(training))[1]["error"]["code"] == "engine_level"
    await runner.cleanup()


async def test_a_hosted_api_that_does_not_count_serves_evaluations_within_a_context(redis):
    asked: list[Any] = []

    async def told(request: web.Request) -> web.Response:
        asked.append((request.path, await request.json() if request.can_read_body else None))
        return await hosted(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", told)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engine = StubEngine(url=f"http://127.0.0.1:{port}")
    async with running_proxy(engine, redis, engine_key=SecretStr("sk-vendor"), engine_model="large") as proxy:
        session, key = await proxy.open(purpose="eval", budget=Budget(context_tokens=600))
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}

        async def probed() -> bool:
            async with proxy.http.get(proxy.admin_url + "/readyz") as response:
                return (await response.json())["capture_levels"] == {engine.url: "text"}

        await eventually(probed)
        assert (await proxy.chat(key))[0] == 200
        before = [path for path, _ in asked].count("/tokenize")
        long = [{"role": "user", "content": "x" * 1600}]
        assert [(await proxy.chat(key, long))[0] for _ in range(2)] == [200, 200]
        estimate = len(json.dumps(long[0], separators=(",", ":"))) // 4
        assert asked[-1][1]["max_tokens"] in range(600 - estimate - 5, 600 - estimate + 6)
        assert [path for path, _ in asked].count("/tokenize") == before <= 1, "it is not asked again"
        _, reply = await proxy.chat(key, [{"role": "user", "content": "x" * 3000}])
        assert reply["choices"][0]["message"]["content"].startswith("[evener]")
        assert (await proxy.admin.read(session)).budget_spent == "context"
        _, key = await proxy.open(purpose="eval", budget=Budget(context_tokens=1400))
        assert (await proxy.chat(key, [{"role": "user", "content": [image]}]))[0] == 200
        assert asked[-1][1]["max_tokens"] in range(350, 400), "an image is so many tokens, whatever its bytes"
        for path, body in (("/v1/messages/count_tokens", ANTHROPIC), ("/v1beta/models/tiny:countTokens", GEMINI)):
            async with proxy.http.post(proxy.url + path, json=body, headers={"x-api-key": key}) as response:
                assert response.status == 404
                error = (await response.json())["error"]
                assert "does not count tokens" in error["message"]
                assert error.get("type", error.get("status")) in ("not_found_error", "NOT_FOUND")
    await runner.cleanup()


ANTHROPIC = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
GEMINI = {"contents": [{"parts": [{"text": "hi"}]}]}
