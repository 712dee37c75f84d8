"""The requests of an agent: one conversation that grows by an assistant's tool call and its result each turn.

About four bytes of text a token, so that a proxy has as much to read as its engine. Bodies are made once and sent by every
agent; the reply's bytes do not come back in them, which neither proxy looks for.
"""

import json
from functools import lru_cache
from typing import Any, Literal

from bench.proxy.engine import REPLY, RESULT

Dialect = Literal["chat", "anthropic"]
PATHS: dict[Dialect, str] = {"chat": "/v1/chat/completions", "anthropic": "/v1/messages"}
_BYTES = 4  # a token, roughly
_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
_TOOL = "Run a command in the shell and return what it prints."


def mark(tokens: int) -> str:
    """What tells the engine how long the prompt is."""
    return f"[prompt of {tokens} tokens] "


@lru_cache
def bodies(dialect: Dialect, tokens: int, turns: int) -> list[bytes]:
    """The body of each turn's request; each asks for a stream."""
    system = mark(tokens) + "You are a coding agent. " * (tokens * _BYTES // 2 // 24)
    task = "Fix the failing test. " * (tokens * _BYTES // 2 // 22)
    build = _chat if dialect == "chat" else _anthropic
    return [json.dumps(build(system, task, turn)).encode() for turn in range(turns)]


def _chat(system: str, task: str, turn: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    for place in range(turn):
        function = {"name": "bash", "arguments": '{"command": "ls -la"}'}
        call = {"id": f"call_{place}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "x" * (_BYTES * REPLY - 40), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "file " * (_BYTES * RESULT // 5)},
        ]
    tool = {"type": "function", "function": {"name": "bash", "description": _TOOL, "parameters": _SCHEMA}}
    return {"model": "stub", "messages": messages, "tools": [tool], "stream": True, "max_tokens": 2048, "temperature": 1.0}


def _anthropic(system: str, task: str, turn: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    for place in range(turn):
        key = f"toolu_{place}"
        use = {"type": "tool_use", "id": key, "name": "bash", "input": {"command": "ls -la"}}
        text = {"type": "text", "text": "x" * (_BYTES * REPLY - 40)}
        result = {"type": "tool_result", "tool_use_id": key, "content": "file " * (_BYTES * RESULT // 5)}
        messages += [{"role": "assistant", "content": [text, use]}, {"role": "user", "content": [result]}]
    tool = {"name": "bash", "description": _TOOL, "input_schema": _SCHEMA}
    return {"model": "stub", "system": system, "messages": messages, "tools": [tool], "stream": True, "max_tokens": 2048}
