"""A scripted engine on vLLM's routes: random tokens, weights by number, and a line in a file for each reply it gave.

A conversation's prompt extends the one before, as with a real template. Where tools are offered the first reply calls `bash`.
Run as ``python -m tests.chaos.engine PORT RECORD``.
"""

import asyncio
import json
import random
import sys
import zlib
from pathlib import Path
from typing import Any

from aiohttp import web

CHUNK = 16
"""Characters a token: the first prompt of pi has some 500."""

IDS = range(300, 1300)
"""Below the vocabulary of the example's policy."""


class Engine:
    """What it serves, and the ids of what it said."""

    def __init__(self, record: Path) -> None:
        self._record = record.open("a", buffering=1)
        self._version = "default"
        self._said: dict[str, list[int]] = {}

    async def chat(self, request: web.Request) -> web.Response:
        """Sample a reply after a moment."""
        body = await request.json()
        await asyncio.sleep(random.uniform(0.01, 0.15))
        ids = [random.choice(IDS) for _ in range(min(random.randint(3, 9), body.get("max_tokens") or 9))]
        text = f"reply {len(self._said)}-{random.getrandbits(32):x}"
        self._said[text] = ids
        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls = body.get("tools") and not any(each["role"] == "assistant" for each in body["messages"])
        if calls:
            arguments = json.dumps({"command": f"echo {random.random()} > answer"})
            call = {"id": f"call_{len(self._said)}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
            message["tool_calls"] = [call]
        prompt = self._prompt(body)
        self._record.write(json.dumps({"id": body.get("request_id"), "tokens": len(ids)}) + "\n")
        logprobs = [{"token": "x", "logprob": -random.random() * 3, "bytes": None, "top_logprobs": []} for _ in ids]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": logprobs},
            "finish_reason": "tool_calls" if calls else "stop",
            "stop_reason": None,
            "token_ids": ids,
        }
        if self._version != "default":
            choice["weight_versions"] = [{"version": self._version, "start": 0, "end": len(ids)}]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return web.json_response({"id": "x", "choices": [choice], "usage": usage, "prompt_token_ids": prompt})

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        ids = _tokens(json.dumps(body["tools"])) if body.get("tools") else []
        for message in body["messages"]:
            said = self._said.get(message.get("content") or "") if message["role"] == "assistant" else None
            ids += said if said is not None else _tokens(json.dumps(message))
        return ids

    async def tokenize(self, request: web.Request) -> web.Response:
        """The length of a prompt."""
        return web.json_response({"count": len(self._prompt(await request.json()))})

    async def models(self, _: web.Request) -> web.Response:
        """One model."""
        return web.json_response({"object": "list", "data": [{"id": "scripted", "max_model_len": 32768}]})

    async def weight_info(self, _: web.Request) -> web.Response:
        """The version."""
        return web.json_response({"weight_version": self._version})

    async def finish_update(self, request: web.Request) -> web.Response:
        """From now on another version."""
        self._version = (await request.json())["weight_version"]
        return web.json_response({"message": "Weight update finished"})

    async def done(self, _: web.Request) -> web.Response:
        """Nothing to do."""
        return web.json_response({"status": "ok"})

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat),
                web.post("/tokenize", self.tokenize),
                web.get("/v1/models", self.models),
                web.get("/weight_info", self.weight_info),
                web.post("/finish_weight_update", self.finish_update),
                web.get("/health", self.done),
                *(web.post(path, self.done) for path in ("/pause", "/resume", "/start_weight_update", "/update_weights")),
            ]
        )
        return app


def _tokens(text: str) -> list[int]:
    return [IDS[zlib.crc32(text[start : start + CHUNK].encode()) % len(IDS)] for start in range(0, len(text), CHUNK)]


if __name__ == "__main__":
    web.run_app(Engine(Path(sys.argv[2])).app(), host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
