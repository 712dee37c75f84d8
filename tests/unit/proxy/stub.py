"""A real proxy on free ports, on fakeredis, with a scripted engine that speaks vLLM's wire format."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import fakeredis
from aiohttp import web
from pydantic import SecretStr

from evener.api.types import Budget, Sampling
from evener.ids import new_id
from evener.proxy_admin import ProxyAdmin
from evener.settings import Settings
from evener.trace.session import SessionSpec
from evener.trace.store import TraceStore
from evener_proxy.delivery import Patience
from evener_proxy.service import serve
from tests.ports import free_port

TOKEN = "admin-token"
Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class StubEngine:
    """Answers `/v1/chat/completions` from ``script`` first, then with random tokens; keeps what it was asked and sampled.

    Its tokeniser gives a token a byte. ``versions``: say `weight_versions` as our CPU engine does.
    """

    version: int = 0
    versions: bool = False
    window: int = 32768
    script: list[Behaviour] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    sampled: list[dict[str, Any]] = field(default_factory=list)
    tokenized: int = 0
    aborted: int = 0
    url: str = ""

    def prompt(self, body: dict[str, Any]) -> list[int]:
        text = "".join(f"<{message['role']}>{json.dumps(message)}" for message in body["messages"])
        return list((json.dumps(body.get("tools")) + text).encode())

    def completion(self, body: dict[str, Any], message: dict[str, Any], finish: str) -> list[int]:
        """The tokens that say ``message``."""
        return [random.randrange(256, 32000) for _ in range(min(random.randint(3, 9), body.get("max_tokens", 9)))]

    def sample(self, body: dict[str, Any], *, finish: str | None = None, **message: Any) -> dict[str, Any]:
        """A reply in vLLM's shape."""
        finish = finish or ("tool_calls" if message.get("tool_calls") else "stop")
        prompt, ids = self.prompt(body), self.completion(body, message, finish)
        count = len(ids)
        logprobs = [-random.random() * 3 for _ in ids]
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": f"reply {len(self.sampled)}", "reasoning": None, **message},
            "logprobs": {"content": [{"token": "x", "logprob": p, "bytes": [120], "top_logprobs": []} for p in logprobs]},
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": ids,
        }
        if self.versions:
            choice["weight_versions"] = [{"version": str(self.version), "start": 0, "end": count}]
        self.sampled.append({"prompt": prompt, "ids": ids, "logprobs": logprobs})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
        return {"id": "chatcmpl-x", "choices": [choice], "usage": usage, "prompt_token_ids": prompt}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if is_probe(body):
            sampled = len(self.sampled)
            reply = self.sample(body)
            del self.sampled[sampled:]
            return web.json_response(reply)
        self.asked.append(body)
        try:
            if self.script:
                return await self.script.pop(0)(request, body)
            return web.json_response(self.sample(body))
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def tokenize(self, request: web.Request) -> web.Response:
        self.tokenized += 1
        return web.json_response({"count": len(self.prompt(await request.json())), "max_model_len": self.window})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "served", "max_model_len": self.window}]})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version) if self.version else "default"})


def is_probe(body: dict[str, Any]) -> bool:
    """Whether the proxy asks for itself, to learn what the engine gives."""
    return body["messages"] == [{"role": "user", "content": "."}]


@contextlib.asynccontextmanager
async def serving(engine: StubEngine) -> AsyncIterator[None]:
    """Serve the engine on a free port."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", engine.chat)
    app.router.add_post("/tokenize", engine.tokenize)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_get("/weight_info", engine.weight_info)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engine.url = f"http://127.0.0.1:{port}"
    try:
        yield
    finally:
        await runner.cleanup()


def fails(status: int, message: str = "down", param: str | None = None) -> Behaviour:
    """An engine's error."""

    async def behave(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": message, "param": param, "code": status}}, status=status)

    return behave


@dataclass
class Proxy:
    """A running proxy and ways into it."""

    url: str
    admin: ProxyAdmin
    admin_url: str
    store: TraceStore
    http: aiohttp.ClientSession
    redis: fakeredis.FakeAsyncRedis
    stop: asyncio.Event

    async def open(self, **fields: Any) -> tuple[str, str]:
        """A fresh session: its id and key."""
        spec = session_spec(**fields)
        return spec.session_id, await self.admin.open(spec)

    async def chat(self, key: str, messages: list[dict[str, Any]] | None = None, **fields: Any) -> tuple[int, Any]:
        """One call without streaming: status and document."""
        body = {"model": "tiny", "messages": messages or [{"role": "user", "content": "hello"}], **fields}
        async with self.http.post(
            self.url + "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as response:
            return response.status, json.loads(await response.read())


def session_spec(**fields: Any) -> SessionSpec:
    rollout = new_id()
    values: dict[str, Any] = {
        "session_id": f"{rollout}.1",
        "rollout_id": rollout,
        "attempt": 1,
        "harness": "pi",
        "policy": "tiny",
        "purpose": "train",
        "sampling": Sampling(temperature=0.7),
        "budget": Budget(),
    }
    return SessionSpec(**(values | fields))


async def eventually(check: Callable[[], Awaitable[bool]], *, seconds: float = 20.0) -> None:
    """Wait until ``check`` holds."""
    async with asyncio.timeout(seconds):
        while not await check():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_proxy(
    engine: StubEngine,
    redis: Any,
    patience: Patience | None = None,
    retry_s: float = 60.0,
    others: Sequence[StubEngine] = (),
    **fields: Any,
) -> AsyncIterator[Proxy]:
    settings = Settings(
        data=Path("/nonexistent"),
        proxy_port=free_port(),
        admin_port=free_port(),
        engine_urls=[each.url for each in (engine, *others)],
        admin_token=SecretStr(TOKEN),
        **fields,
    )
    stop, ready = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(serve(settings, redis, stop=stop, ready=ready, patience=patience, retry_s=retry_s))
    async with asyncio.timeout(10):
        await asyncio.wait((serving, asyncio.create_task(ready.wait())), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    connector = aiohttp.TCPConnector(limit=0)
    async with ProxyAdmin(settings.admin, TOKEN) as admin, aiohttp.ClientSession(connector=connector) as http:
        yield Proxy(settings.proxy, admin, settings.admin, TraceStore(redis), http, redis, stop)
    stop.set()
    async with asyncio.timeout(15):
        await serving
