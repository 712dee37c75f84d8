"""One attempt as the runner makes it: sandbox, session, agent, seal, snapshot; with some engine behind the proxy.

What is looked at afterwards is what the ledger would read: the report, the sealed session, its records and their graph.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import fakeredis
from pydantic import SecretStr

from evener.api import ApiClient, Budget, HarnessRef, RolloutLease, Sampling
from evener.api.types import PromptMode
from evener.archive import tar_of_files
from evener.blobs import Blobs
from evener.ids import new_id, session_id
from evener.messages import RolloutFinished
from evener.settings import Settings
from evener.tasks import unpack
from evener.trace.classes import call_classes
from evener.trace.forks import ForkCause, find_forks
from evener.trace.graph import Graph, build_graph
from evener.trace.histories import Histories
from evener.trace.record import CallRecord
from evener.trace.session import SessionState
from evener_runner.attempt import Attempt, Tools
from evener_runner.service import ProxySessions
from tests.harnesses.agents import Agent
from tests.harnesses.engine import ScriptedEngine, scripted_engine
from tests.unit.proxy.stub import TOKEN, Behaviour, StubEngine, running_proxy

SLOW_S = float(os.environ.get("SLOW_S", "100"))
"""How long a slow reply takes: ten minutes with SLOW_S=600."""
WALL_S = 140.0 + SLOW_S
_INSTRUCTION = "Write the word hello into the file hello.txt of the working directory."

Script = Callable[[ScriptedEngine], Sequence[Behaviour]]


@dataclass(frozen=True)
class Left:
    """What an attempt left behind. ``hello``: the file that the task asks for, None where there is none."""

    report: RolloutFinished
    state: SessionState
    records: list[CallRecord]
    hello: str | None
    log: str

    @property
    def graph(self) -> Graph:
        """The trace."""
        return build_graph(self.records)

    @property
    def forks(self) -> list[ForkCause]:
        """Why calls left the line, in order of number."""
        histories = Histories(self.graph)
        return [fork.cause for fork in find_forks(self.graph, histories, call_classes(self.graph, histories)).values()]

    def text(self) -> str:
        """For a person who asks why: the agent's output, the calls, and what the engine was asked last."""
        calls = [
            f"{call.number} prompt={len(call.prompt_ids)} completion={len(call.completion_ids)} {call.delivered}"
            f" {call.reply['finish_reason']} parent={self.graph.parent[call.call_id]} id={call.call_id}"
            for call in self.records
        ]
        return "\n".join([str(self.report), self.log, *calls, f"forks: {self.forks}"])


@dataclass(frozen=True)
class Seen(Left):
    """The same, and the engine that followed a script."""

    engine: StubEngine

    def text(self) -> str:
        """With what the engine was asked last."""
        last = [str(message)[:400] for message in self.engine.asked[-1]["messages"][1:]] if self.engine.asked else []
        return "\n".join([super().text(), "asked last:", *last])


async def roll_out(
    agent: Agent, script: Script, folder: Path, *, purpose: Literal["train", "eval"] = "train", cache: Path | None = None
) -> Seen:
    """Run ``agent`` on the task against ``script``; everything is made below ``folder``."""
    async with scripted_engine() as engine:
        engine.script += script(engine)
        return await against(engine, agent, folder, purpose=purpose, cache=cache)


async def against(
    engine: StubEngine,
    agent: Agent,
    folder: Path,
    *,
    purpose: Literal["train", "eval"] = "train",
    cache: Path | None = None,
    prompt_mode: PromptMode = "render",
) -> Seen:
    """The same against an engine that is served."""
    left = await attempt(agent, engine.url, folder, purpose=purpose, cache=cache, prompt_mode=prompt_mode)
    return Seen(left.report, left.state, left.records, left.hello, left.log, engine)


async def attempt(
    agent: Agent,
    engine_url: str,
    folder: Path,
    *,
    purpose: Literal["train", "eval"] = "train",
    sampling: Sampling | None = None,
    cache: Path | None = None,
    prompt_mode: PromptMode = "render",
) -> Left:
    """Run ``agent`` on the task against the engine at ``engine_url``; everything is made below ``folder``."""
    blobs = Blobs(folder / "blobs")
    lease = _lease(agent, blobs, purpose, sampling or Sampling(), prompt_mode)
    async with running_proxy(StubEngine(url=engine_url), fakeredis.FakeAsyncRedis()) as proxy:
        known = {"cache": cache} if cache is not None else {}
        settings = Settings(data=folder, proxy_url=proxy.url, admin_token=SecretStr(TOKEN), **known)
        tools = Tools(settings, ApiClient("http://127.0.0.1:9", ""), ProxySessions(proxy.admin), blobs)
        report = await Attempt(lease, agent.harness, tools).run()
        assert report is not None, "nobody took the lease away"
        assert report.sealed is not None, f"no session: {report}"
        state = await proxy.admin.read(lease.session_id)
        records = await proxy.store.load(lease.session_id)
    log = blobs.get("logs", report.logs).decode() if report.logs else ""
    return Left(report, state, records, _hello(blobs, report.snapshot, folder), log)


def _lease(
    agent: Agent, blobs: Blobs, purpose: Literal["train", "eval"], sampling: Sampling, prompt_mode: PromptMode
) -> RolloutLease:
    rollout = new_id()
    bundle = tar_of_files({"task.toml": b"", "instruction.md": _INSTRUCTION.encode(), "environment/workspace/.keep": b""})
    return RolloutLease(
        session_id=session_id(rollout, 1),
        rollout_id=rollout,
        attempt=1,
        lease="none",
        lease_s=60.0,
        run_id=new_id(),
        group_id=new_id(),
        policy="scripted",
        version=None,
        purpose=purpose,
        harness=HarnessRef(name=agent.harness.name),
        task_id="hello",
        agent_bundle=blobs.put("agent", bundle),
        trusted=False,
        sandbox="bubblewrap",
        sampling=sampling,
        budget=Budget(calls=20, wall_s=WALL_S),
        prompt_mode=prompt_mode,
    )


def _hello(blobs: Blobs, snapshot: str | None, folder: Path) -> str | None:
    if snapshot is None:
        return None
    unpack(blobs.get("snapshots", snapshot), folder / "left")
    file = folder / "left" / "hello.txt"
    return file.read_text() if file.is_file() else None
