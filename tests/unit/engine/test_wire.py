"""Shapes and endings of replies, compared with what vLLM 0.32 answered to the same kind of request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import BASH, CONTEXT, Server

pytestmark = pytest.mark.torch
FIXTURES = Path(__file__).parents[2] / "fixtures" / "engine"
HELLO = [{"role": "user", "content": "hello"}]


def sample(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name).read_text())


def shape(value: Any) -> Any:
    """Keys and types; of a list the first element's, null is anything."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


async def test_a_reply_has_vllms_shape(server: Server) -> None:
    reply = await server.chat(messages=HELLO, max_tokens=6, logprobs=True, temperature=1.0)
    expected = sample("chat_tokens_logprobs.json")["response"]
    expected["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = []
    assert reply["choices"][0].pop("weight_versions") == [{"version": "1", "start": 0, "end": 6}]
    assert shape(reply) == shape(expected)


async def test_what_was_not_asked_for_is_null(server: Server) -> None:
    status, reply = await server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})
    assert status == 200
    assert reply["prompt_token_ids"] is None
    assert reply["choices"][0]["token_ids"] is None
    assert reply["choices"][0]["logprobs"] is None


async def test_length_and_stop_ids_and_stop_strings_end_a_call(server: Server) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "seed": 3, "ignore_eos": True, "logprobs": True}
    free = (await server.chat(**fields, max_tokens=20))["choices"][0]
    assert (free["finish_reason"], free["stop_reason"], len(free["token_ids"])) == ("length", None, 20)

    stop_id = free["token_ids"][7]
    first = free["token_ids"].index(stop_id)
    stopped = (await server.chat(**fields, max_tokens=20, stop_token_ids=[stop_id]))["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop_id)
    assert stopped["token_ids"] == free["token_ids"][: first + 1]

    pieces = [entry["token"] for entry in free["logprobs"]["content"]]
    word = next(p for p in pieces[3:] if p.isascii() and p.strip() and not p.startswith("<|"))
    cut = (await server.chat(**fields, max_tokens=20, stop=["never to be seen", word]))["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", word)
    assert word not in cut["message"]["content"]
    assert free["message"]["content"].startswith(cut["message"]["content"])
    assert len(cut["token_ids"]) == len(cut["logprobs"]["content"]) < 20


async def test_eos_is_in_the_ids_and_not_in_the_text(server: Server) -> None:
    eos = 2
    for seed in range(200):
        choice = (await server.chat(messages=HELLO, seed=seed, max_tokens=100))["choices"][0]
        if choice["finish_reason"] == "stop":
            break
    assert choice["token_ids"][-1] == eos
    assert choice["token_ids"].count(eos) == 1
    assert choice["stop_reason"] is None
    assert "<|im_end|>" not in choice["message"]["content"]


async def test_errors_have_vllms_body(server: Server) -> None:
    bad_model = sample("err_bad_model.json")
    status, reply = await server.post("/v1/chat/completions", bad_model["request"])
    assert (status, reply) == (bad_model["status"], bad_model["response"])

    too_long = sample("err_ctx.json")
    status, reply = await server.post("/v1/chat/completions", too_long["request"])
    assert status == too_long["status"]
    expected = too_long["response"]["error"]
    assert {**reply["error"], "message": ""} == {**expected, "message": ""}
    assert reply["error"]["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens. However, ")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "bash"}}}, "tool_choice"),
        ({"n": 2}, "n=2"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text parts"),
        ({"kv_transfer_params": {"prompt_token_ids": [10**6]}}, "prompt_token_ids"),
    ],
)
async def test_what_is_not_implemented_is_refused_by_name(server: Server, fields: dict[str, Any], word: str) -> None:
    status, reply = await server.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO} | fields)
    assert status == 400
    assert word in reply["error"]["message"]


async def test_render_and_tokenize_give_the_ids_that_chat_uses(server: Server) -> None:
    body = {"model": "tiny", "messages": HELLO, "tools": [BASH], "max_tokens": 1}
    used = (await server.chat(**body))["prompt_token_ids"]
    rendered = (await server.post("/v1/chat/completions/render", body))[1]
    assert rendered["token_ids"] == used
    assert rendered["sampling_params"].items() >= {"temperature": 1.0, "max_tokens": 1}.items()
    assert rendered.keys() <= sample("render_chat.json")["response"].keys()
    tokenized = (await server.post("/tokenize", body | {"return_token_strs": True}))[1]
    assert tokenized["tokens"] == used
    assert tokenized.keys() == sample("tokenize_chat.json")["response"].keys()
    text = (await server.post("/detokenize", {"tokens": used}))[1]["prompt"]
    assert text.startswith("<|im_start|>system\n# Tools")
    assert (await server.post("/tokenize", {"prompt": text, "add_special_tokens": False}))[1]["tokens"] == used


async def test_models_version_and_health(server: Server) -> None:
    (model,) = (await server.request("GET", "/v1/models"))[1]["data"]
    assert model.keys() == sample("models.json")["response"]["data"][0].keys()
    assert (model["id"], model["max_model_len"]) == ("tiny", CONTEXT)
    assert (await server.request("GET", "/version"))[1] == {"version": "0.32.0"}
    assert (await server.request("GET", "/health"))[0] == 200


async def test_a_stream_carries_the_same_as_a_reply(server: Server) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "seed": 5, "max_tokens": 12, "logprobs": True}
    choice = (await server.chat(**fields))["choices"][0]
    ask = {"model": "tiny", "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
    status, raw = await server.post("/v1/chat/completions", ask | fields)
    events = raw.decode().split("\n\n")
    assert (status, events[-2:]) == (200, ["data: [DONE]", ""])
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[0]["prompt_token_ids"]
    text = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    assert text == choice["message"]["content"]
    last = chunks[-2]["choices"][0]
    assert last["token_ids"] == choice["token_ids"]
    assert [entry["bytes"] for entry in last["logprobs"]["content"]] == [
        entry["bytes"] for entry in choice["logprobs"]["content"]
    ]
    assert last["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == len(choice["token_ids"])
