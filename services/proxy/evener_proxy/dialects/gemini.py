"""Google's Gemini API: a request becomes canonical, a reply is rendered from one sample.

Source: the Gemini API reference (v1beta and v1: ``generateContent``, ``streamGenerateContent``, ``countTokens``), "Thought
signatures", and google.rpc's error model. Model and method are in the path, so that both are read from the target.
"""

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec

from evener_proxy.canonical import JSON_BODY, CallError, CallRequest, Framing, ModelInfo, Reply
from evener_proxy.dialects import gemini_replies as replies
from evener_proxy.dialects.gemini_history import chat_messages, system_messages
from evener_proxy.dialects.gemini_tools import read_format, read_tools
from evener_proxy.dialects.gemini_wire import Body, CountBody, GenerationConfig, ThinkingConfig, invalid, listed, read

# No SSE comment: Google's JavaScript client drops a stream that holds one.
_EVENTS = Framing(
    b"text/event-stream",
    replies.event({"candidates": [{"content": {"parts": [{"text": ""}], "role": "model"}, "index": 0}]}),
)
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_NOT_SAMPLING = {"responseMimeType", "responseSchema", "responseJsonSchema"}
_target = re.compile(r"/v1(?:beta)?/models/(?P<model>.*):(?P<method>[A-Za-z]+)(?:\?(?P<query>.*))?", re.DOTALL)
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class GeminiRequest(CallRequest):
    """``sse``: a stream is of server-sent events, else one JSON array. ``thoughts``: the agent takes thinking."""

    sse: bool
    thoughts: bool


class GeminiDialect:
    """See `evener_proxy.canonical.CountingDialect`."""

    name = "gemini"
    call_prefix = "call_"
    grace_s = 5.0  # gemini-cli aborts when no head has come within 60 s

    def parse(self, body: bytes, target: str, /) -> GeminiRequest:
        """Decode a request. Raises CallError 400 that names the field."""
        return _request(read(body, Body), target)

    def parse_count(self, body: bytes, target: str, /) -> GeminiRequest:
        """Decode a ``countTokens`` request: contents, or a whole request as ``generateContentRequest``."""
        asked = read(body, CountBody)
        return _request(asked.generate_content_request or asked, target)

    def count(self, tokens: int) -> bytes:
        """A ``CountTokensResponse``."""
        return _encode({"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]})

    def framing(self, request: GeminiRequest) -> Framing:
        """Server-sent events where they are asked for; a stream without them is one JSON array."""
        return _EVENTS if request.stream and request.sse else JSON_BODY

    def render(self, request: GeminiRequest, reply: Reply) -> bytes:
        """A ``GenerateContentResponse``, or its chunks."""
        if not request.stream:
            return replies.document(request.model, reply, thoughts=request.thoughts)
        form = replies.events if request.sse else replies.array
        return form(request.model, reply, thoughts=request.thoughts)

    def late_error(self, request: GeminiRequest, error: CallError) -> bytes:
        """The error envelope. In a stream of events it stands bare and last: Google's JavaScript client raises nothing else."""
        envelope = self.error(error)
        return b"[" + envelope + b"]" if request.stream and not request.sse else envelope

    def error(self, error: CallError) -> bytes:
        """google.rpc's error envelope."""
        status = _STATUS.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
        body = {"code": error.status, "message": error.message, "status": status, "details": _details(error)}
        return _encode({"error": body})

    def model_list(self, model: ModelInfo) -> bytes:
        """A list of one."""
        return _encode({"models": [_model(model)]})

    def model(self, model: ModelInfo) -> bytes:
        """A ``Model``."""
        return _encode(_model(model))


def _request(asked: Body, target: str) -> GeminiRequest:
    found = _target.fullmatch(target)
    if found is None:
        raise CallError(404, "not_found", f"no such route: {target}")
    if asked.cached_content:
        raise invalid("cachedContent: there is no cached content here", "cachedContent")
    try:
        return _canonical(asked, found["model"], found["method"], parse_qs(found["query"] or ""))
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error


def _canonical(asked: Body, model: str, method: str, query: dict[str, list[str]]) -> GeminiRequest:
    config = asked.generation_config or GenerationConfig()
    contents = listed(asked.contents)
    if not contents:
        raise invalid("contents: contents is not specified", "contents")
    systems = system_messages(asked.system_instruction)
    tools = read_tools(asked.tools, asked.tool_config.function_calling_config if asked.tool_config is not None else None)
    response_format, formatted = read_format(config)
    if config.max_output_tokens is not None and config.max_output_tokens < 1:
        raise invalid("generationConfig.maxOutputTokens must be at least 1", "generationConfig.maxOutputTokens")
    asked_for: dict[str, Any] = msgspec.to_builtins(config)
    return GeminiRequest(
        model=model,
        messages=systems + chat_messages(contents),
        systems=len(systems),
        tools=tools.listed,
        tool_choice=tools.choice,
        parallel_tool_calls=None,
        response_format=response_format,
        stop=config.stop_sequences or None,
        max_tokens=config.max_output_tokens,
        stream=method == "streamGenerateContent",
        constrained=tools.constrained or formatted,
        hosted_tools=tools.hosted,
        asked={name: value for name, value in asked_for.items() if name not in _NOT_SAMPLING},
        sse=query.get("alt") == ["sse"],
        thoughts=(config.thinking_config or ThinkingConfig()).include_thoughts is not False,
    )


def _details(error: CallError) -> list[dict[str, Any]]:
    """google.rpc's ErrorInfo; BadRequest where a field is known, RetryInfo where asking again makes sense."""
    kind = "type.googleapis.com/google.rpc."
    details: list[dict[str, Any]] = [{"@type": kind + "ErrorInfo", "reason": error.code.upper(), "domain": "evener"}]
    if error.param is not None and error.status == 400:
        violation = {"field": error.param, "description": error.message}
        details.append({"@type": kind + "BadRequest", "fieldViolations": [violation]})
    if error.retry_after is not None:
        details.append({"@type": kind + "RetryInfo", "retryDelay": f"{error.retry_after}s"})
    return details


def _model(model: ModelInfo) -> dict[str, Any]:
    limits = {} if model.window is None else {"inputTokenLimit": model.window, "outputTokenLimit": model.window}
    methods = ["generateContent", "countTokens"]
    name = f"models/{model.name}"
    return {"name": name, "version": "001", "displayName": model.name, **limits, "supportedGenerationMethods": methods}
