"""A call goes to the engine that has its session's prefix cached, or to the next one that answers.

Each engine is asked for its status every second, so that a call knows the policy version at its dispatch and completion
without a trip of its own. Used by the calls and by ``/readyz``.
"""

import asyncio
import hashlib
from typing import TYPE_CHECKING

from evener import log
from evener.engines.sampler import EngineRefused, EngineStatus, EngineUnavailable, Sampler
from evener.engines.token_in import TokenInRoute
from evener.errors import InfraError
from evener.trace.session import SessionSpec
from evener_proxy.token_in import soundness
from evener_proxy.token_in.soundness import Verdict

if TYPE_CHECKING:
    from evener.trace.record import Level

POLL_S = 1.0
PROBE_S = 60.0
TEXT_POLL_S = 30.0  # what gives no tokens has no versions to follow, and may count our requests
_log = log.get("proxy")


class Engine:
    """One engine and what it said last. ``problem`` is None while it answers."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.status: EngineStatus | None = None
        self.level: Level | None = None
        self.problem: str | None = "not asked yet"
        self._verdict: Verdict | None = None
        self._judging = asyncio.Lock()

    def unfit(self, spec: SessionSpec) -> int:
        """0: fit; 1: serves another version than the pinned one, or too old a one; 2: does not answer."""
        if self.problem is not None or self.status is None:
            return 2
        return int(not _serves(spec, self.status.version))

    async def refresh(self) -> EngineStatus:
        """Ask for the status now. Raises EngineUnavailable, EngineRefused or InfraError."""
        try:
            self.status = await self.sampler.status()
        except (EngineUnavailable, EngineRefused, InfraError) as error:
            self.problem = str(error)
            self._verdict = None  # when it is back it may serve another policy
            raise
        self.problem = None
        return self.status

    async def verdict(self, model: str) -> Verdict:
        """Whether the policy's prompts may be given as ids; found out when it is first asked for. Raises EngineUnavailable."""
        async with self._judging:
            if self._verdict is None:
                self._verdict = await self._judge(model)
                _log.info("template", url=self.sampler.name, problem=self._verdict.problem, skeleton=self._verdict.skeleton)
            return self._verdict

    async def _judge(self, model: str) -> Verdict:
        try:
            level = self.level or await self.sampler.probe(model)
        except (EngineRefused, InfraError) as error:
            return Verdict(f"the engine answers no prompt: {error}")
        if level == "text":
            return Verdict("the engine gives no token ids")
        return await soundness.check(TokenInRoute(self.sampler, model))

    async def watch(self) -> None:
        """Refresh for ever; probe the capture level once an engine answers."""
        while True:
            try:
                status = await self.refresh()
                if self.level is None:
                    async with asyncio.timeout(PROBE_S):
                        self.level = await self.sampler.probe(status.model)
                    _log.info("engine", url=self.sampler.name, model=status.model, level=self.level)
            except (EngineUnavailable, EngineRefused, InfraError, TimeoutError) as error:
                _log.debug("engine_status", url=self.sampler.name, problem=str(error))
            await asyncio.sleep(TEXT_POLL_S if self.level == "text" and self.problem is None else POLL_S)


class Engines:
    """The engines of one policy."""

    def __init__(self, samplers: list[Sampler]) -> None:
        self.all = [Engine(sampler) for sampler in samplers]

    async def pick(self, spec: SessionSpec, *, attempt: int) -> tuple[Engine, EngineStatus]:
        """The session's own engine for attempt 0, others for later ones (rendezvous hashing: an engine that comes or goes moves
        only the sessions that are its own).

        Engines that do not answer come last, and before them those that serve another version than the session's. A training
        session gets none whose version is too old: that is an engine which was restarted and has its first weights, until it
        is given the policy's. Raises EngineUnavailable.
        """
        engine = self._ranked(spec)[attempt % len(self.all)]
        status = engine.status
        if status is None or (spec.oldest_version is not None and status.version < spec.oldest_version):
            try:
                status = await engine.refresh()
            except (EngineRefused, InfraError) as error:
                raise EngineUnavailable(str(error)) from error
        if spec.oldest_version is not None and status.version < spec.oldest_version:
            old = f"{engine.sampler.name} serves version {status.version}, older than {spec.oldest_version}"
            raise EngineUnavailable(f"{old}: it waits for the policy's weights")
        return engine, status

    def peek(self, spec: SessionSpec) -> EngineStatus | None:
        """What the session's own engine said last."""
        return self._ranked(spec)[0].status

    def _ranked(self, spec: SessionSpec) -> list[Engine]:
        if len(self.all) == 1:
            return self.all
        return sorted(self.all, key=lambda engine: (engine.unfit(spec), _weight(spec.session_id, engine)))

    async def prompt_problem(self) -> str | None:
        """Why prompts cannot be given as ids by every engine that answers; None where they can. Raises EngineUnavailable."""
        answering = [engine for engine in self.all if engine.problem is None]
        if not answering:
            raise EngineUnavailable("no engine answers")
        for engine in answering:
            assert engine.status is not None, "an engine that answers has said what it serves"
            problem = (await engine.verdict(engine.status.model)).problem
            if problem is not None:
                return f"{engine.sampler.name}: {problem}"
        return None

    def problems(self, oldest: int = 0) -> list[str]:
        """What keeps the engines from serving version ``oldest`` or a later one; empty while at least one does.

        What gives no tokens has no versions, and serves any.
        """
        found: list[str] = []
        for engine in self.all:
            problem, status = engine.problem, engine.status
            if problem is None and engine.level != "text" and status is not None and status.version < oldest:
                problem = f"serves version {status.version}, older than {oldest}: it waits for the policy's weights"
            if problem is None:
                return []
            found.append(f"engine {engine.sampler.name}: {problem}")
        return found


def _serves(spec: SessionSpec, version: int) -> bool:
    if spec.version is not None:
        return version == spec.version
    return spec.oldest_version is None or version >= spec.oldest_version


def _weight(session_id: str, engine: Engine) -> bytes:
    return hashlib.blake2b(f"{session_id} {engine.sampler.name}".encode(), digest_size=8).digest()
