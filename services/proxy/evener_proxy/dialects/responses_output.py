"""A reply as a ``response`` object or as its events; both are made from the same items, and a stream has one terminal event.

Each event has the next ``sequence_number``, and each item's events its index and id. Called by `responses`.

Source: `openai.types.responses`, ``Response`` and ``ResponseStreamEvent``. A response that fails on the way ends as OpenAI's
do: an ``error`` event, which client libraries raise, then ``response.failed``.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import msgspec

from evener_proxy.canonical import CallError, CallRequest, Reply
from evener_proxy.dialects.openai import error_fields
from evener_proxy.dialects.responses_input import call_item_id, sealed_reasoning
from evener_proxy.dialects.responses_tools import Item, ToolTable, call_item

_IN_PROGRESS = "response.in_progress"
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_encode = msgspec.json.Encoder().encode
Event = dict[str, Any]


@dataclass(slots=True, eq=False)
class ResponsesRequest(CallRequest):
    """``repeated``: the fields of the request as its response repeats them. ``sealed``: reasoning has encrypted content."""

    table: ToolTable
    repeated: dict[str, Any]
    sealed: bool


def document(request: ResponsesRequest, reply: Reply) -> bytes:
    """The whole ``response``."""
    return _encode(_ended(request, reply))


def stream(request: ResponsesRequest, reply: Reply) -> bytes:
    """All events of a reply that have not left yet."""
    return b"".join(_left(request, _events(request, reply)))


def keep_alive(request: ResponsesRequest) -> bytes:
    """First the events that begin a response, then that it is in progress, once more each time.

    A comment would not do: codex waits 300 s for the next event, whatever else comes.
    """
    if not request.kept:
        return b"".join(_framed(_beginning(request, *request.begin()), 0))
    response = _response(request, *request.begin(), "in_progress")
    return b"".join(_framed(((_IN_PROGRESS, {"response": response}),), request.kept + 1))


def failed_document(request: ResponsesRequest, error: CallError, reply_id: str) -> bytes:
    """A ``response`` that says why it failed."""
    return _encode(_failed(request, error, reply_id))


def failed_stream(request: ResponsesRequest, error: CallError, reply_id: str) -> bytes:
    """The events of a reply that failed before its first item."""
    fields = error_fields(error)
    raised = {"code": fields["code"], "message": fields["message"], "param": fields["param"], "error": fields}
    failed = (("error", raised), ("response.failed", {"response": _failed(request, error, reply_id)}))
    return b"".join(_left(request, chain(_beginning(request, reply_id, int(time.time())), failed)))


def _left(request: ResponsesRequest, events: Iterator[tuple[str, Event]]) -> Iterator[bytes]:
    """What is still to be sent of a response's events: the first two left with the first keep-alive."""
    return _framed(islice(events, 2, None), request.kept + 1) if request.kept else _framed(events, 0)


def _framed(events: Iterable[tuple[str, Event]], first: int) -> Iterator[bytes]:
    for number, (kind, fields) in enumerate(events, first):
        yield b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, "sequence_number": number} | fields))


def _beginning(request: ResponsesRequest, reply_id: str, created: int) -> Iterator[tuple[str, Event]]:
    started = _response(request, reply_id, created, "in_progress")
    yield "response.created", {"response": started}
    yield _IN_PROGRESS, {"response": started}


def _events(request: ResponsesRequest, reply: Reply) -> Iterator[tuple[str, Event]]:
    ended = _ended(request, reply)
    yield from _beginning(request, reply.id, reply.created)
    for index, item in enumerate(ended["output"]):
        yield from _item_events(index, item)
    yield f"response.{ended['status']}", {"response": ended}


