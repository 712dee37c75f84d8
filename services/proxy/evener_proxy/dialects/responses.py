"""OpenAI's Responses: a request becomes canonical, or is refused by the name of its field; no state of it is kept.

What would need state here (``previous_response_id``, conversations, background, stored prompts) is refused: an agent that
sends its whole history needs none of it. Source: the OpenAI API reference, "Responses" and "Streaming events".
"""

import secrets
from typing import Annotated, Any

import msgspec

from evener_proxy.canonical import EVENT_STREAM, JSON_BODY, CallError, Framing, ModelInfo, Reply
from evener_proxy.dialects import openai
from evener_proxy.dialects.responses_input import read_input
from evener_proxy.dialects.responses_items import refused
from evener_proxy.dialects.responses_output import (
    ResponsesRequest,
    document,
    failed_document,
    failed_stream,
    keep_alive,
    stream,
)
from evener_proxy.dialects.responses_tools import ToolTable
from evener_proxy.messages import tool_list

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
# A union of Raw and None is not a type that msgspec decodes, so that what is absent is an empty Raw.
_ABSENT = msgspec.Raw()


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class _Format(msgspec.Struct):
    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = _ABSENT
    strict: bool | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None
    verbosity: str | None = None


class _Choice(msgspec.Struct):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str = "auto"
    tools: "list[_Choice] | None" = None


class _Body(msgspec.Struct):
    input: str | list[dict[str, Any]] | None = None
    model: str = ""
    instructions: str | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: str | _Choice | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    stream: bool | None = None
    include: list[str] | None = None
    max_output_tokens: _Limit | None = None
    max_tool_calls: _Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: _Count | None = None
    reasoning: _Reasoning | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT


class _Verbatim(msgspec.Struct):
    """Fields that a response repeats as they were sent."""

    tools: msgspec.Raw = _ABSENT
    tool_choice: msgspec.Raw = _ABSENT
    text: msgspec.Raw = _ABSENT


