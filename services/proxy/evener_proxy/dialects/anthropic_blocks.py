"""Content blocks of Anthropic's Messages as parts of chat messages: what carries text or an image keeps its place.

A block that is of no known type keeps the text that it carries; what carries none is left out. A block whose fields have
wrong types is refused with its path. Used by `evener_proxy.dialects.anthropic_messages`.
"""

from collections.abc import Iterator
from typing import Any, TypeGuard

from evener_proxy.canonical import CallError
from evener_proxy.messages import Part, image_part, text_part, unshown

Block = dict[str, Any]


def wrong(path: str, message: str) -> CallError:
    """The vendor's way to say what is wrong with which field."""
    return CallError(400, "invalid_request", f"{path}: {message}", param=path)


def blocks_of(content: object, path: str) -> Iterator[tuple[Block, str]]:
    """Each block with its path. Text alone is one text block; null is no block."""
    if content is None:
        return
    if isinstance(content, str):
        yield {"type": "text", "text": content}, path
        return
    if not isinstance(content, list):
        raise wrong(path, "Input should be a valid string or array")
    for index, block in enumerate(content):
        if not _is_block(block):
            raise wrong(f"{path}.{index}", "Input should be an object")
        yield block, f"{path}.{index}"


def text_field(block: Block, name: str, path: str) -> str:
    """A text; absent and null are the empty one."""
    value = block.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise wrong(f"{path}.{name}", "Input should be a valid string")
    return value


def parts_of(content: object, path: str) -> list[Part]:
    """The parts of some content, in its order. Empty texts are none."""
    return [part for block, at in blocks_of(content, path) for part in block_parts(block, at)]


def block_parts(block: Block, path: str) -> list[Part]:
    """The parts that one block becomes."""
    match block.get("type"):
        case "text":
            return _texts(block, "text", path=path)
        case "image":
            return _image(block.get("source"), f"{path}.source")
        case "document":
            return [*_texts(block, "title", "context", path=path), *_document(block.get("source"), f"{path}.source")]
        case "search_result":
            return [*_texts(block, "title", "source", path=path), *parts_of(block.get("content"), f"{path}.content")]
        case "tool_reference":
            return _texts(block, "tool_name", path=path)
        case "thinking" | "redacted_thinking":
            return []
        case _:
            return _unknown(block, path)


def _texts(block: Block, *names: str, path: str) -> list[Part]:
    return [text_part(text) for name in names if (text := text_field(block, name, path))]


def _image(source: object, path: str) -> list[Part]:
    """An image that the request holds or links; the ids of files that the vendor holds say nothing to an engine."""
    if not _is_block(source):
        raise wrong(path, "Input should be an object")
    match source.get("type"):
        case "base64":
            kind, data = text_field(source, "media_type", path), text_field(source, "data", path)
            return [image_part(f"data:{kind};base64,{data}", path)]
        case "url":
            return [image_part(text_field(source, "url", path), path)]
        case _:
            return [unshown("image")]


def _document(source: object, path: str) -> list[Part]:
    """A document that is text, or is made of blocks."""
    if not _is_block(source):
        raise wrong(path, "Input should be an object")
    match source.get("type"):
        case "text":
            return _texts(source, "data", path=path)
        case "content":
            return parts_of(source.get("content"), f"{path}.content")
        case _:
            return [unshown(text_field(source, "media_type", path) or "document")]


def _unknown(block: Block, path: str) -> list[Part]:
    """The text of a block that later versions of the API may have, wherever blocks use to carry it."""
    if isinstance(block.get("text"), str):
        return _texts(block, "text", path=path)
    content = block.get("content")
    return parts_of(content, f"{path}.content") if isinstance(content, (str, list)) else []


def _is_block(value: object) -> TypeGuard[Block]:
    return isinstance(value, dict)
