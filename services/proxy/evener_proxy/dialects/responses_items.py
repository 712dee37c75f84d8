"""The items of a history, each for itself: what a call was asked, what a result says, and which parts a model can read.

Nothing that an agent sends vanishes: what is of no known kind keeps the text that it holds, and where it holds none the request
is refused with the item's place. Items of tools that the vendor runs are known by their kind. Called by `responses_input`.

Source: `openai.types.responses`, ``ResponseInputItemParam``.
"""

from collections.abc import Callable
from typing import Any, cast

import msgspec

from evener_proxy.canonical import CallError
from evener_proxy.dialects import freeform
from evener_proxy.dialects.responses_tools import Item, Origin, action_arguments, object_arguments
from evener_proxy.messages import Part, image_part, text_part, unshown

_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_IMAGES = ("input_image", "computer_screenshot")
_HELD = ("text", "content", "summary", "input", "arguments", "output", "result")
"""Where items use to carry text."""

HOSTED = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "computer_call",
        "computer_call_output",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "program",
        "program_output",
    }
)
"""Items of tools that never reach the model, since only the vendor can run them."""
_encode = msgspec.json.Encoder().encode


def refused(where: str, message: str) -> CallError:
    """A 400 about one field."""
    return CallError(400, "invalid_request", f"{where}: {message}", param=where)


def check_update(item: Item, where: str) -> None:
    """An update of settings says nothing to the model. Raises CallError 400 where it asks for constrained decoding."""
    text = item.get("text")
    form = cast("Item", text).get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and cast("Item", form).get("type") != "text":
        raise refused(f"{where}.text.format", "the format of the output is set by the request, not on the way")


def unknown_parts(item: Item, where: str) -> list[Part]:
    """What an item of a kind that is not known says. Raises CallError 400 where it holds nothing that a model can read."""
    parts: list[Part] = []
    for name in _HELD:
        value = item.get(name)
        if isinstance(value, (str, list)):
            parts += read_parts(value, f"{where}.{name}")
        elif isinstance(value, dict):
            parts.append(text_part(json_text(value)))
    if not parts:
        raise refused(where, f"items of type {item.get('type')!r} are not known here, and this one holds no text")
    return parts


def _message_parts(item: Item, where: str) -> list[Part]:
    return read_parts(item.get("output"), f"{where}.output")


def read_parts(content: Any, where: str) -> list[Part]:
    """The parts of a content, empty texts left out; null, absent, "" and [] are the same. Raises CallError 400."""
    if content is None:
        return []
    if isinstance(content, str):
        return [text_part(content)] if content else []
    if not isinstance(content, list):
        raise refused(where, "expected a string or a list of parts")
    found = (_part(part, f"{where}[{index}]") for index, part in enumerate(cast("list[Any]", content)))
    return [part for part in found if part is not None]


def _part(part: Any, where: str) -> Part | None:
    """A part that a model can read, or what stands for one of an unknown kind; None for an empty text."""
    if isinstance(part, str):
        return text_part(part) if part else None
    if not isinstance(part, dict):
        raise refused(where, "expected an object")
    fields = cast("Item", part)
    kind = fields.get("type")
    if kind in _IMAGES:
        url = text_field(fields, "image_url", where, "")
        if not url:
            raise refused(where, "no file is stored here; send an image as image_url")
        return image_part(url, where)
    if kind in ("input_file", "input_audio"):
        raise refused(where, f"{kind} is not taken; the model reads text and images")
    known = _TEXTS.get(kind) if isinstance(kind, str) else None
    text = fields.get("text") if known is None else text_field(fields, known, where)
    if not isinstance(text, str):
        return unshown(kind if isinstance(kind, str) else "part")
    return text_part(text) if text else None


def reasoning_texts(item: Item, name: str, where: str) -> list[str]:
    """The texts of a reasoning item's ``content`` or ``summary``. Raises CallError 400."""
    parts = item.get(name)
    if isinstance(parts, str):
        return [parts] if parts else []
    return [
        text
        for index, part in enumerate(list_field(item, name, where))
        if (text := text_field(object_of(part, f"{where}.{name}[{index}]"), "text", f"{where}.{name}[{index}]", ""))
    ]


def _function_call(item: Item, where: str) -> tuple[Origin, str]:
    origin = Origin("function", text_field(item, "name", where), text_field(item, "namespace", where, "") or None)
    return origin, text_field(item, "arguments", where, "")


def _custom_call(item: Item, where: str) -> tuple[Origin, str]:
    origin = Origin("custom", text_field(item, "name", where), text_field(item, "namespace", where, "") or None)
    return origin, freeform.arguments_of(text_field(item, "input", where, ""))


def _local_shell_call(item: Item, where: str) -> tuple[Origin, str]:
    return Origin("local_shell", "local_shell"), action_arguments(object_of(item.get("action"), f"{where}.action"))


def _shell_call(item: Item, where: str) -> tuple[Origin, str]:
    return Origin("shell", "shell"), action_arguments(object_of(item.get("action"), f"{where}.action"))


def _patch_call(item: Item, where: str) -> tuple[Origin, str]:
    return Origin("apply_patch", "apply_patch"), action_arguments(object_of(item.get("operation"), f"{where}.operation"))


def _search_call(item: Item, where: str) -> tuple[Origin, str]:
    arguments = item.get("arguments")
    text = arguments if isinstance(arguments, str) else object_arguments(object_of(arguments, f"{where}.arguments"))
    return Origin("tool_search", "tool_search"), text


def _shell_output(item: Item, where: str) -> list[Part]:
    """What each command printed and how it ended, as the agent wrote it."""
    output = item.get("output")
    return read_parts(output if isinstance(output, str) else json_text(list_field(item, "output", where)), where)


def _patch_output(item: Item, where: str) -> list[Part]:
    texts = (text_field(item, "status", where, ""), text_field(item, "output", where, ""))
    return read_parts("\n".join(text for text in texts if text), where)


CALLS: dict[str | None, Callable[[Item, str], tuple[Origin, str]]] = {
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _local_shell_call,
    "shell_call": _shell_call,
    "apply_patch_call": _patch_call,
    "tool_search_call": _search_call,
}
RESULTS: dict[str | None, Callable[[Item, str], list[Part]]] = {
    "function_call_output": _message_parts,
    "custom_tool_call_output": _message_parts,
    "local_shell_call_output": _message_parts,
    "shell_call_output": _shell_output,
    "apply_patch_call_output": _patch_output,
}


def text_field(item: Item, name: str, where: str, default: str | None = None) -> str:
    """A string field; null is as absent. Raises CallError 400, also where it is absent and has no default."""
    value = item.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise refused(f"{where}.{name}", "expected a string")
    return value


def object_of(value: Any, where: str) -> Item:
    """An object. Raises CallError 400."""
    if not isinstance(value, dict):
        raise refused(where, "expected an object")
    return cast("Item", value)


def list_field(item: Item, name: str, where: str) -> list[Any]:
    """A list field; null is as absent, and empty. Raises CallError 400."""
    value = item.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise refused(f"{where}.{name}", "expected a list")
    return cast("list[Any]", value)


def raw_list(item: Item, name: str, where: str) -> list[msgspec.Raw]:
    """A list field, its elements as JSON. Raises CallError 400."""
    return [msgspec.Raw(_encode(each)) for each in list_field(item, name, where)]


def json_text(value: Any) -> str:
    """Compact JSON."""
    return _encode(value).decode()
