"""Every tool that the agent runs is a function to the model; calls of tools of type ``custom`` come back as they are called.

Tools that only a vendor can run are left out and counted. Source: `openai.types.chat`, ``ChatCompletionCustomToolParam``,
``ChatCompletionMessageCustomToolCall``, ``ChatCompletionNamedToolChoiceCustomParam``, ``ChatCompletionAllowedToolChoiceParam``.
Called by `chat`.
"""

from typing import Any, Literal, TypeVar

import msgspec

from evener.engines.sampler import ToolCall
from evener_proxy.canonical import CallError
from evener_proxy.dialects import freeform
from evener_proxy.messages import function_tool

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
ESCAPE = b"\\u00"  # a letter of a name may be written as an escape, which says the same


class _Grammar(msgspec.Struct):
    definition: str
    syntax: str = ""


class _Format(msgspec.Struct):
    type: str = "text"
    grammar: _Grammar | None = None


class _Custom(msgspec.Struct):
    name: str
    description: str | None = None
    format: _Format | None = None


class _Call(msgspec.Struct):
    name: str
    input: str = ""


class _Named(msgspec.Struct):
    name: str


class _Allowed(msgspec.Struct):
    tools: list[dict[str, Any]]
    mode: Literal["auto", "required"] = "auto"


class _Tool(msgspec.Struct):
    type: str = "function"


_tool_list = msgspec.json.Decoder(list[_Tool])


def read_tools(given: msgspec.Raw | None) -> tuple[msgspec.Raw | None, frozenset[str], int]:
    """The tools, the names of the custom ones, and how many were left out because only a vendor can run them.

    They lose ``strict``, for which an engine would constrain what is sampled. Raises CallError 400.
    """
    if given is None:
        return None, frozenset(), 0
    kinds = [tool.type for tool in _tool_list.decode(given)]
    if set(kinds) == {"function"} and not (b'"strict"' in bytes(given) or ESCAPE in bytes(given)):
        return given, frozenset(), 0
    listed: list[dict[str, Any]] = msgspec.json.decode(given)
    tools: list[dict[str, Any]] = []
    custom: set[str] = set()
    for index, (kind, tool) in enumerate(zip(kinds, listed, strict=True)):
        if kind == "custom":
            name, function = _as_function(tool, f"tools[{index}]")
            custom.add(name)
            tools.append(function)
        elif kind == "function":
            tools.append(tool)
    strict = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict) and "strict" in tool["function"]]
    for function in strict:
        del function["strict"]
    if set(kinds) == {"function"} and not strict:
        return given, frozenset(), 0
    return msgspec.Raw(_encode(tools)) if tools else None, frozenset(custom), len(kinds) - len(tools)


def read_choice(choice: msgspec.Raw | None, tools: msgspec.Raw | None) -> tuple[msgspec.Raw | None, msgspec.Raw | None]:
    """The tools that the model may see, and a ``tool_choice`` of functions. Raises CallError 400.

    Of allowed tools the model sees only these, so that nothing has to be forbidden while it samples.
    """
    given: Any = None if choice is None else msgspec.json.decode(choice)
    if not isinstance(given, dict):
        return tools, choice
    if given.get("type") == "custom":
        named = _read(given, "custom", _Named, "tool_choice")
        return tools, msgspec.Raw(_encode({"type": "function", "function": {"name": named.name}}))
    if given.get("type") != "allowed_tools":
        return tools, choice
    allowed = _read(given, "allowed_tools", _Allowed, "tool_choice")
    names = {name for each in allowed.tools if (name := _name(each, "function") or _name(each, "custom"))}
    listed: list[dict[str, Any]] = [] if tools is None else msgspec.json.decode(tools)
    left = [tool for tool in listed if _name(tool, "function") in names]
    if allowed.mode == "required" and not left:
        raise CallError(400, "invalid_request", "tool_choice: none of these tools is among tools", param="tool_choice")
    return (msgspec.Raw(_encode(left)) if left else None), (msgspec.Raw(b'"required"') if allowed.mode == "required" else None)


def _as_function(tool: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """The name of a custom tool, and the function that the model sees. Raises CallError 400."""
    custom = _read(tool, "custom", _Custom, where)
    grammar = custom.format.grammar if custom.format is not None else None
    parameters = freeform.schema(grammar.syntax, grammar.definition) if grammar is not None else freeform.schema("", "")
    return custom.name, function_tool(custom.name, custom.description, parameters)


def calls_as_functions(message: msgspec.Raw, where: str) -> tuple[msgspec.Raw, msgspec.Raw]:
    """An assistant's message and its ``tool_calls``, none of which is custom any more. Raises CallError 400."""
    document: dict[str, Any] = msgspec.json.decode(message)
    calls = document.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict) and call.get("type") == "custom":
            custom = _read(call, "custom", _Call, f"{where}.tool_calls[{index}]")
            del call["custom"]
            call |= {"type": "function", "function": {"name": custom.name, "arguments": freeform.arguments_of(custom.input)}}
    return msgspec.Raw(_encode(document)), msgspec.Raw(_encode(calls))


def as_custom(call: ToolCall) -> dict[str, Any]:
    """The model's call of a custom tool, as the agent knows it."""
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": freeform.text_of(call.arguments)}}


def _name(tool: dict[str, Any], kind: str) -> str | None:
    named = tool.get(kind)
    name = named.get("name") if isinstance(named, dict) else None
    return name if isinstance(name, str) else None


def _read(holder: dict[str, Any], name: str, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(holder.get(name), kind)
    except msgspec.ValidationError as error:
        place = f"{where}.{name}"
        raise CallError(400, "invalid_request", f"{place}: {error}", param=place) from error
