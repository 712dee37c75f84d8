"""A freeform tool takes a text in place of JSON; to the model it is a function whose one argument is that text.

Called by both dialects of OpenAI, `chat_custom` and `responses_tools`, whose tools of type ``custom`` these are.
"""

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


def schema(syntax: str, definition: str) -> dict[str, Any]:
    """The function's parameters. A grammar that the vendor would enforce is told to the model; ``definition`` may be empty."""
    text: dict[str, Any] = {"type": "string"}
    if definition:
        text["description"] = f"Text that follows this grammar ({syntax}):\n{definition}"
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}


def arguments_of(text: str) -> str:
    """The arguments that stand for a text."""
    return _encode({"input": text}).decode()


def text_of(arguments: str) -> str:
    """The text of the model's arguments; arguments that hold none are themselves the text."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return arguments
    text = given.get("input")
    return text if isinstance(text, str) else arguments
