"""vLLM 0.32's chat shapes. Invariant: a setting that would change what is sampled is honoured or refused.

Replies were compared field by field with recorded ones; `weight_versions` is the one addition to the chat route, as
vLLM's generate route has it. The server calls this.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from .chat import Reply, parse_reply
from .sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .chat import Chat
    from .scheduler import Call

VLLM_VERSION = "0.32.0"
FINGERPRINT = "evener-engine"

# Settings that change the distribution and are not implemented, with the values that leave it alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "echo": (None, False),
    "continue_final_message": (None, False),
    "include_stop_str_in_output": (None, False),
    "use_beam_search": (None, False),
}


class ApiError(Exception):
    """An error in vLLM's body shape."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kinds = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
        kind = kinds.get(status, "InternalServerError")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class KvTransferParams(msgspec.Struct):
    """Where vLLM 0.32 takes the prompt's ids on the chat route."""

    prompt_token_ids: list[int] | None = None


class ChatRequest(msgspec.Struct):
    """The fields of a chat request that this engine reads."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    allowed_token_ids: list[int] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: KvTransferParams | None = None

    @property
    def parses_tools(self) -> bool:
        """Whether tool calls are looked for in the completion."""
        return bool(self.tools) and self.tool_choice != "none"

    def sampling(self, room: int) -> Sampling:
        """How to sample with `room` tokens left in the context."""
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if asked is not None and asked < 1:
            raise ApiError(400, f"max_tokens must be at least 1, got {asked}.", "max_tokens")
        temperature = 1.0 if self.temperature is None else self.temperature
        if not 0 <= temperature <= 1e4:
            raise ApiError(400, f"temperature must be non-negative, got {temperature}.", "temperature")
        top_p = 1.0 if self.top_p is None else self.top_p
        if not 0 < top_p <= 1:
            raise ApiError(400, f"top_p must be in (0, 1], got {top_p}.", "top_p")
        if self.top_k is not None and self.top_k < -1:
            raise ApiError(400, f"top_k must be 0 (off), -1 (off) or at least 1, got {self.top_k}.", "top_k")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ApiError(400, "allowed_token_ids must not be empty.", "allowed_token_ids")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ApiError(400, f"seed must fit 64 bits, got {self.seed}.", "seed")
        return Sampling(
            max_tokens=room if asked is None else min(asked, room),
            temperature=temperature,
            top_p=top_p,
            top_k=max(self.top_k or 0, 0),
            seed=self.seed,
            stop=tuple(stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if stop),
            stop_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            allowed=tuple(self.allowed_token_ids) if self.allowed_token_ids is not None else None,
        )


def read_chat(body: bytes) -> ChatRequest:
    """Parse a chat request; ApiError 400 names what is wrong or not supported."""
    try:
        raw = msgspec.json.decode(body)
        request = msgspec.convert(raw, ChatRequest)
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"Invalid request: {error}") from error
    for name, neutral in _NEUTRAL.items():
        if raw.get(name) not in neutral:
            raise ApiError(400, f"The CPU engine does not implement {name}={raw[name]!r}.", name)
    if request.tool_choice not in (None, "auto", "none"):
        raise ApiError(
            400,
            f"The CPU engine does not constrain decoding: tool_choice is auto or none, not {request.tool_choice!r}.",
            "tool_choice",
        )
    return request


def usage(call: Call) -> dict[str, Any]:
    """Token counts of a call."""
    prompt, completion = len(call.prompt), len(call.tokens)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


class Completion:
    """A finished call as the replies describe it."""

    def __init__(self, call: Call, request: ChatRequest, chat: Chat, model: str, eos: frozenset[int]) -> None:
        self._call = call
        self._request = request
        self._chat = chat
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex[:16]}", "created": int(time.time()), "model": model}
        text = completion_text(call, chat, eos, skip_special=not request.parses_tools)
        self._reply = parse_reply(text) if request.parses_tools else Reply(text, [])

    def _logprobs(self) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        content: list[dict[str, Any]] = []
        for token, logprob in zip(self._call.tokens, self._call.logprobs, strict=True):
            text, encoded = self._chat.token(token)
            content.append({"token": text, "logprob": logprob, "bytes": encoded, "top_logprobs": []})
        return {"content": content}

    def _tool_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in self._reply.tool_calls
        ]

    def _choice(self) -> dict[str, Any]:
        """What a reply and the last chunk of a stream have in common."""
        call = self._call
        return {
            "index": 0,
            "logprobs": self._logprobs(),
            "finish_reason": "tool_calls" if self._reply.tool_calls else call.finish,
            "stop_reason": call.stop_reason,
            "token_ids": call.tokens if self._request.return_token_ids else None,
            "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in call.spans],
        }

    def _prompt_ids(self) -> list[int] | None:
        return self._call.prompt if self._request.return_token_ids else None

    def body(self) -> dict[str, Any]:
        """The reply of a request without streaming."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._reply.content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        if calls := self._tool_calls():
            message["tool_calls"] = calls
        return self._head | {
            "object": "chat.completion",
            "choices": [{"message": message, "routed_experts": None} | self._choice()],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage(self._call),
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt_ids(),
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def events(self) -> Iterator[bytes]:
        """Server-sent events: the role, each delta, the finish with its token data, usage if asked, the end."""
        head = self._head | {"object": "chat.completion.chunk"}

        def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
            return b"data: " + msgspec.json.encode(head | {"choices": choices} | more) + b"\n\n"

        def delta(content: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"index": 0, "delta": content, "logprobs": None, "finish_reason": None}]

        yield chunk(delta({"role": "assistant", "content": ""}), prompt_token_ids=self._prompt_ids(), prompt_text=None)
        if self._reply.content:
            yield chunk(delta({"content": self._reply.content}))
        for index, call in enumerate(self._tool_calls()):
            yield chunk(delta({"tool_calls": [{"index": index} | call]}))
        yield chunk([{"delta": {}} | self._choice()])
        if (self._request.stream_options or {}).get("include_usage"):
            yield chunk([], usage=usage(self._call), system_fingerprint=FINGERPRINT)
        yield b"data: [DONE]\n\n"


def completion_text(call: Call, chat: Chat, eos: frozenset[int], *, skip_special: bool) -> str:
    """The text of a call: without the token that ended it, and cut before a stop string."""
    tokens = call.tokens
    if call.finish == "stop" and not isinstance(call.stop_reason, str) and tokens[-1] in eos | call.sampling.stop_ids:
        tokens = tokens[:-1]
    text = chat.decode(tokens, skip_special=skip_special)
    return text[: text.index(call.stop_reason)] if isinstance(call.stop_reason, str) else text
