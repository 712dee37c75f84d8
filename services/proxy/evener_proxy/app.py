"""The agent side: a key can sample, and nothing else; whatever is not a known route is an error in OpenAI's envelope.

Routes are raw ASGI applications, since the hot one reads the body and writes the response itself. Errors of a call come
here as CallError while the response head is held.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from fastapi import FastAPI
from redis.exceptions import RedisError
from starlette.routing import Route

from evener import log
from evener_proxy.canonical import CallError, Dialect
from evener_proxy.delivery import Delivery, Headers, Receive, Send, send_json
from evener_proxy.dialects.chat import ChatDialect
from evener_proxy.metrics import Metrics
from evener_proxy.sessions import Sessions

MAX_BODY = 64 << 20  # a 1M-token history is about 5 MB; images come inline
Scope = MutableMapping[str, Any]
Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]
_log = log.get("proxy")


def create_app(sessions: Sessions, delivery: Delivery, metrics: Metrics) -> FastAPI:
    """The agent side's application."""
    chat = ChatDialect()
    app = FastAPI(title="evener proxy", openapi_url=None, docs_url=None, redoc_url=None)

    async def completions(scope: Scope, receive: Receive, send: Send) -> None:
        _require(scope, "POST")
        session = await sessions.find(_key(scope))
        request = chat.parse(await _read_body(receive))
        await delivery.answer(session, request, chat, receive, send)

    async def models(scope: Scope, _: Receive, send: Send) -> None:
        _require(scope, "GET")
        session = await sessions.find(_key(scope), cached=False)
        model = {"id": session.spec.policy, "object": "model", "created": int(session.opened), "owned_by": "evener"}
        asked = scope["path"].removeprefix("/v1/models").strip("/")
        if asked not in ("", session.spec.policy):
            raise CallError(404, "model_not_found", f"there is no model {asked!r}, only {session.spec.policy!r}")
        await send_json(send, 200, msgspec.json.encode(model if asked else {"object": "list", "data": [model]}))

    async def healthz(scope: Scope, _: Receive, send: Send) -> None:
        _require(scope, "GET")
        await send_json(send, 200, b'{"status":"ok"}')

    async def unknown(scope: Scope, _receive: Receive, _send: Send) -> None:
        raise CallError(404, "not_found", f"no such route: {scope['method']} {scope['path']}")

    for path, endpoint in (
        ("/v1/chat/completions", completions),
        ("/v1/models", models),
        ("/v1/models/{model:path}", models),
        ("/healthz", healthz),
        ("/{path:path}", unknown),
    ):
        app.router.routes.append(Route(path, endpoint=_Guarded(endpoint, chat, metrics)))
    return app


class _Guarded:
    """Turns what an endpoint raises into an error of the dialect."""

    def __init__(self, endpoint: Endpoint, dialect: Dialect, metrics: Metrics) -> None:
        self._endpoint = endpoint
        self._dialect = dialect
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._endpoint(scope, receive, send)
            return
        except CallError as raised:
            error = raised
        except RedisError as raised:
            _log.error("store_failed", path=scope["path"], error=str(raised))
            error = CallError(503, "capture_unavailable", "the capture store does not answer", retry_after=5)
        self._metrics.errors[error.code] += 1
        headers: Headers = []
        if error.retry_after is not None:
            headers.append((b"retry-after", str(error.retry_after).encode()))
        if error.status == 405:
            headers.append((b"allow", (error.param or "").encode()))
        await send_json(send, error.status, self._dialect.error(error), headers)


def _require(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        message = f"{scope['path']} takes {method}, not {scope['method']}"
        raise CallError(405, "method_not_allowed", message, param=method)


def _key(scope: Scope) -> str | None:
    """The key, wherever the clients of the four dialects put it."""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
        if name in (b"x-api-key", b"x-goog-api-key"):
            return value.decode("latin-1")
    if scope["query_string"]:
        found = parse_qs(scope["query_string"].decode("latin-1")).get("key")
        return found[0] if found else None
    return None


async def _read_body(receive: Receive) -> bytes:
    """The whole body. Raises CallError 413."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallError(400, "invalid_request", "the client left before the request was whole")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY:
            raise CallError(413, "request_too_large", f"the request is larger than {MAX_BODY} bytes")
        chunks.append(chunk)
        if not message.get("more_body"):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
