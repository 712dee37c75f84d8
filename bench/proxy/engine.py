"""A stand-in for vLLM that costs next to nothing: a reply is looked up, so that what is measured is the proxy before it.

The prompt of turn k is P ids and k times (100 reply ids + 50 ids of a tool's result): an exact extension of the turn before.
P is named in the request's own text (`bench.proxy.conversation.mark`), k is its number of assistant messages. Run as
``python -m bench.proxy.engine PORT DELAY_S``; ``GET /peak`` says how many calls were in flight at most.
"""

import asyncio
import json
import re
import sys
from functools import lru_cache
from typing import cast

import uvloop

REPLY, RESULT = 100, 50
MARK = re.compile(rb"\[prompt of (\d+) tokens\]")
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
MODELS = b'{"object":"list","data":[{"id":"stub","object":"model","max_model_len":131072}]}'


def token(place: int) -> int:
    """A token id that says where it stands."""
    return 1000 + place * 7919 % 30000


@lru_cache(maxsize=256)
def reply(prompt: int, turn: int) -> bytes:
    """The answer to turn number ``turn`` of a conversation that began with ``prompt`` tokens."""
    start = prompt + turn * (REPLY + RESULT)
    ids = [token(place) for place in range(start, start + REPLY)]
    logprobs = [{"token": f"token_id:{i}", "logprob": -(i % 97) / 100, "bytes": None, "top_logprobs": []} for i in ids]
    function = {"name": "bash", "arguments": '{"command": "ls -la"}'}
    calls = [{"id": f"call_{turn}", "type": "function", "function": function}]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "x" * (4 * REPLY - 40), "tool_calls": calls},
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "token_ids": ids,
        "logprobs": {"content": logprobs},
    }
    document = {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": 1,
        "model": "stub",
        "choices": [choice],
        "prompt_token_ids": [token(place) for place in range(start)],
        "prompt_logprobs": None,
        "usage": {"prompt_tokens": start, "completion_tokens": REPLY, "total_tokens": start + REPLY},
    }
    return json.dumps(document, separators=(",", ":")).encode()  # as vLLM writes it (starlette's JSONResponse)


class Engine:
    """What the connections share."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.in_flight = 0
        self.peak = 0


class Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, as far as the two proxies speak it: one request at a time, its length declared."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        """Answer once a request is whole."""
        self.received += data
        head, end, _ = self.received.partition(b"\r\n\r\n")
        if not end:
            return
        declared = LENGTH.search(head)
        whole = len(head) + 4 + (int(declared[1]) if declared else 0)
        if len(self.received) < whole:
            return
        body = bytes(self.received[len(head) + 4 : whole])
        del self.received[:whole]
        self.answer(bytes(head.split(b" ", 2)[1]), body)

    def answer(self, path: bytes, body: bytes) -> None:
        """Send what ``path`` stands for."""
        if path.endswith(b"/chat/completions"):
            self.sample(body)
        elif path.endswith(b"/models"):
            self.send(200, MODELS)
        elif path == b"/peak":
            self.send(200, json.dumps({"peak": self.engine.peak}).encode())
        else:
            self.send(404, b'{"error":{"message":"not found","code":404}}')

    def sample(self, body: bytes) -> None:
        """Answer after the engine's delay."""
        named = MARK.search(body)
        content = reply(int(named[1]) if named else 1, body.count(b'"assistant"'))
        engine = self.engine
        engine.in_flight += 1
        engine.peak = max(engine.peak, engine.in_flight)

        def done() -> None:
            engine.in_flight -= 1
            self.send(200, content)

        if engine.delay_s:
            asyncio.get_running_loop().call_later(engine.delay_s, done)
        else:
            done()

    def send(self, status: int, body: bytes) -> None:
        """Write a response in one piece."""
        head = b"HTTP/1.1 %d .\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        if not self.transport.is_closing():
            self.transport.write(head + body)


async def main(port: int, delay_s: float) -> None:
    """Serve until killed."""
    engine = Engine(delay_s)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2])))
