"""Pausing, publishing, leaving and ending: what happens to calls that are running then."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .conftest import CONTEXT, Server, ServerProcess

pytestmark = pytest.mark.torch
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}], "ignore_eos": True, "max_tokens": 400}
SHORT = LONG | {"max_tokens": 3}


def tampered(policy: Path, folder: Path, what: str) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(policy / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    if what == "missing":
        del tensors[name]
    elif what == "unexpected":
        tensors["model.layers.9.mlp.down_proj.weight"] = tensors[name].clone()
    elif what == "misshapen":
        tensors[name] = tensors[name][:-1].clone()
    elif what == "not finite":
        tensors[name][0, 0] = torch.nan
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    if what == "truncated":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    return folder


async def test_a_bad_publication_changes_nothing(start_server: Any, policies: list[Path], tmp_path: Path) -> None:
    server: Server = start_server()
    fields = SHORT | {"seed": 1, "logprobs": True, "max_tokens": 12}
    before = (await server.chat(**fields))["choices"][0]
    assert (await server.post("/update_weights", {"update_info": {"path": str(policies[1])}}))[0] == 400
    for what in ("missing", "unexpected", "misshapen", "not finite", "truncated", "nowhere"):
        path = tmp_path / "none" if what == "nowhere" else tampered(policies[1], tmp_path / what, what)
        assert (await server.post("/start_weight_update"))[0] == 200
        status, reply = await server.post("/update_weights", {"update_info": {"path": str(path)}})
        assert (status, "version 1 keeps serving" in reply["error"]["message"]) == (400, True), what
        assert (await server.post("/finish_weight_update", {"weight_version": "2"}))[0] == 400
    assert (await server.request("GET", "/weight_info"))[1] == {"weight_version": "1"}
    after = (await server.chat(**fields))["choices"][0]
    assert (after["token_ids"], after["weight_versions"]) == (before["token_ids"], before["weight_versions"])
    pairs = zip(after["logprobs"]["content"], before["logprobs"]["content"], strict=True)
    assert all(abs(a["logprob"] - b["logprob"]) < 1e-4 for a, b in pairs)
    await server.publish(policies[1] / "model.safetensors", "7")
    assert (await server.request("GET", "/weight_info"))[1] == {"weight_version": "7"}
    assert (await server.chat(**fields))["choices"][0]["token_ids"] != before["token_ids"]


async def test_pause_modes(start_server: Any) -> None:
    server: Server = start_server()
    for mode, ending in (("keep", "length"), ("wait", "length"), ("abort", "abort")):
        running = asyncio.ensure_future(server.chat(**LONG))
        await asyncio.sleep(0.1)
        assert (await server.post(f"/pause?mode={mode}"))[1] == {"status": "paused"}
        assert (await server.request("GET", "/is_paused"))[1] == {"is_paused": True}
        await asyncio.sleep(0.3)
        queued = asyncio.ensure_future(server.chat(**SHORT))
        done, _ = await asyncio.wait((running, queued), timeout=1.0)
        assert done == (set() if mode == "keep" else {running}), mode
        assert (await server.post("/resume"))[1] == {"status": "resumed"}
        assert (await running)["choices"][0]["finish_reason"] == ending
        assert len((await queued)["choices"][0]["token_ids"]) == 3
    assert (await server.post("/pause?mode=later"))[0] == 400


async def test_a_client_that_leaves_ends_its_call(start_server: Any) -> None:
    server: Server = start_server(slots=1)
    await server.post("/pause?mode=keep")
    timeout = aiohttp.ClientTimeout(total=0.3)
    for _ in range(20):  # 20 x 400 tokens in one slot would take many seconds
        async with aiohttp.ClientSession(timeout=timeout) as session:
            with pytest.raises(TimeoutError):
                await session.post(server.url + "/v1/chat/completions", json=LONG)
    await server.post("/resume")
    async with aiohttp.ClientSession(timeout=timeout) as session:
        with pytest.raises(TimeoutError):
            await session.post(server.url + "/v1/chat/completions", json=LONG | {"max_tokens": None})
    start = time.monotonic()
    await server.chat(**SHORT)
    single = time.monotonic() - start
    assert single < 5


async def test_max_tokens_beyond_the_window_are_clamped(start_server: Any) -> None:
    server: Server = start_server()
    reply = await server.chat(**LONG | {"max_tokens": 128_000})
    assert reply["usage"]["total_tokens"] == CONTEXT
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_soon(policy: Path, sig: signal.Signals) -> None:
    server = ServerProcess(policy)
    await asyncio.to_thread(server.wait_ready)
    running = [asyncio.ensure_future(server.post("/v1/chat/completions", LONG)) for _ in range(4)]
    await asyncio.sleep(0.2)
    server.process.send_signal(sig)
    assert await asyncio.to_thread(server.process.wait, 10) == 0
    for status, reply in await asyncio.gather(*running):
        assert (status, reply["error"]["type"]) == (503, "ServiceUnavailableError")


def test_it_ends_with_its_parent(policy: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'evener_engine', *sys.argv[1:]])\n"
        "print(p.pid, flush=True); sys.stdin.readline()"
    )
    server = ServerProcess(policy, sys.executable, "-c", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    parent = server.process
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        server.wait_ready()
        parent.kill()
        parent.wait(5)
        deadline = time.monotonic() + 5
        while Path(f"/proc/{child}").exists() and not _zombie(child):
            assert time.monotonic() < deadline, "the engine outlived its parent"
            time.sleep(0.05)
    finally:
        if Path(f"/proc/{child}").exists() and not _zombie(child):
            os.kill(child, signal.SIGKILL)


def test_a_policy_it_cannot_serve_is_refused_with_the_reason(policy: Path, tmp_path: Path) -> None:
    import json

    config = json.loads((policy / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    argv = [sys.executable, "-m", "evener_engine", "--policy", str(tmp_path), "--port", "1"]
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "does not implement attention_bias" in ended.stderr
    assert "Traceback" not in ended.stderr


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].startswith("Z")
    except OSError:
        return True
