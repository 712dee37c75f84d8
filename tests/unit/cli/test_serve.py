"""A process that lacks a setting does not start; one whose store is away waits, says for which, and ends when it is told to."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evener.cli import serve
from evener.errors import InputError
from evener.settings import Settings
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
AWAY = "http://127.0.0.1:1"
FULL = {
    "database_url": "postgresql+asyncpg://u@127.0.0.1:1/d",
    "amqp_url": "amqp://127.0.0.1:1/",
    "redis_url": "redis://127.0.0.1:1/0",
    "api_token": "a",
    "admin_token": "b",
}


@contextmanager
def evener(folder: Path, service: str, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process; its log is ``folder/log``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVENER_")}
    path = os.pathsep.join([str(ROOT), *(str(part) for part in (ROOT / "services").iterdir())])
    own = {f"EVENER_{name.upper()}": value for name, value in settings.items()}
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "evener.cli.main", "serve", service],
            env=kept | {"PYTHONPATH": path, "EVENER_DATA": str(folder)} | own,
            stdout=log,
            stderr=log,
            cwd=folder,
        )
        try:
            yield child
        finally:
            child.kill()
            child.wait(10)


def ask(url: str) -> tuple[int, dict]:
    """Status and document, once the process listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert time.monotonic() < deadline, url
            time.sleep(0.1)


@pytest.mark.parametrize("service", serve.NEEDS)
def test_each_missing_setting_is_named(service: serve.Service) -> None:
    serve.check_settings(Settings(**FULL), service)
    for name in serve.NEEDS[service]:
        with pytest.raises(InputError, match=f"EVENER_{name.upper()}: is missing") as caught:
            serve.check_settings(Settings(**{**FULL, name: "" if name.endswith("token") else None}), service)
        assert caught.value.exit_code == 2


def test_the_command_ends_with_two(tmp_path: Path) -> None:
    with evener(tmp_path, "proxy", admin_token="x") as child:
        assert child.wait(60) == 2
    assert "EVENER_REDIS_URL: is missing" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("service", "port", "lacking"),
    [
        ("proxy", "admin_port", ["redis"]),
        ("orchestrator", "api_port", ["database", "bus", "redis"]),
        ("runner", "health_port", ["bus", "api", "proxy"]),
        ("verifier", "health_port", ["bus", "api"]),
        ("learner", "health_port", ["bus", "api", f"engine {AWAY}"]),
    ],
)
def test_it_waits_for_what_is_away_and_ends_when_told(tmp_path: Path, service: str, port: str, lacking: list[str]) -> None:
    here = free_port()
    away = {"url": AWAY, "admin_url": AWAY, "engine_urls": json.dumps([AWAY]), port: str(here)}
    with evener(tmp_path, service, **FULL, **away) as child:
        status, document = ask(f"http://127.0.0.1:{here}/readyz")
        assert (status, document["ready"]) == (503, False)
        for name, line in zip(lacking, document["missing"], strict=True):
            assert line.startswith(f"{name}: "), line
        assert ask(f"http://127.0.0.1:{here}/healthz") == (200, {"status": "ok"})
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
    waiting = [line for line in (tmp_path / "log").read_text().splitlines() if '"event": "waiting"' in line]
    assert len(json.loads(waiting[0])["missing"]) == len(lacking)


async def test_a_service_that_does_not_end_is_cut() -> None:
    stop, cancelled = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    stop.set()
    assert await asyncio.wait_for(serve._until_stopped(stubborn(), stop, patience_s=0.05), 5) == 1
    assert cancelled.is_set()


async def test_a_service_that_fails_ends_with_its_fault() -> None:
    async def failing() -> None:
        raise InputError("port_occupied", "8700")

    with pytest.raises(InputError, match="8700"):
        await asyncio.wait_for(serve._until_stopped(failing(), asyncio.Event(), patience_s=5), 5)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with evener(tmp_path, "verifier", **FULL, health_port=port) as child:
            assert child.wait(60) == 2
    assert f"127.0.0.1:{port}" in (tmp_path / "log").read_text()
