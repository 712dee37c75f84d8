"""Tools of Anthropic's Messages as functions: those that the agent runs are kept, those that only the vendor runs are not.

Source: the Claude API reference, "Tool use". Tools that Anthropic defines and the agent runs (``bash_20250124``) have no
schema in a request, since the vendor's models know them; another policy is told it. Used by
`evener_proxy.dialects.anthropic`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from evener_proxy.canonical import CallError
from evener_proxy.dialects.anthropic_blocks import wrong
from evener_proxy.messages import function_tool

_encode = msgspec.json.Encoder().encode


class Tool(msgspec.Struct):
    """One of the request's ``tools``."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[Any] | None = None


class ToolChoice(msgspec.Struct):
    """The request's ``tool_choice``."""

    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


def _schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_TEXT = {"type": "string"}
_LINE = {"type": "integer"}
_LINES = {"type": "array", "items": _LINE}
_EDITOR_COMMANDS = ("view", "create", "str_replace", "insert")
_MEMORY_COMMANDS = (*_EDITOR_COMMANDS, "delete", "rename")
# The families of tools that the agent runs, by the start of their type: description and schema, from the API's reference.
_KNOWN = {
    "bash_": ("Run a command in a bash session that persists.", _schema((), command=_TEXT, restart={"type": "boolean"})),
    "text_editor_": (
        "View, create and edit files.",
        _schema(
            ("command", "path"),
            command={"type": "string", "enum": list(_EDITOR_COMMANDS)},
            path=_TEXT,
            file_text=_TEXT,
            old_str=_TEXT,
            new_str=_TEXT,
            insert_line=_LINE,
            insert_text=_TEXT,
            view_range=_LINES,
        ),
    ),
    "memory_": (
        "Keep notes in files under /memories.",
        _schema(
            ("command",),
            command={"type": "string", "enum": list(_MEMORY_COMMANDS)},
            path=_TEXT,
            file_text=_TEXT,
            old_str=_TEXT,
            new_str=_TEXT,
            insert_line=_LINE,
            insert_text=_TEXT,
            view_range=_LINES,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}


def function_tools(tools: Sequence[Tool]) -> tuple[list[dict[str, Any]], int]:
    """The functions, and how many tools only the vendor can run. Raises CallError 400 with the path of what is wrong."""
    functions: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        if tool.input_schema is None and tool.type not in (None, "custom"):
            description, schema = next((known for start, known in _KNOWN.items() if tool.type.startswith(start)), (None, None))
        else:
            description, schema = tool.description, _parameters(tool, f"tools.{index}")
        if schema is None:
            continue
        if not tool.name:
            raise wrong(f"tools.{index}.name", "Field required")
        functions.append(function_tool(tool.name, description, schema))
    return functions, len(tools) - len(functions)


def chat_choice(choice: ToolChoice | None, functions: Sequence[dict[str, Any]]) -> Any:
    """The ``tool_choice`` of a chat request; None where there is nothing to choose. Raises CallError 400."""
    if choice is None or not functions:
        return None
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            if all(tool["function"]["name"] != choice.name for tool in functions):
                raise wrong("tool_choice.name", f"Tool {choice.name!r} not found in provided tools")
            return {"type": "function", "function": {"name": choice.name}}
        case _:
            raise wrong("tool_choice.type", f"Input tag {choice.type!r} is none of 'auto', 'any', 'tool', 'none'")


def forces(choice: ToolChoice | None) -> bool:
    """Whether the choice takes away the policy's own."""
    return choice is not None and choice.type in ("any", "tool")


def _parameters(tool: Tool, path: str) -> dict[str, Any]:
    if tool.input_schema is None:
        raise CallError(400, "invalid_request", f"{path}.input_schema: Field required", param=f"{path}.input_schema")
    if tool.input_examples:
        return tool.input_schema | {"examples": tool.input_examples}
    return tool.input_schema
