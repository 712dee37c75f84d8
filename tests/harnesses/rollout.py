"""One attempt as the runner makes it: sandbox, session, agent, seal, snapshot; with the script's engine behind the proxy.

What is looked at afterwards is what the ledger would read: the report, the sealed session, its records and their graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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

WALL_S = 240.0
"""A slow reply takes 100 s of it."""
_INSTRUCTION = "Write the word hello into the file hello.txt of the working directory."

Script = Callable[[ScriptedEngine], Sequence[Behaviour]]


@dataclass(frozen=True)
class Seen:
    """What an attempt left behind. ``engine``: what it was answered by; ``hello``: the file that the task asks for, None where
    there is none.
    """

    report: RolloutFinished
    state: SessionState
    records: list[CallRecord]
    engine: Any
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
        last = [str(message)[:400] for message in self.engine.asked[-1]["messages"][1:]] if self.engine.asked else []
        forks = f"forks: {self.forks}"
        return "\n".join([str(self.report), self.log, *calls, forks, "asked last:", *last])


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
    blobs = Blobs(folder / "blobs")
    lease = _lease(agent, blobs, purpose, prompt_mode)
    async with running_proxy(engine, fakeredis.FakeAsyncRedis()) as proxy:
        known = {"cache": cache} if cache is not None else {}
        settings = Settings(data=folder, proxy_url=proxy.url, admin_token=SecretStr(TOKEN), **known)
        tools = Tools(settings, ApiClient("http://127.0.0.1:9", ""), ProxySessions(proxy.admin), blobs)
        report = await Attempt(lease, agent.harness, tools).run()
        assert report is not None, "nobody took the lease away"
        assert report.sealed is not None, f"no session: {report}"
        state = await proxy.admin.read(lease.session_id)
        records = await proxy.store.load(lease.session_id)
    log = blobs.get("logs", report.logs).decode() if report.logs else ""
    return Seen(report, state, records, engine, _hello(blobs, report.snapshot, folder), log)


def _lease(agent: Agent, blobs: Blobs, purpose: Literal["train", "eval"], prompt_mode: PromptMode) -> RolloutLease:
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
        sampling=Sampling(),
        budget=Budget(calls=20, wall_s=WALL_S),
        prompt_mode=prompt_mode,
    )


def _hello(blobs: Blobs, snapshot: str | None, folder: Path) -> str | None:
    if snapshot is None:
        return None
    unpack(blobs.get("snapshots", snapshot), folder / "left")
    file = folder / "left" / "hello.txt"
    return file.read_text() if file.is_file() else None
