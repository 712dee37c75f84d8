"""The two proxies behind one face: start, open a session, close it, and where each answers.

Ours is `evener serve proxy` as a process of its own on a real Redis with its append-only file on; the rival is OpenEnv's
capture server with the settings of its own runner, which keeps everything in memory.
"""

import copy
import json
import secrets
import shutil
import sys
import uuid
from pathlib import Path
from typing import Literal, Protocol

from bench.proxy.client import Connection
from bench.proxy.processes import Process, module, python_env
from tests.ports import free_port

Fsync = Literal["everysec", "always"]
_BUDGET = {"calls": 100_000, "sampled_tokens": 2_000_000, "wall_s": 3600}


class Refused(Exception):
    """The admin side of a proxy did not do what it was asked."""


class Side(Protocol):
    """A proxy that is measured."""

    name: str
    proxy: Process
    port: int  # where agents call
    admin_port: int  # where sessions are opened
    health: str

    async def open(self, admin: Connection) -> tuple[str, str]:
        """A fresh session: its id and the key of its agent."""
        ...

    async def close(self, admin: Connection, session: str) -> None:
        """The session is over: forget it."""
        ...


class Engine:
    """The stand-in for vLLM, as a process."""

    def __init__(self, folder: Path, delay_s: float = 0.0) -> None:
        self.port = free_port()
        self.process = Process(f"engine-{self.port}", module("bench.proxy.engine", self.port, delay_s), folder, python_env())
        self.url = f"http://127.0.0.1:{self.port}"

    async def ready(self) -> None:
        """Wait until it answers."""
        await self.process.answers(self.port, "/v1/models")


class Redis:
    """A `redis-server` of its own with an append-only file in ``folder``."""

    def __init__(self, folder: Path, fsync: Fsync) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise RuntimeError("redis-server is missing: apt-get install redis-server")
        self.port = free_port()
        self.fsync = fsync
        self.url = f"redis://127.0.0.1:{self.port}/0"
        data = folder / f"redis-{fsync}-{self.port}"
        data.mkdir()
        options = {"port": self.port, "bind": "127.0.0.1", "dir": data, "save": "", "appendonly": "yes", "appendfsync": fsync}
        argv = [binary, *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
        self.process = Process(f"redis-{fsync}-{self.port}", argv, folder)


class Ours:
    """`evener serve proxy`."""

    name = "evener"
    health = "/healthz"

    def __init__(self, folder: Path, engine: Engine, redis: Redis) -> None:
        self.redis = redis
        self.port, self.admin_port = free_port(), free_port()
        self._token = secrets.token_hex(16)
        settings = {
            "EVENER_REDIS_URL": redis.url,
            "EVENER_ENGINE_URLS": json.dumps([engine.url]),
            "EVENER_PROXY_PORT": str(self.port),
            "EVENER_ADMIN_PORT": str(self.admin_port),
            "EVENER_ADMIN_TOKEN": self._token,
        }
        start = "from evener.cli.main import main; main()"  # what the console script `evener` does
        argv = [sys.executable, "-c", start, "serve", "proxy"]
        self.proxy = Process(f"evener-{self.port}", argv, folder, python_env() | settings)

    async def ready(self) -> None:
        """Wait until both of its ports answer."""
        await self.proxy.answers(self.port, self.health)
        await self.proxy.answers(self.admin_port, "/readyz")

    async def open(self, admin: Connection) -> tuple[str, str]:
        """As the runner does for an attempt."""
        session = f"{uuid.uuid4().hex}.1"
        names = {"session_id": session, "rollout_id": session[:-2], "attempt": 1, "harness": "bench", "policy": "stub"}
        body = json.dumps(names | {"purpose": "train", "budget": _BUDGET}).encode()
        return session, str(json.loads(await self._admin(admin, "POST", "/v1/sessions", body))["key"])

    async def close(self, admin: Connection, session: str) -> None:
        """As runner and orchestrator do: sealed, and deleted once it is archived."""
        await self._admin(admin, "POST", f"/v1/sessions/{session}/seal")
        await self._admin(admin, "DELETE", f"/v1/sessions/{session}")

    async def _admin(self, admin: Connection, method: str, path: str, body: bytes = b"") -> bytes:
        status, answer = await admin.request(method, path, body, self._token)
        if status >= 300:
            raise Refused(f"{method} {path}: {status} {answer[:300]!r}")
        return answer


class Rival:
    """OpenEnv's capture server. ``exports``: a session's capture is fetched before it is forgotten.

    Ours has left the proxy for Redis when a call ends; theirs leaves by its export, so that with it both have done the same.
    """

    health = "/health"

    def __init__(self, folder: Path, engine: Engine, python: Path) -> None:
        self.name = "openenv"
        self.exports = True
        self.port = self.admin_port = free_port()
        script = Path(__file__).with_name("rival_server.py")
        self.proxy = Process("openenv", [str(python), "-P", str(script), f"{engine.url}/v1", str(self.port)], folder)

    def without_export(self) -> "Rival":
        """The same server, whose captures are thrown away."""
        other = copy.copy(self)
        other.name, other.exports = "openenv without export", False
        return other

    async def ready(self) -> None:
        """Wait until it answers."""
        await self.proxy.answers(self.port, self.health)

    async def open(self, admin: Connection) -> tuple[str, str]:
        """A session's id is its key."""
        _, answer = await admin.request("POST", "/sessions", b"{}")
        session = str(json.loads(answer)["session_id"])
        return session, session

    async def close(self, admin: Connection, session: str) -> None:
        """Fetched, and forgotten."""
        if self.exports:
            status, _ = await admin.request("GET", f"/sessions/{session}/trace_entries")
            if status != 200:
                raise Refused(f"GET trace_entries: {status}")
        await admin.request("DELETE", f"/sessions/{session}")
