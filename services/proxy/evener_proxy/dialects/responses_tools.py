"""Every tool that the agent runs reaches the model as a function of a unique name; calls come back as the agent's own items.

Tools that only the vendor can run are left out and counted. A call whose arguments do not have the shape of its item is
delivered as a plain ``function_call``, so that the model's own text arrives. Called by `responses` (requests) and
`responses_output` (replies).

Source: `openai.types.responses`, ``ToolParam``, ``ResponseInputItemParam``, ``ResponseOutputItem``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import msgspec

from evener.engines.sampler import ToolCall
from evener_proxy.canonical import CallError
from evener_proxy.dialects import freeform
from evener_proxy.messages import function_tool

Kind = Literal["function", "custom", "local_shell", "shell", "apply_patch", "tool_search"]
Item = dict[str, Any]
T = TypeVar("T")

# A union of Raw and None is not a type that msgspec decodes, so that what is absent is an empty Raw.
_ABSENT = msgspec.Raw()
_NO_PARAMETERS = {"type": "object", "properties": {}}
_encode = msgspec.json.Encoder().encode
_sorted = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class Origin:
    """A tool as the agent knows it. The built-in kinds are named by their kind."""

    kind: Kind
    name: str
    namespace: str | None = None

    @property
    def qualified(self) -> str:
        """The name that the model sees unless another tool has it."""
        if self.namespace is None:
            return self.name
        return self.namespace + ("" if self.namespace.endswith("__") else "__") + self.name


class _Head(msgspec.Struct):
    type: str


class _Format(msgspec.Struct):
    type: str = "text"
    syntax: str = ""
    definition: str = ""


class _Place(msgspec.Struct):
    type: str = "local"


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = _ABSENT


class _Custom(msgspec.Struct):
    name: str
    description: str | None = None
    format: _Format | None = None


class _Namespace(msgspec.Struct):
    name: str
    tools: list[msgspec.Raw]
    description: str | None = None


class _Shell(msgspec.Struct):
    environment: _Place | None = None


class _Search(msgspec.Struct):
    execution: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = _ABSENT


_STRINGS = {"type": "array", "items": {"type": "string"}}
_BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "local_shell": (
        "Runs a command on the user's machine and returns its output.",
        {
            "type": "object",
            "properties": {
                "command": _STRINGS,
                "working_directory": {"type": "string"},
                "timeout_ms": {"type": "integer"},
                "env": {"type": "object", "additionalProperties": {"type": "string"}},
                "user": {"type": "string"},
            },
            "required": ["command"],
        },
    ),
    "shell": (
        "Runs shell commands on the user's machine, each on its own, and returns their output.",
        {
            "type": "object",
            "properties": {
                "commands": _STRINGS,
                "timeout_ms": {"type": "integer"},
                "max_output_length": {"type": "integer"},
            },
            "required": ["commands"],
        },
    ),
    "apply_patch": (
        "Creates, updates or deletes a file; diff in the V4A format, none to delete.",
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                "path": {"type": "string"},
                "diff": {"type": "string"},
            },
            "required": ["type", "path"],
        },
    ),
}


class ToolTable:
    """The tools of one request. ``hosted``: how many were left out because only the vendor can run them, and items of such
    tools in its history.
    """

    def __init__(self) -> None:
        self.hosted = 0
        self._origins: dict[str, Origin] = {}
        self._names: dict[Origin, str] = {}
        self._definitions: dict[str, dict[str, Any]] = {}

    def add(self, tools: Sequence[msgspec.Raw], where: str) -> list[str]:
        """List more tools, and return their names; one that is listed again replaces the earlier one. Raises CallError 400.

        Names outside of namespaces are given first, so that the agent's plain names stay as they are.
        """
        found = list(self._read(tools, where, None, None))
        for origin, _ in sorted(found, key=lambda each: each[0].namespace is not None):
            self._name(origin)
        for origin, define in found:
            name = self._names[origin]
            self._definitions[name] = define(name)
        return [self._names[origin] for origin, _ in found]

    def definitions(self, only: frozenset[str] | None = None) -> list[dict[str, Any]]:
        """The tools in chat form, in the agent's order."""
        return [tool for name, tool in self._definitions.items() if only is None or name in only]

    def reach(self, origin: Origin) -> str:
        """The name by which the model knows, or would have known, a tool. An agent may have dropped the namespace."""
        name = self._names.get(origin)
        if name is None and origin.namespace is None:
            alike = [given for each, given in self._names.items() if (each.kind, each.name) == (origin.kind, origin.name)]
            name = alike[0] if len(alike) == 1 else None
        return name or origin.qualified

    def find(self, kind: str, name: str | None, namespace: str | None = None) -> str | None:
        """The name by which the model knows a tool that is listed; None where it is not."""
        return self._names.get(Origin(cast("Kind", kind), name or kind, namespace))

    def origin(self, name: str) -> Origin:
        """The tool that the model means; an unknown name is a function that the agent will refuse."""
        return self._origins.get(name) or Origin("function", name)

    def _name(self, origin: Origin) -> None:
        if origin in self._names:
            return
        name, count = origin.qualified, 1
        while name in self._origins:
            count += 1
            name = f"{origin.qualified}_{count}"
        self._names[origin] = name
        self._origins[name] = origin

    def _read(
        self, tools: Sequence[msgspec.Raw], where: str, namespace: str | None, about: str | None
    ) -> Iterable[tuple[Origin, Callable[[str], dict[str, Any]]]]:
        for index, raw in enumerate(tools):
            at = f"{where}[{index}]"
            kind = _decode(raw, _Head, at).type
            if kind == "namespace" and namespace is None:
                group = _decode(raw, _Namespace, at)
                yield from self._read(group.tools, f"{at}.tools", group.name, group.description)
                continue
            tool = _read_tool(kind, raw, at, namespace, about)
            if tool is None:
                self.hosted += 1
            else:
                yield tool


