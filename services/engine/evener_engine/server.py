"""The engine's HTTP side. Invariant: a reply describes exactly one finished call, or is an error in vLLM's body shape.

A client that leaves ends its call. Published weights are loaded and validated in full before the swap: a bad
publication is answered 400 and changes nothing. `service.serve` runs the application.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse

from .chat import Chat, ChatError
from .model import Model
from .scheduler import Call, Scheduler
from .scoring import ScoreRequest
from .weights import Architecture, PolicyError, load_weights
from .wire import VLLM_VERSION, ApiError, ChatRequest, Completion, read_chat

if TYPE_CHECKING:
    from fastapi import Request

    from .sampling import Sampling
    from .weights import Weights


class TokenizeRequest(msgspec.Struct):
    """Body of `/tokenize`: a prompt, or messages with tools."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    """Body of `/detokenize`."""

    tokens: list[int]


class UpdateInfo(msgspec.Struct):
    """Where the weights are: a safetensors file, or a folder of them."""

    path: str


class UpdateRequest(msgspec.Struct):
    """Body of `/update_weights`."""

    update_info: UpdateInfo


class FinishRequest(msgspec.Struct):
    """Body of `/finish_weight_update`."""

    weight_version: str | int


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _body(request: Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"Invalid request: {error}") from error


class Engine:
    """One policy being served: tokenizer, weights, scheduler and the endpoints over them."""

    def __init__(
        self, policy: Path, *, name: str, version: int, slots: int, context_tokens: int | None, seed: int | None
    ) -> None:
        self._policy, self._name = policy, name
        self._arch = Architecture.read(policy)
        self._context = context_tokens or self._arch.context
        if self._context > self._arch.context:
            raise PolicyError(f"context_tokens {self._context} exceeds the {self._arch.context} positions of {policy}")
        self._chat = Chat(policy)
        self._eos = _eos_ids(self._arch, self._chat)
        model = Model(self._arch, load_weights(policy, self._arch), self._context)
        self.scheduler = Scheduler(model, version=str(version), slots=slots, eos=self._eos, seed=seed)
        self._updating = False
        self._staged: Weights | None = None
        self._started = int(time.time())
        self._stopping = False

    def stop(self) -> None:
        """Abort running calls and refuse new ones."""
        self._stopping = True
        self.scheduler.stop()

    def app(self) -> FastAPI:
        """The application, on vLLM's routes."""
        app = FastAPI(openapi_url=None)
        app.add_exception_handler(ApiError, _api_error)
        for method, path, endpoint in (
            ("POST", "/v1/chat/completions", self._completions),
            ("POST", "/v1/chat/completions/render", self._render),
            ("POST", "/v1/completions", self._score),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("GET", "/v1/models", self._models),
            ("GET", "/health", self._health),
            ("GET", "/version", self._version),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("GET", "/is_paused", self._is_paused),
            ("POST", "/init_weight_transfer_engine", self._init_transfer),
            ("POST", "/start_weight_update", self._start_update),
            ("POST", "/update_weights", self._update),
            ("POST", "/finish_weight_update", self._finish_update),
            ("GET", "/weight_info", self._weight_info),
        ):
            app.add_route(path, endpoint, methods=[method])
        return app

    async def _completions(self, request: Request) -> Response:
        body = read_chat(await request.body())
        prompt, sampling = self._prepare(body)
        call = await self._sample(request, prompt, sampling, skip_special=not body.parses_tools)
        completion = Completion(call, body, self._chat, self._name, self._eos)
        if body.stream:
            return StreamingResponse(completion.events(), media_type="text/event-stream")
        return _json(completion.body())

    def _prepare(self, body: ChatRequest) -> tuple[list[int], Sampling]:
        """Prompt ids and sampling of a request; ApiError where it cannot be served."""
        self._check_model(body.model)
        if not all(0 <= token < self._arch.vocab for token in body.allowed_token_ids or ()):
            raise ApiError(400, f"allowed_token_ids must be ids below {self._arch.vocab}.", "allowed_token_ids")
        given = body.kv_transfer_params.prompt_token_ids if body.kv_transfer_params else None
        if given is not None:
            if not given or not all(0 <= token < self._arch.vocab for token in given):
                raise ApiError(400, f"prompt_token_ids must be ids below {self._arch.vocab}, and at least one.")
            prompt = given
        else:
            arguments = {"add_generation_prompt": body.add_generation_prompt} | (body.chat_template_kwargs or {})
            prompt = self._render_ids(body.messages, body.tools, arguments)
        if len(prompt) >= self._context:
            raise ApiError(
                400,
                f"This model's maximum context length is {self._context} tokens. However, your prompt contains at "
                f"least {len(prompt)} input tokens, which exceeds this limit even without any output tokens. Please "
                f"reduce the length of the input prompt. (parameter=input_tokens, value={len(prompt)})",
                "input_tokens",
            )
        return prompt, body.sampling(self._context - len(prompt))

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._name:
            raise ApiError(404, f"The model `{model}` does not exist. Valid aliases: {self._name}.", "model")

    def _render_ids(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]
    ) -> list[int]:
        try:
            ids = self._chat.render(messages, tools or None, arguments)
        except ChatError as error:
            raise ApiError(400, str(error), "messages") from error
        if not ids:
            raise ApiError(400, "The chat template renders these messages to an empty prompt.", "messages")
        return ids

    async def _sample(self, request: Request, prompt: list[int], sampling: Sampling, *, skip_special: bool) -> Call:
        """Run a call to its end; it is cancelled when the client leaves first."""
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()

        def done(_: Call) -> None:
            loop.call_soon_threadsafe(finished.set)

        def decode(ids: list[int]) -> str:
            return self._chat.decode(ids, skip_special=skip_special)

        call = Call(prompt, sampling, done, decode)
        self.scheduler.submit(call)
        end = asyncio.ensure_future(finished.wait())
        leave = asyncio.ensure_future(request.receive())  # after the body, only http.disconnect comes
        try:
            await asyncio.wait((end, leave), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in (end, leave):
                future.cancel()
            if call.finish is None:
                self.scheduler.cancel(call)
        if call.finish is None:
            raise ApiError(499, "The client left.")
        if self._stopping and call.finish == "abort":
            raise ApiError(503, "The engine is stopping.")
        if call.finish == "error":
            raise ApiError(500, "The engine failed on this call; its log says why.")
        return call

    async def _render(self, request: Request) -> Response:
        body = read_chat(await request.body())
        prompt, sampling = self._prepare(body)
        params = {
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(sampling.stop_ids),
            "max_tokens": sampling.max_tokens,
            "logprobs": 0 if body.logprobs else None,
        }
        return _json({"model": self._name, "token_ids": prompt, "sampling_params": params, "stream": bool(body.stream)})

    async def _score(self, request: Request) -> Response:
        body = cast("ScoreRequest", await _body(request, ScoreRequest))
        self._check_model(body.model)
        body.check(self._arch.vocab, self._context)
        return _json(body.reply(self._name, await asyncio.wrap_future(self.scheduler.score(body.prompt))))

    async def _tokenize(self, request: Request) -> Response:
        body = cast("TokenizeRequest", await _body(request, TokenizeRequest))
        if body.messages is not None:
            arguments = {"add_generation_prompt": body.add_generation_prompt} | (body.chat_template_kwargs or {})
            ids = self._render_ids(body.messages, body.tools, arguments)
        elif body.prompt is not None:
            ids = self._chat.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens).input_ids
        else:
            raise ApiError(400, "Either prompt or messages must be given.")
        strings = self._chat.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return _json({"count": len(ids), "max_model_len": self._context, "tokens": ids, "token_strs": strings})

    async def _detokenize(self, request: Request) -> Response:
        body = cast("DetokenizeRequest", await _body(request, DetokenizeRequest))
        return _json({"prompt": self._chat.decode(body.tokens, skip_special=False)})

    async def _models(self, _: Request) -> Response:
        model = {
            "id": self._name,
            "object": "model",
            "created": self._started,
            "owned_by": "evener",
            "root": str(self._policy),
            "parent": None,
            "max_model_len": self._context,
            "permission": [],
        }
        return _json({"object": "list", "data": [model]})

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self.scheduler.alive else 503)

    async def _version(self, _: Request) -> Response:
        return _json({"version": VLLM_VERSION})

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in ("keep", "wait", "abort"):
            raise ApiError(400, f"mode must be keep, wait or abort, got {mode!r}.", "mode")
        clear = request.query_params.get("clear_cache", "true").lower() in ("1", "true")
        await asyncio.wrap_future(self.scheduler.pause(mode, clear_cache=clear))
        return _json({"status": "paused"})

    async def _resume(self, _: Request) -> Response:
        await asyncio.wrap_future(self.scheduler.resume())
        return _json({"status": "resumed"})

    async def _is_paused(self, _: Request) -> Response:
        return _json({"is_paused": self.scheduler.paused})

    async def _init_transfer(self, _: Request) -> Response:
        return _json({"message": "Weight transfer initialized"})

    async def _start_update(self, _: Request) -> Response:
        self._updating, self._staged = True, None
        return _json({"message": "Weight update started"})

    async def _update(self, request: Request) -> Response:
        path = Path(cast("UpdateRequest", await _body(request, UpdateRequest)).update_info.path)
        if not self._updating:
            raise ApiError(400, "No weight update is under way: call /start_weight_update first.")
        self._staged = None
        try:
            self._staged = await asyncio.to_thread(load_weights, path, self._arch)
        except PolicyError as error:
            raise ApiError(400, f"Weights refused, version {self.scheduler.version} keeps serving: {error}") from error
        return _json({"message": "Weights updated"})

    async def _finish_update(self, request: Request) -> Response:
        version = str(cast("FinishRequest", await _body(request, FinishRequest)).weight_version)
        if self._staged is None:
            raise ApiError(400, "No weights were accepted since /start_weight_update; nothing changed.")
        staged, self._staged, self._updating = self._staged, None, False
        await asyncio.wrap_future(self.scheduler.swap(staged, version))
        return _json({"message": "Weight update finished"})

    async def _weight_info(self, _: Request) -> Response:
        return _json({"weight_version": self.scheduler.version})


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body, error.status)


def _eos_ids(arch: Architecture, chat: Chat) -> frozenset[int]:
    """Ids that end a turn: the configuration's and the tokenizer's."""
    configured: int | list[int] | None = arch.config.eos_token_id
    ids = {configured} if isinstance(configured, int) else set(configured or ())
    return frozenset(ids | ({chat.eos} if chat.eos is not None else set()))
