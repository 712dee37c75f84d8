"""One attempt, from its lease to its last word: whatever happens, the agent is dead, its session sealed, its sandbox gone.

Order: an engine with weights that are not too old, sandbox, session, agent; then drain, seal, kill, snapshot, report, destroy.
The time limit seals before it kills, so that no call ends as lost. The agent of a task of several steps is started for each, in
one session, as long as all goes well. Where the lease is lost nothing is said: the ledger has gone on. Run by the runner, one
task an attempt, while a `heart.Heart` beats for it.
"""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Protocol

from evener import log
from evener.api import ApiClient, RolloutLease
from evener.blobs import Blobs
from evener.errors import EvenerError
from evener.messages import RolloutFinished
from evener.sandbox import ExecResult, Folder, Sandbox, choose
from evener.sandbox.threads import in_thread
from evener.settings import Settings
from evener.snapshots import Workspaces
from evener_runner import furnish, logs
from evener_runner.harnesses import Harness
from evener_runner.outcome import Ending, SessionState, Stop, Verdict, classify, went_well

DRAIN_S = 5.0
"""How long the calls of an agent that has exited may take to end; nobody reads them any more."""
LOST_S = 17.0
"""The same after an abnormal end: a proxy that died with a call, which may be why, is known to be dead after 15 s."""
_DRAIN_POLL_S = 0.05
_SERVED_POLL_S = 1.0
STOP_SEAL_S = 1.0
"""How long a stop waits for the proxy, which may be stopping too: the whole stack has to be gone within 5 s."""
_BACKSTOP_S = 30.0
"""The sandbox's own time limit is later than the attempt's by this."""
_TTL_S = 3600.0
"""How long a sandbox's folder may outlive the attempt's time, for the reaper of another host."""

_log = log.get("runner")


