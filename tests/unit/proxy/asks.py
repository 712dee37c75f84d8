"""The same question in each dialect, as an agent sends it without an SDK, and what is read of the answer."""

import json
from typing import Any

DIALECTS = ("chat", "responses", "anthropic", "gemini")


def question(dialect: str, *, stream: bool = False, text: str = "hi") -> tuple[str, dict[str, Any]]:
    """Path and body."""
    user = [{"role": "user", "content": text}]
    match dialect:
        case "chat":
            return "/v1/chat/completions", {"model": "tiny", "messages": user, "stream": stream}
        case "responses":
            return "/v1/responses", {"model": "tiny", "input": user, "stream": stream}
        case "anthropic":
            return "/v1/messages", {"model": "tiny", "max_tokens": 64, "messages": user, "stream": stream}
        case _:
            method = "streamGenerateContent?alt=sse" if stream else "generateContent"
            return f"/v1beta/models/tiny:{method}", {"contents": [{"role": "user", "parts": [{"text": text}]}]}


def said(dialect: str, document: dict[str, Any]) -> str:
    """The text of a reply that is not streamed."""
    match dialect:
        case "chat":
            return document["choices"][0]["message"]["content"]
        case "responses":
            return document["output"][-1]["content"][0]["text"]
        case "anthropic":
            return document["content"][-1]["text"]
        case _:
            return document["candidates"][0]["content"]["parts"][-1]["text"]


def kind_of(dialect: str, document: dict[str, Any]) -> str:
    """The vendor's word for an error, of the vendor's envelope."""
    error = document["error"]
    assert error["message"]
    if dialect == "anthropic":
        assert document["type"] == "error"
    return error["status"] if dialect == "gemini" else error["type"]


def events(stream: bytes) -> list[str]:
    """The data of a stream's events."""
    lines = stream.decode().splitlines()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


TERMINAL = {
    "chat": lambda data: data == "[DONE]",
    "responses": lambda data: json.loads(data)["type"] in ("response.completed", "response.incomplete", "response.failed"),
    "anthropic": lambda data: json.loads(data)["type"] == "message_stop",
    "gemini": lambda data: "finishReason" in json.loads(data)["candidates"][0],
}
"""Whether the data of an event are those that end a stream."""
