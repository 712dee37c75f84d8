"""Gemini's tools, tool choice and output schema in the form of chat requests.

Only function declarations are the agent's own; every other tool is run by the vendor, and is counted and left out. Called by
`evener_proxy.dialects.gemini`.
"""

from dataclasses import dataclass
from typing import Any, cast

import msgspec

from evener_proxy import messages
from evener_proxy.dialects.gemini_wire import (
    FunctionCallingConfig,
    FunctionDeclaration,
    GenerationConfig,
    camel,
    convert,
    invalid,
    listed,
)

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_SCHEMAS = {"items", "not", "if", "then", "else", "contains", "propertyNames"}
_SCHEMA_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
_RENAMED = {"defs": "$defs", "ref": "$ref"}
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Tools:
    """What a chat request says of tools. ``constrained`` and ``hosted`` are as in `CallRequest`."""

    listed: msgspec.Raw | None
    choice: msgspec.Raw | None
    constrained: str | None
    hosted: int


def read_tools(given: list[dict[str, Any]] | dict[str, Any] | None, config: FunctionCallingConfig | None) -> Tools:
    """The tools and which of them must be called. Raises CallError 400."""
    declared: list[dict[str, Any]] = []
    hosted = 0
    for index, tool in enumerate(listed(given)):
        declarations = listed(tool.get("functionDeclarations"))
        path = f"$.tools[{index}].functionDeclarations"
        declared += [_tool(each, f"{path}[{place}]") for place, each in enumerate(declarations)]
        hosted += sum(value is not None and key != "functionDeclarations" for key, value in tool.items())
    mode = ((config.mode if config is not None else None) or "AUTO").upper()
    if config is not None and mode == "ANY":
        return _forced(declared, config.allowed_function_names or [], hosted)
    choice = msgspec.Raw(b'"none"') if mode == "NONE" and declared else None
    return Tools(messages.tool_list(declared), choice, None, hosted)


def read_format(config: GenerationConfig) -> tuple[msgspec.Raw | None, str | None]:
    """The output format, and the field that asks for it; None twice for free text."""
    if config.response_json_schema is not None:
        return _json_schema(config.response_json_schema), "generationConfig.responseJsonSchema"
    if config.response_schema is not None:
        return _json_schema(json_schema(config.response_schema)), "generationConfig.responseSchema"
    if (config.response_mime_type or "text/plain").lower() != "text/plain":
        return msgspec.Raw(b'{"type":"json_object"}'), "generationConfig.responseMimeType"
    return None, None


def json_schema(schema: Any) -> Any:
    """Google's subset of OpenAPI 3.0 as JSON schema: types in lower case, ``nullable`` as a type, counts as numbers.

    What is already JSON schema stays as it is.
    """
    if not isinstance(schema, dict):
        return schema
    spelled = {camel(key): value for key, value in cast("dict[str, Any]", schema).items()}
    found = {_RENAMED.get(key, key): value for key, value in spelled.items() if key not in ("nullable", "propertyOrdering")}
    result = {key: _keyword(key, value) for key, value in found.items()}
    if result.get("type") == "type_unspecified":
        del result["type"]
    if spelled.get("nullable") is True:
        _allow_null(result)
    return result


def _keyword(key: str, value: Any) -> Any:
    if key == "type":
        return [_lower(each) for each in cast("list[Any]", value)] if isinstance(value, list) else _lower(value)
    if key in _SCHEMAS or key == "additionalProperties":
        return json_schema(value)
    if key in _SCHEMA_LISTS and isinstance(value, list):
        return [json_schema(each) for each in cast("list[Any]", value)]
    if key in _SCHEMA_MAPS and isinstance(value, dict):
        return {name: json_schema(each) for name, each in cast("dict[str, Any]", value).items()}
    if key in _COUNTS and isinstance(value, str) and value.isdecimal() and len(value) < 20:
        return int(value)  # proto3's JSON has 64-bit integers as strings
    return value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _allow_null(schema: dict[str, Any]) -> None:
    kind = schema.get("type")
    if isinstance(kind, str) and kind != "null":
        schema["type"] = [kind, "null"]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]


def _tool(given: Any, path: str) -> dict[str, Any]:
    declaration = convert(given, FunctionDeclaration, path)
    schema = declaration.parameters_json_schema
    if schema is None:
        schema = json_schema(declaration.parameters)
    return messages.function_tool(declaration.name, declaration.description, _NO_PARAMETERS if schema is None else schema)


def _forced(declared: list[dict[str, Any]], allowed: list[str], hosted: int) -> Tools:
    """A call is demanded. Engines know no list of allowed tools, so that the others are left out."""
    path = "toolConfig.functionCallingConfig"
    wanted = [tool for tool in declared if not allowed or tool["function"]["name"] in allowed]
    if not wanted:
        raise invalid(f"{path}: the mode ANY needs a declared function that it allows", path)
    choice: Any = "required"
    if len(allowed) == 1:
        wanted, choice = declared, {"type": "function", "function": {"name": allowed[0]}}
    return Tools(messages.tool_list(wanted), msgspec.Raw(_encode(choice)), f"{path}.mode", hosted)


def _json_schema(schema: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode({"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}))
