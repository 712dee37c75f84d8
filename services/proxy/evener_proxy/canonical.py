"""One request, one reply and one error, whatever the dialect: a dialect parses into these and renders from them.

The canonical form of a message or a tool is OpenAI's chat form as raw JSON, since that is what engines take; text that
needs no change is passed on byte for byte.
"""

import secrets
import time
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from evener.engines.sampler import Sample, ToolCall


@dataclass(slots=True, eq=False)
class CallRequest:
    """What the agent asked. ``messages`` begin with ``systems`` system messages.

    ``max_tokens`` and ``stop`` are honoured; the other sampling wishes are in ``asked`` for the record. ``constrained`` names
    the field that asks for constrained decoding, None where nothing does.
    """

    model: str
    messages: list[msgspec.Raw]
    systems: int
    tools: msgspec.Raw | None
    tool_choice: msgspec.Raw | None
    parallel_tool_calls: bool | None
    response_format: msgspec.Raw | None
    stop: list[str] | None
    max_tokens: int | None
    stream: bool
    include_usage: bool
    constrained: str | None
    asked: dict[str, Any]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy answered, with the ids that we minted; recorded as it is."""

    id: str
    created: int
    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]
    finish_reason: str
    stop_reason: int | str | None
    prompt_tokens: int
    completion_tokens: int


def mint_reply(sample: Sample) -> Reply:
    """The reply of a sample. Ids are ours, so that an echoed tool call can be matched with the call that made it."""
    return Reply(
        id="chatcmpl-" + secrets.token_hex(12),
        created=int(time.time()),
        content=sample.content,
        reasoning=sample.reasoning,
        tool_calls=[ToolCall("call_" + secrets.token_hex(12), each.name, each.arguments) for each in sample.tool_calls],
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        prompt_tokens=sample.prompt_tokens,
        completion_tokens=sample.completion_tokens,
    )


class CallError(Exception):
    """What the agent is told instead of a reply. ``retry_after`` in seconds, only where asking again makes sense."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        super().__init__(f"{status} {code}: {message}")


class Dialect(Protocol):
    """A wire format that agents speak."""

    name: str
    stream_type: bytes  # content type of a streamed reply
    keep_alive_stream: bytes  # bytes that a client of a streamed reply ignores
    keep_alive_body: bytes  # bytes that may stand before a reply in one piece

    def parse(self, body: bytes) -> CallRequest:
        """Raises CallError 400."""
        ...

    def render(self, request: CallRequest, reply: Reply) -> bytes:
        """A reply in one piece."""
        ...

    def stream(self, request: CallRequest, reply: Reply) -> bytes:
        """All events of a streamed reply."""
        ...

    def error(self, error: CallError) -> bytes:
        """The body of an error."""
        ...

    def late_error(self, error: CallError) -> bytes:
        """The events of an error in a stream that has begun."""
        ...
