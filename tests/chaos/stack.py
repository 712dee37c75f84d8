"""Every service as a process of its own; each way from one to another leads through a relay that can be cut.

Two orchestrators, proxies and runners, a verifier and a learner over the stores, and a scripted engine, which may be killed as
well.
"""

import asyncio
import contextlib
import json
import os
import re
import threading
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evener.bus import connect
from evener.messages import EVENTS, ROLLOUTS, WORKSPACES, train_queue
from evener.settings import Settings
from tests.balancer import Balancer
from tests.chaos.stores import Store
from tests.conftest import TEST_POLICY
from tests.e2e.processes import Service, Stack, environment
from tests.ports import free_ports
from tests.relay import Relay

KINDS = ("orchestrator", "proxy", "runner", "verifier", "learner", "engine")
LEASE_S = 15
SLOTS = 4


class Relays:
    """Relays by name, in a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self.by_name: dict[str, Relay] = {}

    def add(self, name: str, port: int) -> int:
        """Lead to ``port``; the relay's own port."""
        self.by_name[name] = relay = Relay(port)
        self._wait(relay.__aenter__())
        return relay.port

    def cut(self, name: str) -> None:
        """Reset every connection."""
        self._loop.call_soon_threadsafe(self.by_name[name].cut)

    def stall(self, name: str) -> None:
        """Leave every connection half open."""
        self._loop.call_soon_threadsafe(self.by_name[name].stall)

    def delay(self, name: str, seconds: float) -> None:
        """Hold what passes for so long."""
        self.by_name[name].delay_s = seconds

    def __enter__(self) -> "Relays":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for relay in self.by_name.values():
            self._loop.call_soon_threadsafe(relay.cut)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


@dataclass
class Chaos:
    """What is there to be killed and cut."""

    stack: Stack
    stores: dict[str, Store]
    relays: Relays
    engine_record: Path

    @property
    def kinds(self) -> list[str]:
        """Every kind of process."""
        return [*KINDS, *self.stores]

    def run(self) -> dict[str, Any]:
        """What the API says of the run; nothing while it does not answer."""
        try:
            return self.stack.get("/v1/runs/latest")
        except (OSError, HTTPException, ValueError):
            return {}

    def revive(self) -> list[str]:
        """Start again what ended by itself, as a supervisor does; their names."""
        ended = [service for service in self.stack.services.values() if service.child and service.child.poll() is not None]
        for service in ended:
            service.start()
        return [service.name for service in ended]

    def services(self, kind: str) -> list[Service]:
        """The processes of a kind of service."""
        return [service for name, service in self.stack.services.items() if name.startswith(kind)]


def through(relays: Relays, name: str, url: str) -> str:
    """A URL of what ``url`` leads to, by way of a relay."""
    port = urlsplit(url).port
    assert port is not None, url
    return re.sub(rf":{port}\b", f":{relays.add(name, port)}", url)


async def declare_queues(amqp: str) -> None:
    """Make every queue before anybody is killed.

    RabbitMQ notes a new quorum queue on its disk half a second after it said that it has it. One that is killed in between
    comes back with a queue that never has a leader (rabbitmq-server#15725), which only its deletion mends.
    """
    bus = connect(amqp)
    try:
        for queue in (ROLLOUTS, WORKSPACES, EVENTS, train_queue(TEST_POLICY)):
            async with bus.consume(queue):
                pass
    finally:
        await bus.close()


@contextlib.contextmanager
def running_chaos(folder: Path, stores: dict[str, Store]) -> Generator[Chaos]:
    """Everything, started and ready; killed by their ids in the end."""
    record = folder / "engine.jsonl"
    ports = free_ports(15)
    api, proxy, admin, workers = ports[0:2], ports[2:4], ports[4:6], ports[6:14]
    with contextlib.ExitStack() as exits:
        relays = exits.enter_context(Relays())
        urls = {
            name: exits.enter_context(Balancer(each)).url for name, each in (("api", api), ("proxy", proxy), ("admin", admin))
        }
        engine_url = f"http://127.0.0.1:{ports[14]}"
        names = {"postgres": "database_url", "rabbitmq": "amqp_url", "redis": "redis_url"}
        secrets = {names[name]: through(relays, name, store.url) for name, store in stores.items()}
        own = {
            "EVENER_URL": through(relays, "api", urls["api"]),
            "EVENER_PROXY_URL": through(relays, "proxy", urls["proxy"]),
            "EVENER_ADMIN_URL": through(relays, "admin", urls["admin"]),
            "EVENER_ENGINE_URLS": json.dumps([through(relays, "engine", engine_url)]),
            "EVENER_CACHE": str(a_cache(folder)),
            "EVENER_RUNNER_SLOTS": str(SLOTS),
            "EVENER_LEASE_S": str(LEASE_S),
        }
        direct = {name: stores[name].url for name in stores}
        stack = Stack(
            folder,
            direct["postgres"],
            direct["rabbitmq"],
            direct["redis"],
            env=environment(folder, **secrets) | own,
        )
        add_services(stack, api, proxy, admin, workers)
        arguments, health = [str(ports[14]), str(record)], f"{engine_url}/health"
        stack.services["engine"] = Service("engine", arguments, stack.env, folder, health, module="tests.chaos.engine")
        chaos = Chaos(stack, stores, relays, record)
        asyncio.run(declare_queues(stack.amqp))
        try:
            for service in stack.services.values():
                service.start()
            for service in stack.services.values():
                service.until_ready()
            yield chaos
        except BaseException:
            stack.show_logs()
            raise
        finally:
            for service in stack.services.values():
                service.kill()


def add_services(stack: Stack, api: list[int], proxy: list[int], admin: list[int], workers: list[int]) -> None:
    """Two of each that scales, but for the verifier."""
    for n in (0, 1):
        stack.add(f"orchestrator-{n}", "orchestrator", health=f"http://127.0.0.1:{api[n]}/readyz", api_port=api[n])
        ready = f"http://127.0.0.1:{admin[n]}/readyz"
        stack.add(f"proxy-{n}", "proxy", health=ready, proxy_port=proxy[n], admin_port=admin[n])
    for name, port in zip(("runner-0", "runner-1", "verifier", "learner"), workers, strict=False):
        kind, ready = name.partition("-")[0], f"http://127.0.0.1:{port}/readyz"
        stack.add(name, kind, "--name", name, health=ready, health_port=port)
        stack.services[name].module = "tests.chaos.command"


def a_cache(folder: Path) -> Path:
    """A cache folder with the quick harness in it, beside what the user's own has."""
    cache, known = folder / "cache", Settings().cache
    (cache / "harnesses").mkdir(parents=True)
    for part in (*known.glob("node-*"), *known.glob("harnesses/*")):
        (cache / part.relative_to(known)).symlink_to(part)
    for name in ("quick-1", *(f"quick-1-compile-cache-{kind}-{os.geteuid()}" for kind in ("bubblewrap", "process"))):
        (cache / "harnesses" / name).mkdir()
    return cache
