"""OpenAI's Chat Completions: a request becomes canonical without touching its messages, a reply is rendered from one sample.

Source: the OpenAI API reference, "Chat Completions" and "Streaming". A streamed reply is made from the complete one, so that
both forms say the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec

from evener.engines.sampler import ToolCall
from evener_proxy.canonical import EVENT_STREAM, JSON_BODY, CallError, CallRequest, Framing, ModelInfo, Reply
from evener_proxy.dialects import openai
from evener_proxy.dialects.chat_ids import CallIds
from evener_proxy.dialects.chat_tools import ESCAPE, as_custom, calls_as_functions, read_choice, read_tools
from evener_proxy.messages import inline

_FINISH = {"stop", "length", "tool_calls", "content_filter"}


# A union of Raw and None is not a type that msgspec decodes, so that what is absent is an empty Raw.
_ABSENT = msgspec.Raw()
_Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # what databases hold


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str = ""
    tools: msgspec.Raw = _ABSENT
    tool_choice: msgspec.Raw = _ABSENT
    parallel_tool_calls: bool | None = None
    response_format: msgspec.Raw = _ABSENT
    functions: msgspec.Raw = _ABSENT
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: _Int | None = None
    max_completion_tokens: _Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: _Int | None = None
    seed: _Int | None = None


@dataclass(slots=True, eq=False)
class ChatRequest(CallRequest):
    """``include_usage``: a stream ends with the usage. ``custom``: the names of tools that take a text in place of JSON."""

    include_usage: bool
    custom: frozenset[str]


class _Head(msgspec.Struct):
    """What is looked at of a message."""

    role: str
    content: msgspec.Raw = _ABSENT
    reasoning_content: msgspec.Raw = _ABSENT
    tool_calls: msgspec.Raw = _ABSENT
    tool_call_id: msgspec.Raw = _ABSENT


class _Format(msgspec.Struct):
    type: str


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "n",
    "seed",
    "stop",
    "max_tokens",
    "max_completion_tokens",
)
_body = msgspec.json.Decoder(_Body)
_looked_at = msgspec.json.Decoder(_Head)
_OPENING = {"role": "assistant", "content": ""}
_encode = msgspec.json.Encoder().encode


class ChatDialect:
    """See `evener_proxy.canonical.Dialect`."""

    name = "chat"
    call_prefix = "call_"
    grace_s = 10.0

    def parse(self, body: bytes, _target: str, /) -> ChatRequest:
        """Decode a request. Raises CallError 400 that names the field."""
        try:
            asked = _body.decode(body)
            if not body.isascii():
                body.decode()  # what is passed on as it is, nobody has looked into
            if _given(asked.functions) is not None:
                raise CallError(400, "invalid_request", "functions: send tools, which replaced them", param="functions")
            messages, systems = _messages(asked.messages)
            tools, custom, hosted = read_tools(_given(asked.tools))
            tools, choice = read_choice(_given(asked.tool_choice), tools)
            constrained = _constrained(asked, choice)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CallError(400, "invalid_request", str(error)) from error
        except RecursionError as error:
            raise CallError(400, "invalid_request", "the body is nested too deeply") from error
        return ChatRequest(
            model=asked.model,
            messages=messages,
            systems=systems,
            tools=tools,
            tool_choice=choice if tools is not None or constrained else None,
            parallel_tool_calls=asked.parallel_tool_calls,
            response_format=_given(asked.response_format) if constrained == "response_format" else None,
            stop=[asked.stop] if isinstance(asked.stop, str) else asked.stop,
            max_tokens=_max_tokens(asked),
            stream=bool(asked.stream),
            constrained=constrained,
            hosted_tools=hosted,
            asked={name: value for name in _SAMPLING if (value := getattr(asked, name)) is not None},
            include_usage=asked.stream_options is not None and asked.stream_options.include_usage is True,
            custom=custom,
        )

    def framing(self, request: ChatRequest) -> Framing:
        """Server-sent events where a stream is asked for."""
        return _CHUNKS if request.stream else JSON_BODY

    def render(self, request: ChatRequest, reply: Reply) -> bytes:
        """A ``chat.completion``, or its chunks."""
        return _stream(request, reply) if request.stream else _document(request, reply)

    def late_error(self, request: ChatRequest, error: CallError) -> bytes:
        """The error envelope; in a stream as an event, which OpenAI's clients raise."""
        envelope = self.error(error)
        return b"data: " + envelope + b"\n\ndata: [DONE]\n\n" if request.stream else envelope

    def error(self, error: CallError) -> bytes:
        """OpenAI's error envelope."""
        return openai.error_envelope(error)

    def model_list(self, model: ModelInfo) -> bytes:
        """A ``list`` of one."""
        return openai.model_list(model)

    def model(self, model: ModelInfo) -> bytes:
        """A ``model``."""
        return openai.model_document(model)


