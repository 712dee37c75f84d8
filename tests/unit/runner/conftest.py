"""A runner with everything around it: an API, a proxy, a bus, and an agent that is a short Python script."""

import asyncio
import json
import os
from dataclasses import dataclass, field

import msgspec
import pytest
from aiohttp import web

from evener.api import ApiClient, Budget, HarnessRef, Heartbeat, RolloutLease, Sampling
from evener.blobs import Blobs
from evener.bus.memory import MemoryBus
from evener.ids import new_id, session_id
from evener.messages import EVENTS, RunRollout, Sealed
from evener.sandbox.probe import bubblewrap_missing
from evener.settings import Settings
from evener_runner.attempt import Tools
from evener_runner.harnesses import Harness
from evener_runner.install import NODE_VERSION
from evener_runner.runner import Runner
from tests.tars import tar

LEASE_S = 2.4
"""A third of it is longer than an answer takes on a busy machine."""

AGENT = """
import json, os, sys, time, urllib.request
access = json.load(open(os.path.expanduser("~/.agent.json")))
instruction = sys.stdin.read().strip()
def call(text):
    request = urllib.request.Request(access["base_url"] + "/v1/chat/completions", data=text.encode(),
                                     headers={"Authorization": "Bearer " + access["key"]})
    return urllib.request.urlopen(request, timeout=20).read().decode()
exec(instruction)
"""


@dataclass
class State:
    """What the stub proxy says of a session."""

    calls: int = 0
    in_flight: int = 0
    engine_failures: int = 0
    budget_spent: str | None = None
    fault: str | None = None
    last_error: str | None = None
    sealed: Sealed | None = None


@dataclass
class World:
    """The services around a runner; ``log`` tells what happened in which order."""

    settings: Settings
    bus: MemoryBus
    blobs: Blobs
    sandbox: str
    log: list[str] = field(default_factory=list)
    leases: dict[str, RolloutLease] = field(default_factory=dict)
    action: str = "continue"
    claim_takes_s: float = 0.0
    hangs: int = 0
    refuse: set[str] = field(default_factory=set)
    calls: dict[str, int] = field(default_factory=dict)
    state: State = field(default_factory=State)
    down: str | None = None
    version: int = 1

    async def add(self, instruction, files=None, **lease):
        """Publish a command for a new rollout whose agent does what ``instruction`` says in Python; returns its session."""
        rollout = new_id()
        session = session_id(rollout, 1)
        files = files if files is not None else {"environment/workspace/given.txt": b"given"}
        bundle = {"task.toml": b"", "instruction.md": instruction.encode(), **files}
        fields = {"budget": Budget(wall_s=30), "trusted": True, "sandbox": self.sandbox}
        fields |= {"version": None, "purpose": "train", **lease}
        self.leases[session] = RolloutLease(
            session_id=session,
            rollout_id=rollout,
            attempt=1,
            lease=f"lease-{rollout}",
            lease_s=LEASE_S,
            run_id=new_id(),
            group_id=new_id(),
            policy="p",
            harness=HarnessRef(name="scripted"),
            task_id="t",
            agent_bundle=self.blobs.put("agent", tar(bundle)),
            sampling=Sampling(),
            **fields,
        )
        await self.bus.publish(RunRollout(run_id="r", rollout_id=rollout, attempt=1))
        return session

    async def event(self, seconds=30.0):
        """The next event that the runner publishes."""
        async with asyncio.timeout(seconds), self.bus.consume(EVENTS) as consumer:
            delivery = await consumer.get()
            await delivery.ack()
            return delivery.message

    # The proxy's admin side, as `evener_runner.attempt.Sessions` has it.
    async def open(self, lease):
        self.log.append(f"open {lease.session_id}")
        self.calls[lease.session_id] = 0
        return f"sk-evener-{lease.session_id}"

    async def read(self, session):
        return State(**{**vars(self.state), "calls": self.calls[session]})

    async def problem(self, *, oldest_version=0):
        return self.down or (f"version {self.version} is too old" if self.version < oldest_version else None)

    async def seal(self, session):
        self.log.append(f"seal {session}")
        sealed = self.state.sealed or Sealed(committed=self.calls[session], aborted=0, lost=0, undelivered=0)
        return State(**{**vars(self.state), "sealed": sealed})

    # HTTP
    async def claim(self, request):
        session = request.match_info["session"]
        self.log.append(f"claim {session}")
        await asyncio.sleep(self.claim_takes_s)
        if session in self.refuse:
            return web.json_response({"detail": "its lease is held"}, status=409)
        return web.Response(body=msgspec.json.encode(self.leases[session]))

    async def heartbeat(self, request):
        session = request.match_info["session"]
        assert (await request.json())["lease"] == self.leases[session].lease
        self.log.append(f"heartbeat {session}")
        if self.hangs > 0:
            self.hangs -= 1
            await asyncio.sleep(60)
        if self.action == "refuse":
            return web.json_response({"detail": "lost"}, status=409)
        return web.Response(body=msgspec.json.encode(Heartbeat(lease_s=LEASE_S, action=self.action)))

    async def chat(self, request):
        session = request.headers["Authorization"].removeprefix("Bearer sk-evener-")
        self.calls[session] += 1
        return web.Response(text="answer to " + await request.text())


@pytest.fixture(params=["bubblewrap", "process"])
async def world(request, tmp_path):
    """The services, for each kind of sandbox that works here."""
    if request.param == "bubblewrap" and (missing := await bubblewrap_missing()):
        pytest.skip(f"bubblewrap does not work here: {missing}")
    made = World(Settings(), MemoryBus(), Blobs(tmp_path / "blobs"), request.param)
    app = web.Application()
    app.add_routes(
        [
            web.post("/v1/attempts/{session}/claim", made.claim),
            web.post("/v1/attempts/{session}/heartbeat", made.heartbeat),
            web.post("/v1/chat/completions", made.chat),
        ]
    )
    server = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{server.addresses[0][1]}"
    cache = tmp_path / "cache"
    made.settings = Settings(data=tmp_path / "data", cache=cache, url=url, proxy_url=url)
    caches = [f"harnesses/scripted-1-compile-cache-{kind}-{os.geteuid()}" for kind in ("bubblewrap", "process")]
    for folder in (f"node-{NODE_VERSION}", "harnesses/scripted-1", *caches):
        (cache / folder).mkdir(parents=True)
    yield made
    await server.cleanup()
    assert not list((tmp_path / "data/sandboxes").glob("*")), "a sandbox was left behind"


@pytest.fixture
async def runner(request, world):
    """Starts a runner, with ``drain_s`` of the fixture's parameter; yields (stop event, task)."""
    harness = Harness(
        name="scripted",
        dialect="chat",
        package="none",
        version="1",
        profiles=("default",),
        files=lambda access: {
            ".agent.json": json.dumps({"base_url": access.base_url, "key": access.key, "model": access.model}).encode()
        },
        env={"SCRIPTED": "1"},
        argv=lambda profile, access: ["/usr/bin/python3", "-c", AGENT],
    )
    stop, drain_s = asyncio.Event(), getattr(request, "param", 0.0)
    async with ApiClient(world.settings.api, "token", patience_s=2) as api:
        tools = Tools(world.settings, api, world, world.blobs)
        runner = Runner(world.bus, tools, name="runner-1", slots=2, harnesses={"scripted": harness}, drain_s=drain_s)
        task = asyncio.create_task(runner.run(stop))
        yield stop, task
        stop.set()
        await asyncio.wait_for(task, 5 + drain_s)
