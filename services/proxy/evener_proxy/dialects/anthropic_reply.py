"""One reply as a message of Anthropic's API, or as the events of its stream: both say the same.

Source: the Claude API reference, "Messages" and "Streaming messages". A block's order is thinking, text, tool use. Used by
`evener_proxy.dialects.anthropic`.
"""

import base64
from collections.abc import Iterator
from typing import Any

import msgspec

from evener_proxy.canonical import CallRequest, Reply

INVALID = "INVALID_JSON"
"""The key under which the API's reference ("Fine-grained tool streaming") carries arguments that are no JSON object."""

_encode = msgspec.json.Encoder().encode
_STOP = {"length": "max_tokens", "content_filter": "refusal"}


def document(request: CallRequest, reply: Reply) -> bytes:
    """The ``message``."""
    stop_reason, stop_sequence = _stop(request, reply)
    return _encode(_message(request, reply, _blocks(reply), stop_reason, stop_sequence, reply.completion_tokens))


def stream(request: CallRequest, reply: Reply) -> bytes:
    """The events from ``message_start`` to ``message_stop``."""
    stop_reason, stop_sequence = _stop(request, reply)
    delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
    events = [event("message_start", {"message": _message(request, reply, [], None, None, 0)})]
    for index, (opening, deltas) in enumerate(_streamed(reply)):
        events.append(event("content_block_start", {"index": index, "content_block": opening}))
        events += [event("content_block_delta", {"index": index, "delta": each}) for each in deltas]
        events.append(event("content_block_stop", {"index": index}))
    events.append(event("message_delta", {"delta": delta, "usage": _usage(reply, reply.completion_tokens)}))
    events.append(event("message_stop", {}))
    return b"".join(events)


def event(name: str, fields: dict[str, Any]) -> bytes:
    """A server-sent event; its data repeat its name as ``type``."""
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name, **fields}) + b"\n\n"


def _message(
    request: CallRequest,
    reply: Reply,
    content: list[dict[str, Any]],
    stop_reason: str | None,
    stop_sequence: str | None,
    output_tokens: int,
) -> dict[str, Any]:
    return {
        "id": "msg_" + reply.id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": _usage(reply, output_tokens) | {"service_tier": "standard"},
    }


def _usage(reply: Reply, output_tokens: int) -> dict[str, Any]:
    """All of the prompt counts as ``input_tokens``: nothing is priced by what an engine has cached."""
    return {
        "input_tokens": reply.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _stop(request: CallRequest, reply: Reply) -> tuple[str, str | None]:
    """``stop_reason`` and ``stop_sequence``. An agent runs the calls of a reply that is whole only where told ``tool_use``."""
    if reply.finish_reason in _STOP:
        return _STOP[reply.finish_reason], None
    if reply.tool_calls:
        return "tool_use", None
    if isinstance(reply.stop_reason, str) and reply.stop_reason in (request.stop or ()):
        return "stop_sequence", reply.stop_reason
    return "end_turn", None


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": _signature(reply)})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.Raw(_input(call.arguments))}
        for call in reply.tool_calls
    ]
    return blocks


def _streamed(reply: Reply) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each block as it opens, and what is added to it."""
    if reply.reasoning:
        yield (
            {"type": "thinking", "thinking": "", "signature": ""},
            [
                {"type": "thinking_delta", "thinking": reply.reasoning},
                {"type": "signature_delta", "signature": _signature(reply)},
            ],
        )
    if reply.content:
        yield {"type": "text", "text": ""}, [{"type": "text_delta", "text": reply.content}]
    for call in reply.tool_calls:
        opening: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield opening, [{"type": "input_json_delta", "partial_json": _input(call.arguments).decode()}]


def _signature(reply: Reply) -> str:
    """Opaque to agents, which send it back beside the thinking or drop it; nothing is read from it."""
    return base64.b64encode(f"evener:{reply.id}".encode()).decode()


def _input(arguments: str) -> bytes:
    """The model's own text where it is a JSON object, else an object that holds it: clients take nothing else."""
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return arguments.encode()
    except (msgspec.DecodeError, RecursionError):
        pass
    return _encode({INVALID: arguments} if arguments.strip() else {})
