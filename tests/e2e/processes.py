"""Every service of Evener as a process of its own, two of each that scales, on real RabbitMQ, Redis and Postgres."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.balancer import Balancer
from tests.e2e.place import EXAMPLE, ROOT
from tests.ports import free_ports

READY_S = 600.0
"""Longest start; the learner imports torch, on a busy machine beside ten other processes."""

STOP_S = 60.0
TOKEN = "token-of-a-test"


@dataclass
class Service:
    """One process of `evener serve`, stopped by its id."""

    name: str
    arguments: list[str]
    env: dict[str, str]
    folder: Path
    health: str
    module: str = "evener.cli.main"
    child: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", self.module, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                cwd=self.folder,
            )

    def until_ready(self) -> None:
        assert self.child is not None
        deadline, answer = time.monotonic() + READY_S, "nothing"
        while time.monotonic() < deadline:
            assert self.child.poll() is None, f"{self.name} ended with {self.child.returncode}"
            try:
                with urllib.request.urlopen(self.health, timeout=10):
                    return
            except urllib.error.HTTPError as error:
                answer = error.read().decode()
            except OSError as error:
                answer = str(error)
            time.sleep(0.2)
        pytest.fail(f"{self.name} is not ready after {READY_S:g} s: {answer}")

    def stop(self) -> int:
        """Ask it to end; its exit code."""
        assert self.child is not None
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(STOP_S)

    def kill(self) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait(STOP_S)

    def events(self, event: str) -> list[dict[str, Any]]:
        """The lines of its log that say ``event``."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("{")]
        return [document for document in map(json.loads, lines) if document.get("event") == event]


@dataclass
class Stack:
    """The processes by name, and the stores below them."""

    folder: Path
    database: str
    amqp: str
    redis: str
    services: dict[str, Service] = field(default_factory=dict[str, Service])
    env: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, name: str, *arguments: str, health: str, **settings: int) -> None:
        own = {f"EVENER_{key.upper()}": str(value) for key, value in settings.items()}
        self.services[name] = Service(name, ["serve", *arguments], self.env | own, self.folder, health)

    def get(self, path: str) -> Any:
        """A JSON document of the API."""
        request = urllib.request.Request(self.env["EVENER_URL"] + path, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())

    def done(self) -> int:
        """How many rollouts of the newest run have their outcome."""
        try:
            return self.get("/v1/runs/latest")["rollouts"]["done"]
        except OSError:
            return 0  # not submitted yet, or the API's replica is being stopped

    def run(self, file: Path) -> subprocess.Popen[bytes]:
        """`evener run` as a user of this stack calls it; output goes to run.json and run.log."""
        with (self.folder / "run.json").open("wb") as out, (self.folder / "run.log").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "evener.cli.main", "run", str(file), "--json"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.env | {"EVENER_DATA": str(self.folder / "of-the-user")},
                cwd=self.folder,
            )

    def stop(self) -> dict[str, int]:
        """End every process, workers first; the exit codes."""
        order = sorted(self.services, key=lambda name: name.startswith(("proxy", "orchestrator", "engine")))
        return {name: self.services[name].stop() for name in order}

    def show_logs(self) -> None:
        for path in sorted(self.folder.glob("*.log")):
            print(f"----- {path.name}")
            print("\n".join(path.read_text(errors="replace").splitlines()[-25:]))


def environment(folder: Path, **secrets: str) -> dict[str, str]:
    """The variables of every process: ours alone, with ``secrets`` as files and all packages on the path."""
    place = folder / "secrets"
    place.mkdir()
    for name, text in {"api_token": TOKEN, "admin_token": TOKEN, **secrets}.items():
        (place / f"evener_{name}").write_text(text + "\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVENER_") or name == "EVENER_CACHE"}
    return kept | {
        "EVENER_SECRETS_DIR": str(place),
        "EVENER_DATA": str(folder / "data"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(str(part) for part in (ROOT / "services").iterdir())]),
    }


@contextlib.contextmanager
def running_stack(folder: Path, *, database: str, amqp: str, redis: str) -> Iterator[Stack]:
    """Two proxies, orchestrators, runners and verifiers, one learner and one engine; killed by their ids in the end."""
    shared = environment(folder, database_url=database, amqp_url=amqp, redis_url=redis)
    ports = free_ports(12)
    api, proxy, admin = (ports[start : start + 2] for start in (0, 2, 4))
    engine, workers = ports[6], ports[7:]
    with Balancer(api) as apis, Balancer(proxy) as proxies, Balancer(admin) as admins:
        own = {
            "EVENER_URL": apis.url,
            "EVENER_PROXY_URL": proxies.url,
            "EVENER_ADMIN_URL": admins.url,
            "EVENER_ENGINE_URLS": json.dumps([f"http://127.0.0.1:{engine}"]),
            "EVENER_ENGINE_PORT": str(engine),
            "EVENER_RUNNER_SLOTS": "4",
        }
        stack = Stack(folder, database, amqp, redis, env=shared | own)
        policy = str(EXAMPLE / "tiny-policy")
        stack.add("engine", "engine", "--policy", policy, health=f"http://127.0.0.1:{engine}/health")
        for n in (0, 1):
            ready = f"http://127.0.0.1:{admin[n]}/readyz"
            stack.add(f"proxy-{n}", "proxy", health=ready, proxy_port=proxy[n], admin_port=admin[n])
            stack.add(f"orchestrator-{n}", "orchestrator", health=f"http://127.0.0.1:{api[n]}/readyz", api_port=api[n])
            for place, kind in enumerate(("runner", "verifier")):
                port = workers[2 * place + n]
                ready = f"http://127.0.0.1:{port}/readyz"
                stack.add(f"{kind}-{n}", kind, "--name", f"{kind}-{n}", health=ready, health_port=port)
        stack.add("learner", "learner", health=f"http://127.0.0.1:{workers[4]}/readyz", health_port=workers[4])
        try:
            stack.services["engine"].start()
            stack.services["engine"].until_ready()  # torch is the longest start: alone it is the shortest
            for service in list(stack.services.values())[1:]:
                service.start()
            for service in stack.services.values():
                service.until_ready()
            yield stack
        except BaseException:
            stack.show_logs()
            raise
        finally:
            for service in stack.services.values():
                service.kill()
