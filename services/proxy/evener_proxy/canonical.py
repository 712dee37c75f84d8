"""One request, one reply and one error, whatever the dialect: a dialect parses into these and renders from them.

The canonical form of a message or a tool is OpenAI's chat form as raw JSON, since that is what engines take; text that
needs no change is passed on byte for byte.
"""

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from evener.engines.sampler import Sample, ToolCall


@dataclass(slots=True, eq=False)
class CallRequest:
    """What the agent asked. ``messages`` begin with ``systems`` system messages.

    ``max_tokens`` and ``stop`` are honoured; the other sampling wishes are in ``asked`` for the record. ``constrained`` names
    the field that asks for constrained decoding, None where nothing does. ``hosted_tools``: how many tools, and items of such
    tools, were left out because only the vendor can run them. ``kept``: the keep-alives that have left before its reply;
    ``began``: the id and the time that they gave it, where they are events of it. A dialect adds in a class of its own what
    its replies repeat of the request.
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
    constrained: str | None
    hosted_tools: int
    asked: dict[str, Any]
    kept: int = field(default=0, init=False)
    began: tuple[str, int] | None = field(default=None, init=False)

    def begin(self) -> tuple[str, int]:
        """The id and the time of a reply whose first event leaves before it is there."""
        if self.began is None:
            self.began = (secrets.token_hex(12), int(time.time()))
        return self.began


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy answered; recorded as it is.

    ``id`` is 24 hex digits, before which a dialect puts its prefixes; the ids of the tool calls are those that the agent sees.
    """

    id: str
    created: int
    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]
    finish_reason: str
    stop_reason: int | str | None
    prompt_tokens: int
    completion_tokens: int


REPLY_DIGITS = 20
"""So many digits of a reply's id are also in the ids of its calls; the last four of those count them."""
_call_id = re.compile(r"[a-z]+_([0-9a-f]{20})[0-9a-f]{4}")


def mint_reply(sample: Sample, call_prefix: str) -> Reply:
    """The reply of a sample. Ids are ours, so that an echoed tool call can be matched with the call that made it."""
    reply_id = secrets.token_hex(12)
    stem = call_prefix + reply_id[:REPLY_DIGITS]
    return Reply(
        id=reply_id,
        created=int(time.time()),
        content=sample.content,
        reasoning=sample.reasoning,
        tool_calls=[ToolCall(f"{stem}{index:04x}", each.name, each.arguments) for index, each in enumerate(sample.tool_calls)],
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        prompt_tokens=sample.prompt_tokens,
        completion_tokens=sample.completion_tokens,
    )


def reply_of_call(call_id: str | None) -> str | None:
    """The first `REPLY_DIGITS` of the id of the reply that a call is of; None where its id does not look like ours.

    Equal ones are of one reply. Others make ids that look alike, so that different ones prove nothing.
    """
    found = _call_id.fullmatch(call_id) if call_id else None
    return found[1] if found else None


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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The one model that a session may name.

    ``window`` in tokens, None where the engine does not say; ``opened`` in seconds since the epoch.
    """

    name: str
    window: int | None
    opened: float


@dataclass(frozen=True, slots=True)
class Framing:
    """How a reply's body looks on the wire. ``keep_alive``: what is sent before it, again and again: bytes that a client
    ignores, or what makes them of the request, whose ``kept`` says how many have left.
    """

    content_type: bytes
    keep_alive: bytes | Callable[[Any], bytes]


JSON_BODY = Framing(b"application/json", b" ")
EVENT_STREAM = b"text/event-stream; charset=utf-8"

R = TypeVar("R", bound=CallRequest)


class Dialect(Protocol[R]):
    """A wire format that agents speak. ``target`` is a request's path and query, as in ``/v1/messages?beta=true``."""

    name: str
    call_prefix: str  # before the ids of tool calls
    grace_s: float  # seconds that its clients surely wait for a response head

    def parse(self, body: bytes, target: str, /) -> R:
        """Raises CallError 400 that names the field."""
        ...

    def framing(self, request: R) -> Framing:
        """The framing of the request's reply, streamed or not."""
        ...

    def render(self, request: R, reply: Reply) -> bytes:
        """The whole body of a reply: one document, or all events of a stream where ``request.stream``."""
        ...

    def late_error(self, request: R, error: CallError) -> bytes:
        """What ends a reply whose head (200), and perhaps keep-alives, have left."""
        ...

    def error(self, error: CallError) -> bytes:
        """The body of an error whose status is not sent yet."""
        ...

    def model_list(self, model: ModelInfo) -> bytes:
        """The list of models: this one."""
        ...

    def model(self, model: ModelInfo) -> bytes:
        """The description of one model."""
        ...


class CountingDialect(Dialect[R], Protocol[R]):
    """A dialect with a route that counts the tokens of a prompt."""

    def parse_count(self, body: bytes, target: str, /) -> R:
        """Like ``parse``; the body may lack what only sampling needs."""
        ...

    def count(self, tokens: int) -> bytes:
        """The body of the answer."""
        ...
