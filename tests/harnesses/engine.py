"""An engine of vLLM's shape that answers an agent's calls with the turns of a script, and fails where the script says so.

A call that offers no tools is none of the conversation (a title, a summary, a choice of model) and takes no turn of the
script. Used by `rollout`.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.harnesses.template import END, Template
from tests.unit.proxy.stub import Behaviour, StubEngine, is_probe, serving

SIDE_REPLY = json.dumps({"title": "A file", "model_choice": "pro", "complexity_reasoning": "One file.", "complexity_score": 9})
"""What every agent takes as the answer to what it asks beside the conversation."""


@dataclass
class ScriptedEngine(StubEngine):
    """Samples by `Template`. ``aside`` are the requests beside the conversation; ``refused`` is the number of too long ones."""

    window: int = 200_000
    template: Template = field(default_factory=Template)
    aside: list[dict[str, Any]] = field(default_factory=list)
    refused: int = 0

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """The tokens of a request."""
        return self.template.prompt(body["messages"], body.get("tools"))

    def completion(self, body: dict[str, Any], message: dict[str, Any], finish: str) -> list[int]:
        """The tokens of a turn; one that was cut has no end."""
        ids = self.template.turn(message)
        return ids if finish == "length" else [*ids, self.template.vocabulary.mark(END)]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """The chat route."""
        body = await request.json()
        if body.get("tools") or is_probe(body):
            return await super().chat(request)
        self.aside.append(body)
        return web.json_response(self.sample(body, content=SIDE_REPLY))


def call(tool: str, arguments: str) -> dict[str, Any]:
    """A tool call as an engine parses it; its id is the engine's own, which no agent sees."""
    return {"id": "engine", "type": "function", "function": {"name": tool, "arguments": arguments}}


def says(engine: ScriptedEngine, *, finish: str | None = None, **message: Any) -> Behaviour:
    """A turn."""

    async def behave(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(engine.sample(body, finish=finish, **message))

    return behave


def late(behaviour: Behaviour, *, seconds: float) -> Behaviour:
    """The same, ``seconds`` later."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await behaviour(request, body)

    return behave


def breaks_off(engine: ScriptedEngine, **message: Any) -> Behaviour:
    """The connection ends within the reply: nobody has got this sample."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        reply = json.dumps(engine.sample(body, **message)).encode()
        engine.sampled.pop()
        response = web.StreamResponse(headers={"content-length": str(len(reply))})
        await response.prepare(request)
        await response.write(reply[: len(reply) // 2])
        assert request.transport is not None
        request.transport.abort()
        return response

    return behave


def is_full(engine: ScriptedEngine) -> Behaviour:
    """vLLM's refusal of a prompt that fills the window; a history does not become shorter, so every later one is refused."""

    async def behave(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        engine.script.insert(0, behave)
        engine.refused += 1
        length, window = len(engine.prompt(body)), engine.window
        message = f"This model's maximum context length is {window} tokens. However, your prompt has {length} input tokens."
        error = {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}
        return web.json_response({"error": error}, status=400)

    return behave


@contextlib.asynccontextmanager
async def scripted_engine() -> AsyncIterator[ScriptedEngine]:
    """A running one, on a free port."""
    engine = ScriptedEngine()
    async with serving(engine):
        yield engine
