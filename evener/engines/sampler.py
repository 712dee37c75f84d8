"""What a `Sample` holds is the engine's own: its ids and log-probabilities, checked and never made again from text.

The port is the proxy's; `VllmSampler` speaks vLLM's wire format (0.32) to vLLM and to our CPU engine, and the plain part of it
to a hosted API, which gives no tokens. The engine is asked without streaming, since stream chunks lose the ids of tokens that
have no text.
"""

import asyncio
import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from evener.engines.http import HttpClient, HttpError
from evener.engines.token_ids import Prompts, token_ids
from evener.errors import InfraError
from evener.trace.record import Ids, Level, Logprobs


class EngineUnavailable(Exception):
    """The engine did not answer, or failed, or cut the call: the same request may be sent again. ``busy``: it said 429."""

    def __init__(self, message: str, *, busy: bool = False) -> None:
        self.busy = busy
        super().__init__(message)


class EngineRefused(Exception):
    """The engine found the request wrong (4xx): sent again it would be refused again.

    ``told``: the message is the engine's own about the request, and not some text between it and us.
    """

    def __init__(self, status: int, message: str, param: str | None, *, told: bool = True) -> None:
        self.told = told
        self.status = status
        self.message = message
        self.param = param
        super().__init__(f"{status}: {message}")

    @property
    def context_full(self) -> bool:
        """The prompt, or prompt + max_tokens, exceeds the window."""
        return self.param in ("input_tokens", "max_tokens", "max_completion_tokens") or "maximum context length" in self.message


class PromptGiven(msgspec.Struct, frozen=True):
    """The prompt as a JSON list of ids, which replaces the messages (`evener.engines.token_in`)."""

    prompt_token_ids: msgspec.Raw


class SampleRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Body of the chat route, as the engine gets it. ``messages``, ``tools``, ``tool_choice`` are the agent's, verbatim.

    ``request_id`` names the call in the engine's log; an engine is never told an agent's own ids.
    """

    model: str
    request_id: str | None = None
    messages: Sequence[msgspec.Raw]
    tools: msgspec.Raw | None = None
    tool_choice: msgspec.Raw | None = None
    parallel_tool_calls: bool | None = None
    response_format: msgspec.Raw | None = None
    stop: list[str] | None = None
    max_tokens: int | None = None
    # No default: omit_defaults must not leave them to the engine, which may take a model's own (generation_config.json).
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: bool
    return_token_ids: bool
    kv_transfer_params: PromptGiven | None = None


def neutral_request(model: str, messages: Sequence[msgspec.Raw], temperature: float) -> SampleRequest:
    """A request that samples from the policy's own distribution, but for its temperature, and returns the tokens."""
    return SampleRequest(
        model=model,
        messages=messages,
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logprobs=True,
        return_token_ids=True,
    )


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call as the engine parsed it; ``arguments`` is the model's own text."""

    id: str
    name: str
    arguments: str


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One reply. ``prompt_ids`` [P], ``completion_ids`` [C] int32 with the stop token, ``logprobs`` [C] float32.

    ``versions`` [C] names the policy version of each token, None where the engine does not say. Level ``text``: the arrays
    are empty, and only ``prompt_tokens`` and ``completion_tokens`` are known; ``flaw`` says what is wrong with the token data
    where the engine gave some.
    """

    level: Level
    flaw: str | None = None
    prompt_ids: Ids
    completion_ids: Ids
    logprobs: Logprobs
    versions: Ids | None
    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]
    finish_reason: str
    stop_reason: int | str | None
    prompt_tokens: int
    completion_tokens: int


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``window`` in tokens; ``version`` of the weights, 0 for those that the engine was started with."""

    model: str
    window: int | None
    version: int


class Sampler(Protocol):
    """An engine as the proxy sees it."""

    @property
    def name(self) -> str:
        """Where the engine is: its URL."""
        ...

    async def sample(self, request: SampleRequest, session: str = "") -> Sample:
        """Sample one reply for a session. Raises EngineUnavailable, EngineRefused, InfraError."""
        ...

    async def tokenize(self, request: SampleRequest) -> int | None:
        """The length in tokens of the request's prompt; None where the engine does not count (a hosted API).

        Raises EngineUnavailable, EngineRefused.
        """
        ...

    async def status(self) -> EngineStatus:
        """What the engine serves. Raises EngineUnavailable."""
        ...

    async def probe(self, model: str) -> Level:
        """Sample one token to learn what the engine lets us record. Raises EngineUnavailable, EngineRefused, InfraError."""
        ...

    async def post(self, path: str, body: bytes) -> bytes:
        """The answer to a document, for other routes than these. Raises EngineUnavailable, EngineRefused."""
        ...


class _Logprob(msgspec.Struct, gc=False):
    logprob: float | None  # null is how JSON encoders write what is not finite
    token: str = ""


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Versions(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Versions] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


_NULL = msgspec.Raw(b"null")  # a union of Raw and None is not a type that msgspec decodes


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage
    prompt_token_ids: msgspec.Raw = _NULL


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


_reply = msgspec.json.Decoder(_Reply)
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
            version = _version(_decode(await self._get("/weight_info"), _WeightInfo).weight_version)
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