def _read_tool(
    kind: str, raw: msgspec.Raw, at: str, namespace: str | None, about: str | None
) -> tuple[Origin, Callable[[str], dict[str, Any]]] | None:
    """A tool and what makes its definition of the name that it is given; None where the agent does not run it."""
    if kind == "function":
        function = _decode(raw, _Function, at)
        text, schema = _joined(about, function.description), _schema(function.parameters)
        return Origin("function", function.name, namespace), lambda name: function_tool(name, text, schema)
    if kind == "custom":
        custom = _decode(raw, _Custom, at)
        form = custom.format or _Format()
        text, schema = _joined(about, custom.description), freeform.schema(form.syntax, form.definition)
        return Origin("custom", custom.name, namespace), lambda name: function_tool(name, text, schema)
    if kind == "tool_search":
        search = _decode(raw, _Search, at)
        if search.execution != "client":
            return None
        text, schema = search.description, _schema(search.parameters)
        return Origin("tool_search", kind), lambda name: function_tool(name, text, schema)
    if kind == "shell":
        place = _decode(raw, _Shell, at).environment
        if place is not None and place.type != "local":
            return None
    if kind not in _BUILT_IN:
        return None
    text, built_in = _BUILT_IN[kind]
    return Origin(cast("Kind", kind), kind), lambda name: function_tool(name, text, built_in)


def _schema(parameters: msgspec.Raw) -> Any:
    return _NO_PARAMETERS if bytes(parameters) in (b"", b"null") else parameters


def _joined(about: str | None, description: str | None) -> str | None:
    """A namespace's description stands before that of each of its tools: the model knows no namespaces."""
    return "\n\n".join(text for text in (about, description) if text) or description


def call_item(call: ToolCall, origin: Origin, item_id: str, status: str) -> Item:
    """The item of a call. ``item_id`` is without the prefix that tells the item's kind."""
    made = _MAKE[origin.kind](call, origin)
    if made is None:
        made = _function_call(call, Origin("function", call.name))
    prefix, fields = made
    return {"type": fields["type"], "id": f"{prefix}_{item_id}", "status": status, "call_id": call.id} | fields


def _function_call(call: ToolCall, origin: Origin) -> tuple[str, Item]:
    item = {"type": "function_call", "name": origin.name, "arguments": call.arguments}
    return "fc", item if origin.namespace is None else item | {"namespace": origin.namespace}


def _custom_call(call: ToolCall, origin: Origin) -> tuple[str, Item]:
    item = {"type": "custom_tool_call", "name": origin.name, "input": freeform.text_of(call.arguments)}
    return "ctc", item if origin.namespace is None else item | {"namespace": origin.namespace}


def _local_shell_call(call: ToolCall, _: Origin) -> tuple[str, Item] | None:
    given = _object(call.arguments)
    if given is None or not _strings(given.get("command")):
        return None
    return _with("lsh", "local_shell_call", "action", {"type": "exec", "env": {}} | given)


def _shell_call(call: ToolCall, _: Origin) -> tuple[str, Item] | None:
    given = _object(call.arguments)
    if given is None or not _strings(given.get("commands")):
        return None
    return _with("sh", "shell_call", "action", {"timeout_ms": None, "max_output_length": None} | given)


def _apply_patch_call(call: ToolCall, _: Origin) -> tuple[str, Item] | None:
    given = _object(call.arguments)
    if given is None or not isinstance(given.get("path"), str):
        return None
    kind = given.get("type")
    if kind not in ("create_file", "update_file", "delete_file"):
        return None
    if kind != "delete_file" and not isinstance(given.get("diff"), str):
        return None
    return _with("apc", "apply_patch_call", "operation", given)


def _search_call(call: ToolCall, _: Origin) -> tuple[str, Item] | None:
    given = _object(call.arguments)
    if given is None:
        return None
    made = _with("tsc", "tool_search_call", "arguments", given)
    return made and (made[0], made[1] | {"execution": "client"})


def _with(prefix: str, kind: str, field: str, given: dict[str, Any]) -> tuple[str, Item] | None:
    """An item that carries an object, encoded at once: a number that JSON cannot hold again must not fail later."""
    try:
        return prefix, {"type": kind, field: msgspec.Raw(_encode(given))}
    except (OverflowError, RecursionError):
        return None


_MAKE: dict[Kind, Callable[[ToolCall, Origin], tuple[str, Item] | None]] = {
    "function": _function_call,
    "custom": _custom_call,
    "local_shell": _local_shell_call,
    "shell": _shell_call,
    "apply_patch": _apply_patch_call,
    "tool_search": _search_call,
}


def object_arguments(fields: dict[str, Any]) -> str:
    """The arguments that stand for an object, whatever order its keys came back in."""
    return _sorted(fields).decode()


def action_arguments(fields: dict[str, Any]) -> str:
    """The arguments that stand for an action, without what an agent, or the item's form, adds to them."""
    kept = {name: value for name, value in fields.items() if value not in (None, {}) and (name, value) != ("type", "exec")}
    return object_arguments(kept)


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in cast("list[Any]", value))


def _decode(raw: msgspec.Raw, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise CallError(400, "invalid_request", f"{where}: {error}", param=where) from error
