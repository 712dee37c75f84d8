"""A tiny random Qwen3 policy built at test time, and an engine process serving it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.ports import free_port

CONTEXT = 512
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    "For each call return <tool_call>\n"
    '{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n'
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "run a command in the workspace",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def build_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    bpe.train_from_iterator([Path(__file__).read_text(), TEMPLATE * 3], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_policy(folder: Path, seed: int, kind: str = "qwen3") -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "initializer_range": 0.15,  # far from uniform: a wrong key or value moves every log-probability
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three versions of one policy."""
    root = tmp_path_factory.mktemp("policies")
    return [build_policy(root / f"v{i}", seed=i) for i in (1, 2, 3)]


@pytest.fixture(scope="session")
def policy(policies: list[Path]) -> Path:
    return policies[0]


class Server:
    """An engine in a thread of this process, and a client of it."""

    def __init__(self, policy: Path, **options: Any) -> None:
        import torch
        import uvicorn

        from evener_engine.server import Engine

        torch.set_num_threads(1)
        defaults: dict[str, Any] = {"name": "tiny", "version": 1, "slots": 16, "context_tokens": None, "seed": None}
        self.port = free_port()
        self._engine = Engine(policy, **defaults | options)
        config = uvicorn.Config(self._engine.app(), port=self.port, log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._engine.scheduler.start()
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        timeout = aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, self.url + path, json=body) as reply,
        ):
            raw = await reply.read()
            return reply.status, (await reply.json() if raw and reply.content_type == "application/json" else raw)

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        return await self.request("POST", path, body)

    async def chat(self, **fields: Any) -> dict[str, Any]:
        status, body = await self.post("/v1/chat/completions", {"model": "tiny", "return_token_ids": True} | fields)
        assert status == 200, body
        return body

    async def publish(self, path: Path, version: str) -> None:
        for route, body in (
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {"path": str(path)}}),
            ("/finish_weight_update", {"weight_version": version}),
        ):
            status, reply = await self.post(route, body)
            assert status == 200, reply

    def wait_ready(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.alive(), "the engine ended"
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise TimeoutError("the engine did not start")

    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._engine.stop()
        self._server.should_exit = True
        self._thread.join(10)
        assert self._engine.scheduler.join(10)


class ServerProcess(Server):
    """An engine in a process of its own, started by `argv` or as `python -m evener_engine`."""

    def __init__(self, policy: Path, *argv: str, **popen: Any) -> None:
        self.port = free_port()
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        argv = argv or (sys.executable, "-m", "evener_engine")
        options = ["--policy", str(policy), "--port", str(self.port), "--name", "tiny"]
        self.process = subprocess.Popen([*argv, *options], env=env, **popen)

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        if self.alive():
            self.process.kill()
        self.process.wait(10)


@pytest.fixture
def start_server(policy: Path) -> Iterator[Any]:
    """Start an engine with further options; it is stopped after the test."""
    servers: list[Server] = []

    def start(folder: Path = policy, **options: Any) -> Server:
        server = Server(folder, **options)
        servers.append(server)
        server.wait_ready()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def server(policy: Path) -> Iterator[Server]:
    """An engine for the tests of a module that leave its weights alone."""
    server = Server(policy, seed=1)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