class Sessions(Protocol):
    """The proxy's admin side, as far as a runner needs it. Raises InfraError."""

    async def open(self, lease: RolloutLease) -> str:
        """Open the attempt's session; returns its key."""
        ...

    async def read(self, session_id: str) -> SessionState:
        """What is known of it."""
        ...

    async def seal(self, session_id: str) -> SessionState:
        """Close it for good."""
        ...

    async def problem(self, *, oldest_version: int = 0) -> str | None:
        """What keeps agents from being answered now, by weights that are not too old; None where nothing does. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class Tools:
    """What all attempts of a runner share."""

    settings: Settings
    api: ApiClient
    sessions: Sessions
    blobs: Blobs


@dataclass(frozen=True, slots=True)
class _Left:
    """What an attempt leaves behind: why it ended, and blob digests."""

    verdict: Verdict
    snapshot: str | None = None
    logs: str | None = None


class Attempt:
    """One attempt that was claimed, under ``harness``."""

    def __init__(self, lease: RolloutLease, harness: Harness, tools: Tools) -> None:
        self._lease = lease
        self._harness = harness
        self._tools = tools
        self._stop: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        self._folder: Folder | None = None
        self._sandbox: Sandbox | None = None
        self._key: str | None = None
        self._workspaces: Workspaces | None = None
        self._results: list[ExecResult] = []
        self._state: SessionState | None = None
        self._calls = 0

    def stop(self, why: Stop) -> None:
        """End it soon; the first reason counts."""
        if not self._stop.done():
            self._stop.set_result(why)

    async def run(self) -> RolloutFinished | None:
        """Run it to its end. Returns what to report; None where the lease was lost."""
        started = time.time()
        work = asyncio.create_task(self._work())
        try:
            await asyncio.wait({work, self._stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()  # the sandbox kills what runs
                await asyncio.wait({work})
            left = await self._broken_off() if work.cancelled() else work.result()
        finally:
            work.cancel()
            await self._destroy()
        if self._stop.done() and self._stop.result() == "lost":
            return None
        return self._report(left, started)

    async def _work(self) -> _Left:
        try:
            ending = await self._live()
        except EvenerError as error:
            ending = Ending(error=error)
            await self._seal_in_time()
        verdict = classify(ending)
        try:
            return await self._keep(verdict)
        except EvenerError as error:
            return _Left(classify(Ending(error=error)))

    async def _live(self) -> Ending:
        lease, settings = self._lease, self._tools.settings
        await self._until_served()
        kind = await choose(lease.sandbox, trusted=lease.trusted, host=settings.sandbox)
        ttl_s = lease.budget.wall_s + _TTL_S
        self._folder = Folder.make(furnish.sandboxes(settings), lease.session_id, ttl_s=ttl_s)
        bundle = await asyncio.to_thread(self._tools.blobs.get, "agent", lease.agent_bundle)
        job = await in_thread(furnish.read_job, bundle, lease, self._folder)
        self._sandbox = await furnish.make_sandbox(self._harness, job, kind, self._folder, settings)
        self._key = await self._tools.sessions.open(lease)
        start = await furnish.hand_over(self._sandbox, self._harness, lease, self._key)
        self._workspaces = Workspaces(self._sandbox, job.toml, [step.added for step in job.steps])
        steps, over = list(job.steps), time.monotonic() + lease.budget.wall_s
        while True:
            step = steps.pop(0)
            await self._workspaces.begin()
            wall_s = min(step.wall_s, max(over - time.monotonic(), 0.0))
            ending = await self._run_agent(step.instruction, start, wall_s, last=not steps)
            if ending is not None:
                return ending
            await self._workspaces.end()

    async def _run_agent(self, instruction: str, start: furnish.Start, wall_s: float, *, last: bool) -> Ending | None:
        """Start the agent for one step; how the attempt ended, or None where it goes on: nothing runs, the session is open."""
        assert self._sandbox is not None, "an agent runs in a sandbox"
        earlier, goes_on, problem = self._calls, False, None
        stdin, timeout = instruction.encode(), wall_s + _BACKSTOP_S
        agent = asyncio.create_task(self._sandbox.exec(start.argv, stdin=stdin, env=start.env, timeout=timeout))
        try:
            await asyncio.wait({agent}, timeout=wall_s)
            timed_out = not agent.done()
            if not timed_out:
                exit_code = agent.result().exit_code
                problem = await self._tools.sessions.problem() if exit_code != 0 else None
                state = await self._drain(DRAIN_S if exit_code == 0 else LOST_S)
                goes_on = not last and went_well(exit_code, state, earlier)
                self._calls = state.calls
            if not goes_on:
                self._state = await self._tools.sessions.seal(self._lease.session_id)
                await self._sandbox.kill()
            self._results.append(await agent)
        finally:
            agent.cancel()
            await asyncio.wait({agent})
        if goes_on:
            return None
        return Ending(
            exit_code=self._results[-1].exit_code,
            timed_out=timed_out,
            proxy_lost=self._sandbox.proxy_lost,
            problem=problem,
            earlier_calls=earlier,
            state=self._state,
        )

    async def _until_served(self) -> None:
        """Wait while no engine serves what the lease asks for: one that was restarted has its first weights for a while.

        The agent's time does not run yet. The wait ends with the lease at the latest: a group that no engine can serve any
        more is disposed of, which the next heartbeat says.
        """
        oldest = self._lease.version or self._lease.oldest_version or 0
        said = False
        while (problem := await self._tools.sessions.problem(oldest_version=oldest)) is not None:
            if not said:
                _log.warning("attempt waits", session=self._lease.session_id, problem=problem)
            said = True
            await asyncio.sleep(_SERVED_POLL_S)

    async def _drain(self, seconds: float) -> SessionState:
        """Let the calls that the agent left behind end, so that the seal finds none in flight; what was last known of all."""
        deadline = time.monotonic() + seconds
        while True:
            state = await self._tools.sessions.read(self._lease.session_id)
            if not state.in_flight or time.monotonic() > deadline:
                return state
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _keep(self, verdict: Verdict) -> _Left:
        """Store the workspace of an attempt that will be scored, and the log of every attempt."""
        snapshot, left_out, failures = None, list[str](), list[str]()
        if verdict.scored and self._workspaces is not None:
            taken = await self._workspaces.finish()
            snapshot, left_out = await asyncio.to_thread(self._tools.blobs.put, "snapshots", taken.tar), taken.left_out
            failures = self._workspaces.failures
        secrets = [secret for secret in (self._key, self._lease.lease) if secret]
        text = logs.compose(verdict, self._results, failures, left_out, secrets)
        if left_out:
            verdict = replace(verdict, detail=f"{verdict.detail} {len(left_out)} left out of the snapshot".strip())
        return _Left(verdict, snapshot, await asyncio.to_thread(self._tools.blobs.put, "logs", text))

    async def _broken_off(self) -> _Left:
        await self._seal_in_time()
        return _Left(classify(Ending(stopped=self._stop.result() if self._stop.done() else "service")))

    async def _seal_in_time(self) -> None:
        """Seal where a session is open, so that a key that leaked is dead; the ledger seals again if this fails."""
        if self._key is None or self._state is not None:
            return
        try:
            async with asyncio.timeout(STOP_SEAL_S):
                self._state = await self._tools.sessions.seal(self._lease.session_id)
        except (EvenerError, TimeoutError) as error:
            _log.warning("session not sealed", session=self._lease.session_id, error=str(error))

    async def _destroy(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.destroy()
        elif self._folder is not None:
            await asyncio.to_thread(self._folder.remove)

    def _report(self, left: _Left, started: float) -> RolloutFinished:
        return RolloutFinished(
            rollout_id=self._lease.rollout_id,
            attempt=self._lease.attempt,
            lease=self._lease.lease,
            outcome=left.verdict.outcome,
            cause=left.verdict.cause,
            detail=left.verdict.detail,
            sealed=self._state.sealed if self._state else None,
            snapshot=left.snapshot,
            logs=left.logs,
            exit_code=self._results[-1].exit_code if self._results else None,
            sandbox=self._sandbox.kind if self._sandbox else "",
            harness_version=self._harness.version,
            started=started,
            ended=time.time(),
        )