def _messages(raw: list[msgspec.Raw]) -> tuple[list[msgspec.Raw], int]:
    """The messages, and how many leading ones are system messages."""
    if not raw:
        raise CallError(400, "invalid_request", "messages must not be empty", param="messages")
    messages: list[msgspec.Raw] = []
    systems = 0
    ids = CallIds()
    for message in raw:
        head = _looked_at.decode(message)
        role = head.role
        _check_media(head.content, len(messages))
        if role in ("system", "developer") and systems == len(messages):
            systems += 1
        if role == "developer" or bytes(head.reasoning_content):
            message = _renamed(message)
        if role == "assistant":
            calls = head.tool_calls
            if b'"custom"' in bytes(calls) or ESCAPE in bytes(calls):
                message, calls = calls_as_functions(message, f"messages[{len(messages)}]")
            message = ids.told_apart(message, calls)
        elif role == "tool":
            message = ids.answered(message, head.tool_call_id)
        messages.append(message)
    return messages, systems


def _check_media(content: msgspec.Raw, place: int) -> None:
    """Media come inline: an agent that reaches nothing but the proxy does not make an engine fetch something for it."""
    text = bytes(content)
    if text[:1] != b"[" or not (b'_url"' in text or ESCAPE in text):
        return
    for part in msgspec.json.decode(text):
        for name, value in part.items() if isinstance(part, dict) else ():
            url = value.get("url") if name.endswith("_url") and isinstance(value, dict) else value
            if name.endswith("_url") and isinstance(url, str):
                inline(url, f"messages[{place}].content.{name}")


def _renamed(message: msgspec.Raw) -> msgspec.Raw:
    """The message in the words that engines know: few chat templates know a ``developer``, and thinking is ``reasoning``."""
    document: dict[str, Any] = msgspec.json.decode(message)
    thinking = document.pop("reasoning_content", None)
    if document["role"] == "developer":
        document["role"] = "system"
    if thinking is not None:
        document["reasoning"] = thinking
    return msgspec.Raw(_encode(document))


def _given(raw: msgspec.Raw) -> msgspec.Raw | None:
    """None where a field is absent, null or an empty list."""
    return None if bytes(raw) in (b"", b"null", b"[]") else raw


def _constrained(asked: _Body, choice: msgspec.Raw | None) -> Literal["response_format", "tool_choice"] | None:
    wanted = _given(asked.response_format)
    if wanted is not None and msgspec.json.decode(wanted, type=_Format).type != "text":
        return "response_format"
    if choice is not None and bytes(choice) not in (b'"auto"', b'"none"'):
        return "tool_choice"
    return None


def _max_tokens(asked: _Body) -> int | None:
    limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    if limit is not None and limit < 1:
        raise CallError(400, "invalid_request", "max_tokens must be at least 1", param="max_tokens")
    return limit


def _keep_alive(request: ChatRequest) -> bytes:
    """A chunk of the reply to come that adds nothing to it, the first one with its role.

    A comment would not do: qwen-code asks again after four minutes without a chunk.
    """
    head = _chunk_head(request, *request.begin())
    return _event(head | {"choices": [_choice({"content": ""} if request.kept else _OPENING)]})


_CHUNKS = Framing(EVENT_STREAM, _keep_alive)


def _document(request: ChatRequest, reply: Reply) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = _tool_calls(request, reply)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(reply)}
    head = _head(request, reply.id, reply.created, "chat.completion")
    return _encode(head | {"choices": [choice], "usage": _usage(reply)})


def _stream(request: ChatRequest, reply: Reply) -> bytes:
    """The ``chat.completion.chunk`` events: role, reasoning, content, tool calls, finish, usage where asked, ``[DONE]``.

    The role has left where a keep-alive has; client libraries that add chunks up would say it twice.
    """
    head = _chunk_head(request, *(request.began or (reply.id, reply.created)))
    chunks = [_event(head | {"choices": [choice]}) for choice in islice(_choices(request, reply), bool(request.kept), None)]
    if request.include_usage:
        chunks.append(_event(head | {"choices": [], "usage": _usage(reply)}))
    return b"".join((*chunks, b"data: [DONE]\n\n"))


def _head(request: ChatRequest, reply_id: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-" + reply_id, "object": kind, "created": created, "model": request.model}


def _chunk_head(request: ChatRequest, reply_id: str, created: int) -> dict[str, Any]:
    head = _head(request, reply_id, created, "chat.completion.chunk")
    return head | {"usage": None} if request.include_usage else head


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _finish(reply: Reply) -> str:
    """vLLM knows reasons that OpenAI's clients do not (``repetition``): the reply is over, so they are ``stop``."""
    return reply.finish_reason if reply.finish_reason in _FINISH else "stop"


def _tool_calls(request: ChatRequest, reply: Reply) -> list[dict[str, Any]]:
    return [as_custom(call) if call.name in request.custom else _function_call(call) for call in reply.tool_calls]


def _function_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _choices(request: ChatRequest, reply: Reply) -> Iterator[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [_OPENING]
    if reply.reasoning:
        deltas.append({"reasoning_content": reply.reasoning})
    if reply.content:
        deltas.append({"content": reply.content})
    deltas += [{"tool_calls": [{"index": index} | call]} for index, call in enumerate(_tool_calls(request, reply))]
    for delta in deltas:
        yield _choice(delta)
    yield _choice({}) | {"finish_reason": _finish(reply)}


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + _encode(document) + b"\n\n"
