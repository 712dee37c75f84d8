"""A client of vLLM (0.32), of our CPU engine, which speaks as it does, and of the plain part of that: a hosted API.

The engine is asked without streaming, since stream chunks lose the ids of tokens that have no text.
"""

import asyncio
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from evener.engines.http import HttpClient, HttpError
from evener.engines.replies import parse_reply, version_of
from evener.engines.sampler import EngineRefused, EngineStatus, EngineUnavailable, Sample, SampleRequest, neutral_request
from evener.engines.token_ids import Prompts
from evener.trace.record import Level

T = TypeVar("T")


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _Count(msgspec.Struct):
    count: int


class _ErrorBody(msgspec.Struct):
    message: str
    param: str | None = None


class _Error(msgspec.Struct):
    error: _ErrorBody


_encode = msgspec.json.Encoder().encode
_PLAIN = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "stop",
    "max_tokens",
    "temperature",
    "top_p",
)
_NO_ROUTE = (404, 405)


class VllmSampler:
    """vLLM, our CPU engine, or a hosted API, at ``url`` (without ``/v1``). Close it when done.

    ``key`` is sent as a bearer token. ``model`` is asked for where the engine lists several; None: its first.
    """

    def __init__(self, url: str, *, connect_s: float = 5.0, key: str | None = None, model: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._plain = False
        self._level: Level | None = None
        self._counts = True
        self._prompts = Prompts()
        self._http = HttpClient(self._url, connect_s=connect_s, key=key)

    @property
    def name(self) -> str:
        """The engine's URL."""
        return self._url

    async def close(self) -> None:
        """Close all connections."""
        self._http.close()

    async def sample(self, request: SampleRequest, session: str = "") -> Sample:
        """One trip on the chat route; leaving it (cancellation) closes the connection, which aborts the generation."""
        body = await self._request("POST", "/v1/chat/completions", _encode(_plain(request) if self._plain else request))
        sample = parse_reply(body, partial(self._prompts.read, session))
        self._level = sample.level
        return sample

    async def tokenize(self, request: SampleRequest) -> int | None:
        """Count the prompt with ``/tokenize``, which renders messages and tools as the chat route does.

        What gives no tokens and has no such route is not asked for it again.
        """
        if not self._counts:
            return None
        document: dict[str, Any] = {"model": request.model, "messages": request.messages, "add_generation_prompt": True}
        if request.tools is not None:
            document["tools"] = request.tools
        try:
            return _decode(await self._request("POST", "/tokenize", _encode(document)), _Count).count
        except EngineRefused as error:
            if error.status not in _NO_ROUTE:
                raise
        self._counts = self._level != "text"
        return None

    async def status(self) -> EngineStatus:
        """Model and window from ``/v1/models``, version from ``/weight_info`` (404: never updated)."""
        models = _decode(await self._get("/v1/models"), _Models).data
        if not models:
            raise EngineUnavailable(f"{self._url}/v1/models lists no model")
        try:
            version = version_of(_decode(await self._get("/weight_info"), _WeightInfo).weight_version)
        except EngineRefused:
            version = 0
        serves = next((model for model in models if model.id == self._model), None) if self._model else models[0]
        if serves is None:
            raise EngineUnavailable(f"{self._url}/v1/models does not list {self._model!r}")
        return EngineStatus(model=serves.id, window=serves.max_model_len, version=version)

    async def probe(self, model: str) -> Level:
        """Sample one token of a fixed prompt. What an engine then refuses to be asked, it is not asked again."""
        request = neutral_request(model, [msgspec.Raw(b'{"role":"user","content":"."}')], temperature=1.0)
        request.max_tokens = 1
        try:
            return (await self.sample(request)).level
        except EngineRefused as error:
            if self._plain or error.status not in (400, 422):
                raise
        self._plain = True
        return (await self.sample(request)).level

    async def post(self, path: str, body: bytes) -> bytes:
        """The answer to a document, for other routes than these."""
        return await self._request("POST", path, body)

    async def _get(self, path: str) -> bytes:
        try:
            async with asyncio.timeout(5.0):
                return await self._request("GET", path)
        except TimeoutError as error:
            raise EngineUnavailable(f"GET {self._url}{path}: no answer in 5 s") from error

    async def _request(self, method: Literal["GET", "POST"], path: str, body: bytes = b"") -> bytes:
        try:
            status, content = await self._http.request(method, path, body)
        except HttpError as error:
            raise EngineUnavailable(f"{method} {self._url}{path}: {error}") from error
        if status >= 500 or status == 429:
            said = content[:300].decode(errors="replace")
            raise EngineUnavailable(f"{method} {self._url}{path}: {status}: {said}", busy=status == 429)
        if status >= 400:
            raise _refused(status, content)
        return content


def _plain(request: SampleRequest) -> dict[str, Any]:
    """What every API of this format takes."""
    return {name: value for name in _PLAIN if (value := getattr(request, name)) is not None}


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise EngineUnavailable(f"the engine's answer is malformed: {error}: {body[:200]!r}") from error


def _refused(status: int, content: bytes) -> EngineRefused:
    try:
        error = msgspec.json.decode(content, type=_Error).error
    except msgspec.DecodeError:
        return EngineRefused(status, content[:300].decode(errors="replace"), None, told=False)
    return EngineRefused(status, error.message, error.param)