def _item_events(index: int, item: Item) -> Iterator[tuple[str, Event]]:
    begun, inner = item | {"status": "in_progress"}, iter(())
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "reasoning":
        begun = item | {"summary": []}
        inner = _summary_events(place, item["summary"][0])
    elif item["type"] == "message":
        begun["content"] = []
        inner = _text_events(place, item["content"][0])
    elif item["type"] == "function_call":
        begun["arguments"] = ""
        inner = _string_events("function_call_arguments", "arguments", place, item)
    elif item["type"] == "custom_tool_call":
        begun["input"] = ""
        inner = _string_events("custom_tool_call_input", "input", place, item)
    yield "response.output_item.added", {"output_index": index, "item": begun}
    yield from inner
    yield "response.output_item.done", {"output_index": index, "item": item}


def _summary_events(place: Event, part: Event) -> Iterator[tuple[str, Event]]:
    place = place | {"summary_index": 0}
    yield "response.reasoning_summary_part.added", place | {"part": part | {"text": ""}}
    yield "response.reasoning_summary_text.delta", place | {"delta": part["text"]}
    yield "response.reasoning_summary_text.done", place | {"text": part["text"]}
    yield "response.reasoning_summary_part.done", place | {"part": part}


def _text_events(place: Event, part: Event) -> Iterator[tuple[str, Event]]:
    place = place | {"content_index": 0}
    yield "response.content_part.added", place | {"part": part | {"text": ""}}
    if part["text"]:
        yield "response.output_text.delta", place | {"delta": part["text"], "logprobs": []}
    yield "response.output_text.done", place | {"text": part["text"], "logprobs": []}
    yield "response.content_part.done", place | {"part": part}


def _string_events(kind: str, field: str, place: Event, item: Item) -> Iterator[tuple[str, Event]]:
    if item[field]:
        yield f"response.{kind}.delta", place | {"delta": item[field]}
    yield f"response.{kind}.done", place | {field: item[field]}


def _response(request: ResponsesRequest, reply_id: str, created: int, status: str) -> Event:
    """A response without output, under the id and time that it has begun with, where it has."""
    reply_id, created = request.began or (reply_id, created)
    return {
        "id": "resp_" + reply_id,
        "object": "response",
        "created_at": created,
        "status": status,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "usage": None,
        **request.repeated,
    }


def _ended(request: ResponsesRequest, reply: Reply) -> Event:
    reason = _INCOMPLETE.get(reply.finish_reason)
    response = _response(request, reply.id, reply.created, "completed" if reason is None else "incomplete")
    if reason is None:
        response["completed_at"] = reply.created
    else:
        response["incomplete_details"] = {"reason": reason}
    response["output"] = _output(request, reply, "completed" if reason is None else "incomplete")
    response["usage"] = _usage(reply)
    return response


def _failed(request: ResponsesRequest, error: CallError, reply_id: str) -> Event:
    """Its code is one of those that OpenAI has, by which an agent knows whether to ask again; else the error's own."""
    code = error.code
    if error.status >= 500:
        code = "server_error"
    elif error.status == 429:
        code = "rate_limit_exceeded"
    elif code == "invalid_request":
        code = "invalid_prompt"
    response = _response(request, reply_id, int(time.time()), "failed")
    return response | {"error": {"code": code, "message": error.message}}


def _output(request: ResponsesRequest, reply: Reply, status: str) -> list[Item]:
    """Reasoning, message, calls; a reply of nothing has an empty message, so that an agent can send its turn back.

    Only the last item can be incomplete: what stands before it was sampled to its end.
    """
    items: list[Item] = []
    if reply.reasoning:
        sealed = sealed_reasoning(reply.id) if request.sealed else None
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        items.append({"type": "reasoning", "id": "rs_" + reply.id, "summary": summary, "encrypted_content": sealed})
    if reply.content or not (items or reply.tool_calls):
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": reply.content or ""}
        items.append(
            {"type": "message", "id": "msg_" + reply.id, "status": "completed", "role": "assistant", "content": [part]}
        )
    for index, call in enumerate(reply.tool_calls):
        items.append(call_item(call, request.table.origin(call.name), call_item_id(reply.id, index), "completed"))
    if items[-1]["type"] != "reasoning":
        items[-1]["status"] = status
    return items


def _usage(reply: Reply) -> Event:
    """An engine does not say how many tokens were cached, or were reasoning."""
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
