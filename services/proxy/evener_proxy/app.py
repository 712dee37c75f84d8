"""The agent side: a key can sample, and nothing else; whatever is not a known route is an error in the caller's dialect.

Routes are raw ASGI applications, since the hot one reads the body and writes the response itself. Errors of a call come
here as CallError while the response head is held.
"""

import contextlib
import hashlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from fastapi import FastAPI
from redis.exceptions import RedisError
from starlette.routing import Route

from evener import log
from evener.trace.store import Sending
from evener_proxy.calls import Calls
from evener_proxy.canonical import CallError, CountingDialect, Dialect, ModelInfo, R
from evener_proxy.delivery import Delivery, Headers, Message, Receive, Send, send_json
from evener_proxy.dialects.anthropic import AnthropicDialect
from evener_proxy.dialects.chat import ChatDialect
from evener_proxy.dialects.gemini import GeminiDialect
from evener_proxy.dialects.responses import ResponsesDialect
from evener_proxy.metrics import Metrics
from evener_proxy.sessions import Sessions

MAX_BODY = 64 << 20  # a 1M-token history is about 5 MB; images come inline
Scope = MutableMapping[str, Any]
Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]
Choose = Callable[[Scope], Dialect[Any]]
_log = log.get("proxy")
_GUESS_BYTES = 1 << 16
_RETRY_HEADERS = (b"x-stainless-retry-count",)  # how the SDKs of OpenAI and Anthropic count their retries
_chat = ChatDialect()
_anthropic = AnthropicDialect()
_responses = ResponsesDialect()
_gemini = GeminiDialect()


def create_app(sessions: Sessions, delivery: Delivery, calls: Calls, metrics: Metrics) -> Endpoint:
    """The agent side's application. Paths without a parameter are looked up before FastAPI, which costs 60 us a call."""
    exact: dict[str, Endpoint] = {}
    routes = _Routes(sessions, delivery, calls)
    app = FastAPI(title="evener proxy", openapi_url=None, docs_url=None, redoc_url=None)
    for path, endpoint, choose in (
        ("/v1/chat/completions", routes.sampling(_chat), _always(_chat)),
        ("/v1/messages", routes.sampling(_anthropic), _always(_anthropic)),
        ("/v1/messages/count_tokens", routes.counting(_anthropic), _always(_anthropic)),
        ("/v1/responses", routes.sampling(_responses), _always(_responses)),
        ("/v1/models", routes.models, dialect_of),
        ("/v1/models/{model:path}", routes.model_methods(), dialect_of),
        ("/v1beta/models", routes.models, dialect_of),
        ("/v1beta/models/{model:path}", routes.model_methods(), dialect_of),
        ("/healthz", _healthz, dialect_of),
        ("/{path:path}", _unknown, dialect_of),
    ):
        guarded = _Guarded(endpoint, choose, metrics)
        app.router.routes.append(Route(path, endpoint=guarded))
        if "{" not in path:
            exact[path] = guarded

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        await (exact.get(scope["path"], app))(scope, receive, send)

    return dispatch


def dialect_of(scope: Scope) -> Dialect[Any]:
    """The dialect in which a caller of a shared or unknown path is answered: the path tells, else the headers.

    Where neither does, the body is looked at (`_unknown`), else it is Chat Completions.
    """
    path: str = scope["path"]
    if path.startswith("/v1beta/") or (path.startswith("/v1/models/") and scope["method"] == "POST"):
        return _gemini
    if path.startswith("/v1/messages"):
        return _anthropic
    names = {name for name, _ in scope["headers"]}
    if b"x-goog-api-key" in names:
        return _gemini
    return _anthropic if names & {b"anthropic-version", b"x-api-key"} else _chat


class _Routes:
    """The endpoints that a key opens."""

    def __init__(self, sessions: Sessions, delivery: Delivery, calls: Calls) -> None:
        self._sessions = sessions
        self._delivery = delivery
        self._calls = calls

    def sampling(self, dialect: Dialect[R]) -> Endpoint:
        """An endpoint that samples."""

        async def sample(scope: Scope, receive: Receive, send: Send) -> None:
            _require(scope, "POST")
            session = await self._sessions.find(_keys(scope))
            body = await _read_body(receive)
            request = dialect.parse(body, _target(scope))
            await self._delivery.answer(session, request, dialect, _sending(scope, body), receive, send)

        return sample

    def counting(self, dialect: CountingDialect[R]) -> Endpoint:
        """An endpoint that counts the tokens of a prompt."""

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            _require(scope, "POST")
            session = await self._sessions.find_open(_keys(scope))
            request = dialect.parse_count(await _read_body(receive), _target(scope))
            await send_json(send, 200, dialect.count(await self._calls.count(session, request)))

        return count

    def model_methods(self) -> Endpoint:
        """A model, and Gemini's methods, `:{method}` after its name, which may hold colons itself."""
        sampling = self.sampling(_gemini)
        methods = {
            "generateContent": sampling,
            "streamGenerateContent": sampling,
            "countTokens": self.counting(_gemini),
        }

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            _, colon, method = scope["path"].rpartition(":")
            endpoint = methods.get(method, _unknown) if colon and scope["method"] != "GET" else self.models
            await endpoint(scope, receive, send)

        return call

    async def models(self, scope: Scope, _: Receive, send: Send) -> None:
        """The list of models, or one model: a session has one."""
        _require(scope, "GET")
        dialect = dialect_of(scope)
        session = await self._sessions.find_open(_keys(scope))
        model = ModelInfo(session.spec.policy, self._calls.window(session), session.opened)
        asked = scope["path"].partition("/models")[2].strip("/")
        if asked not in ("", model.name):
            raise CallError(404, "model_not_found", f"there is no model {asked!r}, only {model.name!r}")
        await send_json(send, 200, dialect.model(model) if asked else dialect.model_list(model))