def parse_reply(body: bytes, read_ids: Callable[[bytes], Ids] = token_ids) -> Sample:
    """Decode and check a reply of the chat route. ``read_ids`` reads the list of the prompt's ids.

    Token data that contradict each other are a ``flaw``: the reply stands, at level ``text``. Raises EngineUnavailable where
    the engine cut the call (finish ``abort``), and InfraError ``engine_error`` where the body is not a reply.
    """
    try:
        reply, prompt_ids = _decode_reply(body, read_ids)
        choice = reply.choices[0]
    except (msgspec.DecodeError, IndexError) as error:
        raise InfraError("engine_error", f"the reply is malformed: {error}: {body[:200]!r}") from error
    if choice.finish_reason == "abort":
        raise EngineUnavailable("the engine cut the call (finish_reason abort)")
    message = choice.message
    logprobs = choice.logprobs.content if choice.logprobs is not None else None
    try:
        flaw, arrays = None, _token_data(reply, choice, prompt_ids, logprobs)
    except _Flaw as found:
        flaw, arrays = str(found), None
    return Sample(
        level="text" if arrays is None else "tokens",
        flaw=flaw,
        prompt_ids=_NO_IDS if arrays is None else arrays[0],
        completion_ids=_NO_IDS if arrays is None else arrays[1],
        logprobs=_NO_LOGPROBS if arrays is None else arrays[2],
        versions=None if arrays is None else arrays[3],
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=[ToolCall(each.id, each.function.name, each.function.arguments) for each in message.tool_calls or ()],
        finish_reason=choice.finish_reason or "stop",
        stop_reason=choice.stop_reason,
        prompt_tokens=reply.usage.prompt_tokens,
        completion_tokens=reply.usage.completion_tokens,
    )


_PROMPT_IDS = b'"prompt_token_ids":'
_TAKEN_OUT = msgspec.Raw(b"0")


def _decode_reply(body: bytes, read_ids: Callable[[bytes], Ids]) -> tuple[_Reply, Ids]:
    """A reply, and its prompt's ids. Raises msgspec.DecodeError.

    The ids, most of the body, are taken out of it first, which the decoder would go through one by one. Inside a string the
    quotes of their name would be escaped, so that it is found only as a name; whether it is the reply's own name, and not that
    of something in it, shows in where the place holder comes out.
    """
    start = body.find(_PROMPT_IDS) + len(_PROMPT_IDS)
    begin = body.find(b"[", start, start + 2)
    end = body.find(b"]", begin) + 1
    if start >= len(_PROMPT_IDS) and begin > 0 and end > 0:
        reply = _reply.decode(b"%b%b%b" % (body[:begin], _TAKEN_OUT, body[end:]))
        if reply.prompt_token_ids == _TAKEN_OUT:
            return reply, read_ids(body[begin:end])
    reply = _reply.decode(body)
    return reply, _NO_IDS if reply.prompt_token_ids == _NULL else read_ids(bytes(reply.prompt_token_ids))


T = TypeVar("T")
_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


_BY_ID = "token_id:"  # what vLLM writes for a token's text under --return-tokens-as-token-ids


class _Flaw(Exception):
    """The token data of a reply contradict each other."""


def _token_data(
    reply: _Reply, choice: _Choice, prompt_ids: Ids, logprobs: list[_Logprob] | None
) -> tuple[Ids, Ids, Logprobs, Ids | None] | None:
    """Prompt ids, completion ids, log-probabilities and versions, or None where the engine gives none (level text)."""
    if not len(prompt_ids) or choice.token_ids is None or logprobs is None:
        return None
    lengths = (len(choice.token_ids), len(logprobs), reply.usage.completion_tokens)
    if len(set(lengths)) != 1 or len(prompt_ids) != reply.usage.prompt_tokens:
        raise _Flaw(f"token ids, log-probabilities and usage differ in number: {lengths}")
    given = [math.nan if each.logprob is None else each.logprob for each in logprobs]
    values = np.frombuffer(array("f", given), np.float32)
    if len(values) and not (np.isfinite(values).all() and values.max() <= 0):
        raise _Flaw("a log-probability is not finite or greater than 0")
    if logprobs and logprobs[0].token.startswith(_BY_ID):
        named = [each.token.removeprefix(_BY_ID) for each in logprobs]
        if named != [str(token) for token in choice.token_ids]:
            raise _Flaw("the log-probabilities name other tokens than the token ids")
    versions = _versions(choice.weight_versions, len(choice.token_ids))
    return prompt_ids, _ids(choice.token_ids), values, versions


def _ids(values: list[int]) -> Ids:
    try:
        return np.frombuffer(array("i", values), np.int32)
    except OverflowError as error:
        raise _Flaw("a token id is not an int32") from error


def _versions(runs: list[_Versions] | None, length: int) -> Ids | None:
    if not runs:
        return None
    versions = np.full(length, -1, np.int32)
    for run in runs:
        versions[run.start : run.end] = _version(run.version)
    if (versions < 0).any():
        raise _Flaw(f"weight_versions do not cover the {length} tokens of the reply")
    return versions


def _version(text: str) -> int:
    """vLLM names the weights that it was started with ``default``; Evener publishes integers."""
    if text == "default":
        return 0
    if not text.isdecimal():
        raise InfraError("engine_error", f"the engine's weight version {text!r} is not one of ours (an integer)")
    return int(text)


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
