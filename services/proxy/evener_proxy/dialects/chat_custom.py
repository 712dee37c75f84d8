"""Tools of type ``custom``, their calls and the choice of one become functions; the model's calls of them come back as custom.

Source: `openai.types.chat`, ``ChatCompletionCustomToolParam``, ``ChatCompletionMessageCustomToolCall``,
``ChatCompletionNamedToolChoiceCustomParam``. Called by `chat`.
"""

from typing import Any, TypeVar

import msgspec

from evener.engines.sampler import ToolCall
from evener_proxy.canonical import CallError
from evener_proxy.dialects import freeform
from evener_proxy.messages import function_tool

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


class _Grammar(msgspec.Struct):
    definition: str
    syntax: str = ""


class _Format(msgspec.Struct):
    type: str = "text"
    grammar: _Grammar | None = None


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    format: _Format | None = None


class _Call(msgspec.Struct):
    name: str
    input: str = ""


class _Named(msgspec.Struct):
    name: str


def tool_as_function(tool: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """The name of a custom tool, and the function that the model sees. Raises CallError 400."""
    custom = _read(tool, _Tool, where)
    grammar = custom.format.grammar if custom.format is not None else None
    parameters = freeform.schema(grammar.syntax, grammar.definition) if grammar is not None else freeform.schema("", "")
    return custom.name, function_tool(custom.name, custom.description, parameters)


def calls_as_functions(message: msgspec.Raw, where: str) -> tuple[msgspec.Raw, msgspec.Raw]:
    """An assistant's message and its ``tool_calls``, none of which is custom any more. Raises CallError 400."""
    document: dict[str, Any] = msgspec.json.decode(message)
    calls = document.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict) and call.get("type") == "custom":
            custom = _read(call, _Call, f"{where}.tool_calls[{index}]")
            del call["custom"]
            call |= {"type": "function", "function": {"name": custom.name, "arguments": freeform.arguments_of(custom.input)}}
    return msgspec.Raw(_encode(document)), msgspec.Raw(_encode(calls))


def choice_as_function(choice: msgspec.Raw) -> msgspec.Raw:
    """A ``tool_choice`` that names a custom tool names the function."""
    given = msgspec.json.decode(choice)
    if not isinstance(given, dict) or given.get("type") != "custom":
        return choice
    named = _read(given, _Named, "tool_choice")
    return msgspec.Raw(_encode({"type": "function", "function": {"name": named.name}}))


def as_custom(call: ToolCall) -> dict[str, Any]:
    """The model's call of a custom tool, as the agent knows it."""
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": freeform.text_of(call.arguments)}}


def _read(holder: dict[str, Any], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(holder.get("custom"), kind)
    except msgspec.ValidationError as error:
        place = f"{where}.custom"
        raise CallError(400, "invalid_request", f"{place}: {error}", param=place) from error