async def _healthz(scope: Scope, _: Receive, send: Send) -> None:
    _require(scope, "GET")
    await send_json(send, 200, b'{"status":"ok"}')


class _Unrouted(CallError):
    """A path that is no route; the caller's dialect is guessed."""

    def __init__(self, scope: Scope, dialect: Dialect[Any]) -> None:
        super().__init__(404, "not_found", f"no such route: {scope['method']} {scope['path']}")
        self.dialect = dialect


async def _unknown(scope: Scope, receive: Receive, _send: Send) -> None:
    dialect = dialect_of(scope)
    if dialect is _chat and scope["method"] == "POST":
        with contextlib.suppress(CallError):  # of a longer one Chat is the guess
            dialect = _dialect_of_body(await _read_body(receive, limit=_GUESS_BYTES))
    raise _Unrouted(scope, dialect)


def _dialect_of_body(body: bytes) -> Dialect[Any]:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.DecodeError, RecursionError):
        return _chat
    if "contents" in fields:
        return _gemini
    return _anthropic if "messages" in fields and fields & {"system", "anthropic_version"} else _chat


class _Guarded:
    """Turns what an endpoint raises into an error of the caller's dialect."""

    def __init__(self, endpoint: Endpoint, choose: Choose, metrics: Metrics) -> None:
        self._endpoint = endpoint
        self._choose = choose
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dialect = self._choose(scope)
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._endpoint(scope, receive, noted)
            return
        except CallError as raised:
            error = raised
            if isinstance(raised, _Unrouted):
                dialect = raised.dialect
        except RedisError as raised:
            _log.error("store_failed", path=scope["path"], error=str(raised))
            error = CallError(503, "capture_unavailable", "the capture store does not answer", retry_after=5)
        except Exception as raised:  # the supervisor of calls: a fault of ours has the caller's envelope, too
            if started:
                raise
            _log.error("call_failed", path=scope["path"], exc_info=raised)
            error = CallError(500, "internal_error", "the proxy failed")
        self._metrics.errors[error.code] += 1
        headers: Headers = []
        if error.retry_after is not None:
            headers.append((b"retry-after", str(error.retry_after).encode()))
        if error.status == 405:
            headers.append((b"allow", (error.param or "").encode()))
        await send_json(send, error.status, dialect.error(error), headers)


def _always(dialect: Dialect[Any]) -> Choose:
    return lambda _: dialect


def _require(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        message = f"{scope['path']} takes {method}, not {scope['method']}"
        raise CallError(405, "method_not_allowed", message, param=method)


def _sending(scope: Scope, body: bytes) -> Sending:
    again = any(name in _RETRY_HEADERS and value not in (b"", b"0") for name, value in scope["headers"])
    digest = hashlib.sha256(_target(scope).encode())  # in hardware: twice as fast as BLAKE2
    digest.update(body)
    return Sending(digest.digest()[:16], again)


def _target(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    return f"{scope['path']}?{query}" if query else scope["path"]


def _keys(scope: Scope) -> list[str]:
    """The keys that are given, wherever the clients of the four dialects put them; some send a dummy beside the real one."""
    found: list[str] = []
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip().decode("latin-1"))
        elif name in (b"x-api-key", b"x-goog-api-key"):
            found.append(value.strip().decode("latin-1"))
    if scope["query_string"]:
        found += parse_qs(scope["query_string"].decode("latin-1")).get("key", [])
    return [key for key in found if key]


async def _read_body(receive: Receive, *, limit: int = MAX_BODY) -> bytes:
    """The whole body. Raises CallError 413."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallError(400, "invalid_request", "the client left before the request was whole")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise CallError(413, "request_too_large", f"the request is larger than {limit} bytes")
        chunks.append(chunk)
        if not message.get("more_body"):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
