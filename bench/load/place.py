"""RabbitMQ, Redis, Postgres, orchestrators and proxies as processes on free ports, over a scripted engine; ended by their ids.

What stands in for runners, verifiers and the learner is in `bench.load.workers` and `bench.load.learner`; ``real`` starts the
real ones, whose sandboxes run the quick harness of `tests.chaos`.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from tests.balancer import Balancer
from tests.chaos.stack import a_cache
from tests.chaos.stores import Store, running_stores
from tests.e2e.place import EXAMPLE
from tests.e2e.processes import TOKEN, Stack, environment
from tests.ports import free_port, free_ports

POLICY = "load"
HARNESS, QUICK = "scripted", "quick"
GROUP_SIZE, GROUPS_PER_STEP = 8, 8
ROLLOUTS_PER_STEP = GROUP_SIZE * GROUPS_PER_STEP
TASKS = 4
REAL = ("runner", "verifier", "learner")


@dataclass
class Place:
    """What is measured, and the way to it."""

    folder: Path
    stack: Stack
    stores: dict[str, Store]
    engine: subprocess.Popen[bytes]
    engine_url: str
    token: str = TOKEN

    @property
    def url(self) -> str:
        """The API."""
        return self.stack.env["EVENER_URL"]

    @property
    def proxy_url(self) -> str:
        """The proxies' agent side."""
        return self.stack.env["EVENER_PROXY_URL"]

    @property
    def admin_url(self) -> str:
        """The proxies' admin side."""
        return self.stack.env["EVENER_ADMIN_URL"]

    def pids(self) -> dict[str, int]:
        """Process ids by name: our services, the stores and the engine."""
        found = {name: service.child.pid for name, service in self.stack.services.items() if service.child is not None}
        found |= {name: store.process.pid for name, store in self.stores.items() if store.process is not None}
        return found | {"engine (scripted)": self.engine.pid}


@contextlib.contextmanager
def running(folder: Path, *, orchestrators: int, proxies: int, real: bool) -> Generator[Place]:
    """Everything, started and ready. With one replica of a service its callers meet it without a balancer between."""
    with running_stores() as stores, contextlib.ExitStack() as exits:
        ports = free_ports(orchestrators + 2 * proxies)
        api, agents = ports[:orchestrators], ports[orchestrators : orchestrators + proxies]
        admin = ports[orchestrators + proxies :]
        urls = {
            name: f"http://127.0.0.1:{each[0]}" if len(each) == 1 else exits.enter_context(Balancer(each)).url
            for name, each in (("EVENER_URL", api), ("EVENER_PROXY_URL", agents), ("EVENER_ADMIN_URL", admin))
        }
        port = free_port()
        engine_url = f"http://127.0.0.1:{port}"
        direct = {name: stores[name].url for name in ("postgres", "rabbitmq", "redis")}
        secrets = {"database_url": direct["postgres"], "amqp_url": direct["rabbitmq"], "redis_url": direct["redis"]}
        env = environment(folder, **secrets) | urls | {"EVENER_ENGINE_URLS": json.dumps([engine_url])}
        env["EVENER_LOG_LEVEL"] = "WARNING"
        if real:
            env["EVENER_CACHE"] = str(a_cache(folder))
        stack = Stack(folder, *direct.values(), env=env)
        for n, api_port in enumerate(api):
            stack.add(f"orchestrator-{n}", "orchestrator", health=f"http://127.0.0.1:{api_port}/readyz", api_port=api_port)
        for n, (proxy_port, admin_port) in enumerate(zip(agents, admin, strict=True)):
            ready = f"http://127.0.0.1:{admin_port}/readyz"
            stack.add(f"proxy-{n}", "proxy", health=ready, proxy_port=proxy_port, admin_port=admin_port)
        for name, health_port in zip(REAL if real else (), free_ports(len(REAL)), strict=False):
            ready = f"http://127.0.0.1:{health_port}/readyz"
            stack.add(name, name, "--name", name, health=ready, health_port=health_port)
            stack.services[name].module = "tests.chaos.command"
        argv = [sys.executable, "-m", "tests.chaos.engine", str(port), str(folder / "engine.jsonl")]
        with (folder / "engine.log").open("ab") as log:
            engine = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        try:
            for service in stack.services.values():
                service.start()
            for service in stack.services.values():
                service.until_ready()
            yield Place(folder, stack, stores, engine, engine_url)
        except BaseException:
            stack.show_logs()
            raise
        finally:
            for service in stack.services.values():
                service.kill()
            engine.kill()
            engine.wait(10)


def run_file(folder: Path, *, rollouts: int, in_flight: int, harness: str) -> Path:
    """A training run of so many rollouts, whose pacing lets ``in_flight`` of them be at work at any time."""
    for number in range(TASKS):
        _a_task(folder / "tasks" / f"task-{number}")
    # Twice what is in flight may be open, closed or in training: groups wait for their slowest and for their step.
    staleness = 2 * in_flight // ROLLOUTS_PER_STEP + 1
    path = folder / "run.toml"
    path.write_text(
        f"""name = "{POLICY}"
policy = "{EXAMPLE / "tiny-policy"}"
tasks = "{folder / "tasks"}"
[[harness]]
name = "{harness}"
[rollouts]
group_size = {GROUP_SIZE}
concurrent = {in_flight}
[budget]
calls = 20
sampled_tokens = 4096
wall_s = 3600
[train]
steps = {rollouts // ROLLOUTS_PER_STEP}
groups_per_step = {GROUPS_PER_STEP}
learning_rate = 1e-5
max_staleness = {staleness}
"""
    )
    return path


def _a_task(folder: Path) -> None:
    """A task whose reward is the number that the agent left, where there is one: most workers are scripted."""
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    (folder / "task.toml").write_text('schema_version = "1.4"\n')
    (folder / "instruction.md").write_text(f"{folder.name}\n")
    (folder / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /workspace\n")
    (folder / "tests" / "test.sh").write_text("#!/bin/sh\ncat /workspace/answer > /logs/verifier/reward.txt\n")
    (folder / "solution" / "solve.sh").write_text("#!/bin/sh\ntrue\n")