_SAMPLING = ("temperature", "top_p", "top_logprobs", "max_output_tokens", "max_tool_calls", "truncation")
_STATEFUL = ("previous_response_id", "conversation", "prompt")
_COMPRESSED = {b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x8b": "gzip", b"\x78\x9c": "deflate"}
_body = msgspec.json.Decoder(_Body)
_verbatim = msgspec.json.Decoder(_Verbatim)
_encode = msgspec.json.Encoder().encode
_EVENTS = Framing(EVENT_STREAM, keep_alive)


class ResponsesDialect:
    """See `evener_proxy.canonical.Dialect`."""

    name = "responses"
    call_prefix = "call_"
    grace_s = 10.0

    def parse(self, body: bytes, _target: str, /) -> ResponsesRequest:
        """Decode a request. Raises CallError 400 that names the field."""
        for magic, coding in _COMPRESSED.items():
            if body.startswith(magic):
                raise CallError(400, "invalid_request", f"the body is compressed ({coding}); send plain JSON")
        try:
            body.decode()
            return _read(_body.decode(body), _verbatim.decode(body))
        except msgspec.DecodeError as error:
            raise CallError(400, "invalid_request", str(error)) from error
        except UnicodeDecodeError as error:
            raise CallError(400, "invalid_request", f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
        except (RecursionError, OverflowError) as error:
            raise CallError(400, "invalid_request", f"the body goes beyond what JSON is read to here: {error}") from error

    def framing(self, request: ResponsesRequest) -> Framing:
        """Server-sent events where a stream is asked for."""
        return _EVENTS if request.stream else JSON_BODY

    def render(self, request: ResponsesRequest, reply: Reply) -> bytes:
        """A ``response``, or its events."""
        return stream(request, reply) if request.stream else document(request, reply)

    def late_error(self, request: ResponsesRequest, error: CallError) -> bytes:
        """A failed response: in a stream the ``error`` event, which OpenAI's clients raise, and ``response.failed``."""
        fail = failed_stream if request.stream else failed_document
        return fail(request, _about_input(error), secrets.token_hex(12))

    def error(self, error: CallError) -> bytes:
        """OpenAI's error envelope."""
        return openai.error_envelope(_about_input(error))

    def model_list(self, model: ModelInfo) -> bytes:
        """A ``list`` of one."""
        return openai.model_list(model)

    def model(self, model: ModelInfo) -> bytes:
        """A ``model``."""
        return openai.model_document(model)


def _about_input(error: CallError) -> CallError:
    """The error in the words of this dialect, whose prompt is not in ``messages``."""
    if error.param != "messages":
        return error
    return CallError(error.status, error.code, error.message, param="input", retry_after=error.retry_after)


def _read(asked: _Body, sent: _Verbatim) -> ResponsesRequest:
    for name in _STATEFUL:
        value = getattr(asked, name)
        if value is not None and (not isinstance(value, msgspec.Raw) or bytes(value) not in (b"", b"null")):
            raise refused(name, "no state is kept here; send the whole input")
    if asked.background:
        raise refused("background", "a response cannot be made in the background here")
    table = ToolTable()
    table.add(asked.tools or (), "tools")
    messages, systems = read_input(asked.instructions, _items(asked), table)
    tool_choice, forced, only = _tool_choice(asked.tool_choice, table)
    response_format = _response_format(asked.text)
    return ResponsesRequest(
        model=asked.model,
        messages=messages,
        systems=systems,
        tools=tool_list(table.definitions(only)),
        tool_choice=tool_choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=response_format,
        stop=None,
        max_tokens=asked.max_output_tokens,
        stream=bool(asked.stream),
        constrained="text.format" if response_format is not None else "tool_choice" if forced else None,
        hosted_tools=table.hosted,
        asked=_asked(asked),
        table=table,
        repeated=_repeated(asked, sent),
        sealed="reasoning.encrypted_content" in (asked.include or ()),
    )


def _items(asked: _Body) -> list[dict[str, Any]]:
    if asked.input is None or asked.input == []:
        raise refused("input", "must not be empty")
    return [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input


def _tool_choice(choice: str | _Choice | None, table: ToolTable) -> tuple[msgspec.Raw | None, bool, frozenset[str] | None]:
    """In chat form; whether it forces a call; the names that the model may see, None for all. Raises CallError 400."""
    if isinstance(choice, _Choice):
        return _allowed(choice, table) if choice.type == "allowed_tools" else _named(choice, table)
    if choice not in (None, "none", "auto", "required"):
        raise refused("tool_choice", "expected none, auto, required or an object")
    if choice == "required":
        return _required(table, None)
    return (msgspec.Raw(b'"none"') if choice == "none" and table.definitions() else None), False, None


def _required(table: ToolTable, only: frozenset[str] | None) -> tuple[msgspec.Raw, bool, frozenset[str] | None]:
    if not table.definitions(only):
        raise refused("tool_choice", "a call is required, but there is no tool that the agent can run")
    return msgspec.Raw(b'"required"'), True, only


def _named(choice: _Choice, table: ToolTable) -> tuple[msgspec.Raw, bool, None]:
    name = table.find(choice.type, choice.name, choice.namespace)
    if name is None:
        raise refused("tool_choice", f"{choice.name or choice.type!r} is not among the tools that the agent can run")
    return msgspec.Raw(_encode({"type": "function", "function": {"name": name}})), True, None


def _allowed(choice: _Choice, table: ToolTable) -> tuple[msgspec.Raw | None, bool, frozenset[str] | None]:
    """The model sees only the allowed tools, so that nothing has to be forbidden while it samples."""
    found = (table.find(tool.type, tool.name, tool.namespace) for tool in choice.tools or ())
    only = frozenset(name for name in found if name is not None)
    if choice.mode == "required":
        return _required(table, only)
    return None, False, only


def _response_format(text: _Text | None) -> msgspec.Raw | None:
    """In chat form. Raises CallError 400."""
    form = text.format if text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return msgspec.Raw(b'{"type":"json_object"}')
    if form.type != "json_schema" or form.name is None or not bytes(form.schema):
        raise refused("text.format", "expected text, json_object, or json_schema with name and schema")
    schema = {"name": form.name, "description": form.description, "schema": form.schema, "strict": form.strict}
    given = {name: value for name, value in schema.items() if value is not None}
    return msgspec.Raw(_encode({"type": "json_schema", "json_schema": given}))


def _asked(asked: _Body) -> dict[str, Any]:
    wishes = {name: value for name in _SAMPLING if (value := getattr(asked, name)) is not None}
    if asked.reasoning is not None:
        wishes["reasoning"] = {"effort": asked.reasoning.effort, "summary": asked.reasoning.summary}
    if asked.text is not None and asked.text.verbosity is not None:
        wishes["text"] = {"verbosity": asked.text.verbosity}
    return wishes


def _repeated(asked: _Body, sent: _Verbatim) -> dict[str, Any]:
    """The request's fields as a response has them, with the API's defaults. Nothing is stored, whatever was asked."""
    reasoning = asked.reasoning or _Reasoning()
    return {
        "background": False,
        "frequency_penalty": 0.0,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "prompt_cache_retention": asked.prompt_cache_retention,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": asked.safety_identifier,
        "service_tier": asked.service_tier or "default",
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": _line(sent.text, {"format": {"type": "text"}, "verbosity": "medium"}),
        "tool_choice": _line(sent.tool_choice, "auto"),
        "tools": _line(sent.tools, []),
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": asked.truncation or "disabled",
        "user": asked.user,
    }


def _line(sent: msgspec.Raw, default: Any) -> Any:
    """What was sent, without the line breaks that would end an event."""
    return default if bytes(sent) in (b"", b"null") else msgspec.Raw(msgspec.json.format(bytes(sent), indent=-1))
