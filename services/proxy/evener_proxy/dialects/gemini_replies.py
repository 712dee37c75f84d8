"""A reply as Gemini's candidates: one document, or chunks of which the last has the finish reason and the whole usage.

A tool call's arguments are an object here. Text that is no JSON object goes out as ``{"INVALID_JSON": text}``: agents answer
such a call with an error and go on, while MALFORMED_FUNCTION_CALL, the vendor's own word for it, makes gemini-cli ask again
and pi give up. Called by `evener_proxy.dialects.gemini`.
"""

import re
from typing import Any

import msgspec

from evener_proxy.canonical import Reply
from evener_proxy.dialects.gemini_marks import sign

_FINISH = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
# Clients read a stream by lines, and some take these (U+0085, U+2028, U+2029) for the end of one.
_line_ends = re.compile(rb"\xc2\x85|\xe2\x80[\xa8\xa9]")
_ESCAPES = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}
_encode = msgspec.json.Encoder().encode
_arguments = msgspec.json.Decoder(dict[str, Any])


def document(model: str, reply: Reply, *, thoughts: bool) -> bytes:
    """A ``GenerateContentResponse``."""
    return _encode(_response(model, reply, _parts(reply, thoughts=thoughts), last=True))


def events(model: str, reply: Reply, *, thoughts: bool) -> bytes:
    """The chunks as server-sent events."""
    return b"".join(event(chunk) for chunk in _chunks(model, reply, thoughts=thoughts))


def array(model: str, reply: Reply, *, thoughts: bool) -> bytes:
    """The chunks as one JSON array."""
    return b"[" + b"\n,\r\n".join(_encode(chunk) for chunk in _chunks(model, reply, thoughts=thoughts)) + b"\n]\n"


def event(chunk: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _line_ends.sub(lambda found: _ESCAPES[found[0]], _encode(chunk)) + b"\r\n\r\n"


def _chunks(model: str, reply: Reply, *, thoughts: bool) -> list[dict[str, Any]]:
    """A chunk for each part."""
    parts = _parts(reply, thoughts=thoughts)
    return [_response(model, reply, [part], last=part is parts[-1]) for part in parts]


def _response(model: str, reply: Reply, parts: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    usage = {"promptTokenCount": reply.prompt_tokens, "totalTokenCount": reply.prompt_tokens}
    if last:
        candidate["finishReason"] = _FINISH.get(reply.finish_reason, "STOP")
        usage["candidatesTokenCount"] = reply.completion_tokens
        usage["totalTokenCount"] += reply.completion_tokens
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": model, "responseId": reply.id}


def _parts(reply: Reply, *, thoughts: bool) -> list[dict[str, Any]]:
    """At least one part. Of parallel calls only the first is signed, as Gemini does."""
    signature = sign(reply)
    parts: list[dict[str, Any]] = []
    if reply.reasoning and thoughts:
        parts.append({"text": reply.reasoning, "thought": True, "thoughtSignature": signature})
    if reply.content or not (parts or reply.tool_calls):
        parts.append({"text": reply.content or "", "thoughtSignature": signature})
    for index, call in enumerate(reply.tool_calls):
        part: dict[str, Any] = {"functionCall": {"name": call.name, "args": _args(call.arguments), "id": call.id}}
        parts.append(part if index else part | {"thoughtSignature": signature})
    return parts


def _args(text: str) -> msgspec.Raw:
    """The arguments as a JSON object in one line."""
    if not text.strip():
        return msgspec.Raw(b"{}")
    try:
        return msgspec.Raw(_encode(_arguments.decode(text)))
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(_encode({"INVALID_JSON": text}))
