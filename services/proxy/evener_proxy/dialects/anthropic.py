"""Anthropic's Messages: a request's system, messages and tools become chat's, a reply is a message or a stream of events.

Source: the Claude API reference. A streamed reply is made from the complete one, so that both forms say the same.
"""

from datetime import UTC, datetime
from typing import Any

import msgspec

from evener_proxy.canonical import JSON_BODY, CallError, CallRequest, Framing, ModelInfo, Reply
from evener_proxy.dialects import anthropic_reply
from evener_proxy.dialects.anthropic_blocks import wrong
from evener_proxy.dialects.anthropic_messages import Turn, chat_messages
from evener_proxy.dialects.anthropic_tools import Tool, ToolChoice, chat_choice, forces, function_tools
from evener_proxy.messages import tool_list

# The API keeps streams alive with pings, which its clients skip.
_STREAM = Framing(b"text/event-stream; charset=utf-8", anthropic_reply.event("ping", {}))
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop_sequences", "thinking")


class _Format(msgspec.Struct):
    type: str
    schema: Any = None


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None


class _Body(msgspec.Struct):
    """What is read of a request; all else (metadata, betas, context_management, cache_control, ...) changes nothing here."""

    model: str
    messages: list[Turn]
    max_tokens: int | None = None
    system: Any = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: Any = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    thread: Any = None


_body = msgspec.json.Decoder(_Body)
_encode = msgspec.json.Encoder().encode


class AnthropicDialect:
    """See `evener_proxy.canonical.CountingDialect`."""

    name = "anthropic"
    call_prefix = "toolu_"
    grace_s = 10.0

    def parse(self, body: bytes, _target: str, /) -> CallRequest:
        """Decode a request to sample. Raises CallError 400 that names the field."""
        request = self.parse_count(body, _target)
        if request.max_tokens is None:
            raise wrong("max_tokens", "Field required")
        return request

    def parse_count(self, body: bytes, _target: str, /) -> CallRequest:
        """Decode a request of either route. Raises CallError 400 that names the field."""
        try:
            asked = _body.decode(body)
            return _request(asked)
        except msgspec.DecodeError as error:
            raise CallError(400, "invalid_request", str(error)) from error
        except RecursionError as error:
            raise CallError(400, "invalid_request", "the request is nested too deeply") from error

    def framing(self, request: CallRequest) -> Framing:
        """Server-sent events where a stream is asked for."""
        return _STREAM if request.stream else JSON_BODY

    def render(self, request: CallRequest, reply: Reply) -> bytes:
        """A ``message``, or its events."""
        return anthropic_reply.stream(request, reply) if request.stream else anthropic_reply.document(request, reply)

    def late_error(self, request: CallRequest, error: CallError) -> bytes:
        """The error envelope; in a stream as an ``error`` event, which Anthropic's clients raise."""
        envelope = self.error(error)
        return b"event: error\ndata: " + envelope + b"\n\n" if request.stream else envelope

    def error(self, error: CallError) -> bytes:
        """Anthropic's error envelope."""
        kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return _encode({"type": "error", "error": {"type": kind, "message": error.message}, "request_id": None})

    def model_list(self, model: ModelInfo) -> bytes:
        """A page of one."""
        return _encode({"data": [_model(model)], "has_more": False, "first_id": model.name, "last_id": model.name})

    def model(self, model: ModelInfo) -> bytes:
        """A ``model``."""
        return _encode(_model(model))

    def count(self, tokens: int) -> bytes:
        """The answer of ``count_tokens``."""
        return _encode({"input_tokens": tokens})


def _model(model: ModelInfo) -> dict[str, Any]:
    opened = datetime.fromtimestamp(int(model.opened), UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": opened,
        "lifecycle": "active",
        "max_input_tokens": model.window,
        "max_tokens": model.window,
    }


def _request(asked: _Body) -> CallRequest:
    _check(asked)
    messages, systems = chat_messages(asked.system, asked.messages)
    functions, hosted = function_tools(asked.tools or ())
    choice = chat_choice(asked.tool_choice, functions)
    field, wanted = _format(asked)
    single = asked.tool_choice is not None and asked.tool_choice.disable_parallel_tool_use is True
    return CallRequest(
        model=asked.model,
        messages=messages,
        systems=systems,
        tools=tool_list(functions),
        tool_choice=None if choice is None else msgspec.Raw(_encode(choice)),
        parallel_tool_calls=False if single and functions else None,
        response_format=wanted,
        stop=asked.stop_sequences or None,
        max_tokens=asked.max_tokens,
        stream=bool(asked.stream),
        constrained=field or ("tool_choice" if forces(asked.tool_choice) else None),
        hosted_tools=hosted,
        asked={name: value for name in _SAMPLING if (value := getattr(asked, name)) is not None},
    )


def _check(asked: _Body) -> None:
    """Refuse what cannot be answered. Raises CallError 400."""
    if not asked.messages:
        raise wrong("messages", "at least one message is required")
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise wrong("max_tokens", "Input should be greater than or equal to 1")
    for index, text in enumerate(asked.stop_sequences or ()):
        if not text.strip():
            raise wrong(f"stop_sequences.{index}", "each stop sequence must contain non-whitespace")
    if asked.thread is not None:
        # A request that continues a thread lacks the messages before it. Clients send all of them where this is refused.
        raise wrong("thread", "Extra inputs are not permitted")


def _format(asked: _Body) -> tuple[str | None, msgspec.Raw | None]:
    """The field that asks for structured output, and the ``response_format`` of a chat request."""
    configured = asked.output_config.format if asked.output_config is not None else None
    for field, wanted in (("output_config.format", configured), ("output_format", asked.output_format)):
        if wanted is not None and wanted.type != "text":
            if not isinstance(wanted.schema, dict):
                raise wrong(f"{field}.schema", "Input should be an object")
            named = {"name": "output", "schema": wanted.schema}
            return field, msgspec.Raw(_encode({"type": "json_schema", "json_schema": named}))
    return None, None
