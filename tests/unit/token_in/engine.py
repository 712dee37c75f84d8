"""An engine of vLLM's shape over a template: it renders, takes prompts as ids, and samples the texts of a script."""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from aiohttp import web

from evener.engines.sampler import EngineRefused
from evener.trace.record import int32
from tests.unit.proxy.stub import StubEngine, is_probe
from tests.unit.token_in.policy import TemplatePolicy
from tests.unit.token_in.templates import TEMPLATES, Template

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)
_THOUGHT = re.compile(r"<think>\n(.*?)\n</think>\n*", re.DOTALL)


class TemplateEngine(StubEngine):
    """Samples ``says``, text by text, each to its last character; a text without a stop token was cut.

    ``takes``: what it does with a prompt as ids.
    """

    def __init__(self, says: Sequence[str] = (), template: Template = TEMPLATES[0], *, takes: str = "ids") -> None:
        super().__init__()
        self.says = list(says)
        self.policy = TemplatePolicy(template)
        self.takes = takes

    def given(self, body: dict[str, Any]) -> list[int] | None:
        """The prompt as ids, where it is given so."""
        return (body.get("kv_transfer_params") or {}).get("prompt_token_ids")

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """The prompt's ids, given or rendered."""
        given = self.given(body)
        return given if given and self.takes == "ids" else self._render(body)

    def completion(self, body: dict[str, Any], message: dict[str, Any], finish: str) -> list[int]:
        """The ids of the next text."""
        text = self.says.pop(0) if self.says and not is_probe(body) else "ok<|im_end|>"
        return self.policy.encode(text).tolist()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """The chat route."""
        body = await request.json()
        if allowed := body.get("allowed_token_ids"):
            stops = await self.policy.stops(allowed)
            return web.json_response({"choices": [{"finish_reason": "stop" if stops else "length"}]})
        if self.takes == "none" and self.given(body):
            self.asked.append(body)
            return _error("kv_transfer_params: unknown field")
        return await super().chat(request)

    def sample(self, body: dict[str, Any], *, finish: str | None = None, **message: Any) -> dict[str, Any]:
        """A reply whose message is parsed from what was sampled."""
        reply = super().sample(body, finish=finish, **message)
        choice = reply["choices"][0]
        said = self.policy.decode(int32(choice["token_ids"]))
        ends = next((stop for stop in self.policy.template.stops if said.endswith(stop)), None)
        choice["message"] = parsed(said.removesuffix(ends) if ends else said)
        choice["finish_reason"] = "length" if ends is None else "tool_calls" if choice["message"].get("tool_calls") else "stop"
        return reply

    async def tokenize(self, request: web.Request) -> web.Response:
        """The rendering route."""
        self.tokenized += 1
        body = await request.json()
        try:
            ids = self.policy.encode(body["prompt"]).tolist() if "prompt" in body else self._render(body)
        except EngineRefused as error:
            return _error(error.message)
        return web.json_response({"count": len(ids), "max_model_len": self.window, "tokens": ids})

    def _render(self, body: dict[str, Any]) -> list[int]:
        messages = [{**each, "content": _joined(each.get("content"))} for each in body["messages"]]
        return self.policy.encode(self.policy.text(messages, body.get("tools"))).tolist()


def parsed(text: str) -> dict[str, Any]:
    """What was said: thinking, text and calls, as vLLM's parsers find them."""
    thought = _THOUGHT.match(text)
    text = text[thought.end() :] if thought else text
    calls = [json.loads(closed or opened) for closed, opened in _CALL.findall(text)]
    message: dict[str, Any] = {"role": "assistant", "content": text.split("<tool_call>")[0] or None}
    message["reasoning"] = thought[1] if thought else None
    if calls:
        functions = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in calls]
        message["tool_calls"] = [{"id": "engine", "type": "function", "function": function} for function in functions]
    return message


def same(ids: Any, other: Any) -> bool:
    """Whether two lists of ids are equal."""
    return bool(np.array_equal(ids, other))


def _joined(content: Any) -> Any:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def _error(message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "param": None, "code": 400}}, status=400)
