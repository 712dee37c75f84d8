"""The way of one call: intent, reservation, engine, commit; what is returned is durable, and what fails leaves no call.

A failure of an engine is never the policy's reply: it is asked again inside, for up to `RETRY_S`, and then told as 503. A call
that does not end in a commit is released, whatever ends it, so that it holds no budget; but one that its agent abandons while
the engine samples it is one of the calls that were allowed, so that no agent has more samples by hanging up. A request that is
sent again because its reply did not arrive gets that reply (`evener.trace.resend`); a spent budget is a last reply of ours.
Called by the delivery.
"""

import asyncio
import time
from dataclasses import dataclass

import msgspec
import numpy as np
from redis.exceptions import RedisError

from evener import log
from evener.engines.sampler import EngineRefused, EngineStatus, EngineUnavailable, Sample, SampleRequest, neutral_request
from evener.engines.token_in import TokenInRoute, given
from evener.errors import InfraError
from evener.trace.session import BudgetSpent
from evener.trace.store import Intent, Mark, OpenedSession, Refused, Release, Sending, Stored
from evener_proxy import budget
from evener_proxy.budget import Spent
from evener_proxy.canonical import CallError, CallRequest, Dialect, R, Reply, mint_reply
from evener_proxy.capture import Asked, Call, to_commit
from evener_proxy.engines import Engine, Engines
from evener_proxy.faults import Fault, engine_fault, refusal, request_fault, uncaptured
from evener_proxy.metrics import Metrics
from evener_proxy.sessions import Flight, Sessions, unknown_key
from evener_proxy.token_in.prompts import Choice, Prompts
from evener_proxy.token_in.refusals import Refusal

RETRY_S = 60.0  # a restarted engine is back within a minute; agents wait longer than that for a reply
BUSY_S = 0.05
MARK_S = 2.0  # a mark is written 0.05 s after a reply is sent; one that takes longer is of a connection that hangs
_log = log.get("proxy")


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply for the agent. ``number``: of the committed call, None where the proxy itself ended the session's work because
    ``spent`` is.
    """

    number: int | None
    reply: Reply
    spent: BudgetSpent | None = None


class Calls:
    """Takes calls of any session; holds nothing between them."""

    def __init__(self, sessions: Sessions, engines: Engines, metrics: Metrics, *, retry_s: float = RETRY_S) -> None:
        self._sessions = sessions
        self._store = sessions.store
        self._engines = engines
        self._metrics = metrics
        self._retry_s = retry_s
        self._prompts = Prompts(sessions.store)

    async def run(self, session: OpenedSession, request: R, dialect: Dialect[R], sending: Sending, flight: Flight) -> Answered:
        """Sample and commit one call. Raises CallError. Cancelled before its commit, it leaves no call; later, it is whole."""
        spec = session.spec
        if spec.purpose == "train" and request.constrained is not None:
            raise CallError(
                400,
                "constrained_decoding",
                f"{request.constrained}: constrained decoding is refused in training sessions",
                param=request.constrained,
            )
        call = Call(flight.call_id, session, request, dialect.name, dialect.call_prefix, time.time(), sending)
        try:
            intent = await self._intent(call)
            if isinstance(intent, Stored):
                return await self._stored(call, intent.number)
            asked = await self._ask(call, intent)
            return await self._commit(call, intent, asked)
        except RedisError as error:
            _log.error("store_failed", session_id=spec.session_id, call_id=call.id, error=str(error))
            failed = uncaptured(str(error))
            await self._release(call, fault=failed)  # of a commit that did land there is nothing to release
            raise failed.error from error
        except Fault as fault:
            await self._release(call, fault=fault)
            raise fault.error from fault
        except Spent as spent:
            await self._release(call, spent=spent.budget)
            self._metrics.spent[spent.budget] += 1
            return Answered(None, budget.last_reply(spent.budget), spent.budget)
        except BaseException:
            if not call.settled:
                await self._release(call, abandoned=call.sampling and flight.left())
            raise

    async def count(self, session: OpenedSession, request: CallRequest) -> int:
        """The prompt's length in tokens, by the engine's own template and tokenizer; leaves no call.

        Raises CallError, 404 where the engine does not count: an estimate would be taken for the count.
        """
        spec = session.spec
        try:
            engine, status = await self._engines.pick(spec, attempt=0)
            tokens = await engine.sampler.tokenize(_to_sample(request, status.model, spec.sampling.temperature))
        except EngineUnavailable as error:
            raise engine_fault("engine_unavailable", str(error), busy=error.busy).error from error
        except InfraError as error:
            raise engine_fault(error.cause, error.detail).error from error
        except EngineRefused as error:
            message = error.message if error.told else "the inference engine refused the request"
            raise CallError(400, "invalid_request", message, param=error.param) from error
        if tokens is None:
            raise CallError(404, "not_counted", "the inference engine does not count tokens")
        return tokens

    def window(self, session: OpenedSession) -> int | None:
        """Tokens that prompt and completion of one call may have together; None where nothing says."""
        return budget.window_of(session.spec, self._engines.peek(session.spec))

    async def _stored(self, call: Call, number: int) -> Answered:
        """The reply that a committed call has left, for the client that has not got it."""
        reply = await self._store.reply(call.session.spec.session_id, number)
        if reply is None:
            raise unknown_key()
        self._metrics.replayed += 1
        return Answered(number, msgspec.convert(reply, Reply))

    async def _intent(self, call: Call) -> Intent | Stored:
        try:
            _, status = await self._pick(call)
        except EngineUnavailable:
            status = None  # the budget is asked first; the engine is asked for again, and waited for, after it
        window = budget.window_of(call.session.spec, status)
        asked = budget.to_reserve(call.session.spec, call.request, window)
        pause, began = BUSY_S, time.monotonic()
        sending = call.sending
        while True:
            try:
                return await self._store.intent(
                    call.session,
                    call.id,
                    replica=self._sessions.replica,
                    asked=asked,
                    digests=list(call.texts),
                    sending=sending,
                )
            except Refused as refused:
                if refused.reason != "busy":
                    raise refusal(refused) from refused
                sending = sending._replace(waited_for=refused.number, patience_over=time.monotonic() - began > MARK_S)
            await self._store.reap(call.session.spec.session_id)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _ask(self, call: Call, intent: Intent) -> Asked:
        """The engine's reply, asked for again while engines fail. Raises Fault."""
        deadline = time.monotonic() + self._retry_s
        pause = 0.25
        while True:
            try:
                return await self._ask_once(call, intent)
            except EngineUnavailable as error:
                call.sampling = False
                call.failures += 1
                self._metrics.engine_failures += 1
                _log.warning("engine_failed", call_id=call.id, session_id=call.session.spec.session_id, error=str(error))
                if time.monotonic() + pause > deadline:
                    raise engine_fault("engine_unavailable", str(error), busy=error.busy) from error
            except InfraError as error:
                raise engine_fault(error.cause, error.detail) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    async def _ask_once(self, call: Call, intent: Intent) -> Asked:
        spec = call.session.spec
        engine, status = await self._pick(call)
        try:
            choice = await self._choose(call, intent, engine, status) if spec.prompt_mode == "token_in" else None
            sample, body, choice = await self._sample(call, intent, engine, status, choice)
        except EngineRefused as error:
            raise request_fault(error) from error
        if sample.flaw is not None:
            self._metrics.flawed += 1
            _log.warning("flawed_reply", call_id=call.id, engine=engine.sampler.name, flaw=sample.flaw)
        elif spec.purpose == "train" and sample.level == "text":
            raise InfraError("engine_level", f"{engine.sampler.name} answered without token ids or log-probabilities")
        completed = await _completed_version(engine, sample, spec.version)
        _check_version(spec.version, sample, status, completed)
        used = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "max_tokens": body.max_tokens}
        return Asked(sample, engine, used | {"stop": body.stop}, status.version, completed, choice)

    async def _choose(self, call: Call, intent: Intent, engine: Engine, status: EngineStatus) -> Choice:
        return await self._prompts.choose(
            call.session.spec,
            call.request,
            call.tools_digest,
            intent.heads,
            route=TokenInRoute(engine.sampler, status.model),
            verdict=await engine.verdict(status.model),
            window=budget.window_of(call.session.spec, status),
        )

    async def _sample(
        self, call: Call, intent: Intent, engine: Engine, status: EngineStatus, choice: Choice | None
    ) -> tuple[Sample, SampleRequest, Choice | None]:
        """One trip to the engine, two where it refuses the ids; what was asked, and what the choice turned out to be.

        The messages go along with the ids, so that an engine that leaves the ids aside has answered the plain request.
        """
        spec, ids = call.session.spec, choice.ids if choice is not None else None
        body = _to_sample(call.request, status.model, spec.sampling.temperature)
        body.request_id = f"{call.id}-{call.failures}"
        body.kv_transfer_params = given(ids) if ids is not None else None
        body.max_tokens = await budget.output_limit(
            engine.sampler,
            body,
            grant=intent.grant,
            window=budget.window_of(spec, status),
            engine_window=status.window,
            prompt_tokens=len(ids) if ids is not None else None,
        )
        call.sampling = True
        try:
            sample = await engine.sampler.sample(body, spec.session_id)
        except EngineRefused as error:
            if choice is None or ids is None or error.context_full:
                raise
            return await self._sample(call, intent, engine, status, choice.refused(Refusal.NOT_TAKEN))
        if choice is not None and ids is not None and not np.array_equal(sample.prompt_ids, ids):
            choice = choice.refused(Refusal.NOT_ECHOED)
        return sample, body, choice

    async def _pick(self, call: Call) -> tuple[Engine, EngineStatus]:
        return await self._engines.pick(call.session.spec, attempt=call.failures)

    async def _commit(self, call: Call, intent: Intent, asked: Asked) -> Answered:
        reply = mint_reply(asked.sample, call.prefix)
        record, commit = to_commit(call, intent, asked, reply)
        writing = asyncio.ensure_future(self._store.commit(call.session.spec.session_id, commit))
        try:
            await asyncio.shield(writing)
        except Refused as refused:
            raise refusal(refused) from refused
        except asyncio.CancelledError:
            # The write is under way, and a write cannot be taken back. Whatever becomes of it is recorded when it ends; to
            # wait for that is for the next sending's sake, and may be cut short.
            call.settled = True
            writing.add_done_callback(lambda ended: self._alone(call, intent, ended))
            await asyncio.wait((writing,))
            raise
        call.settled = True
        if asked.choice is not None:
            self._prompts.add(call.session.spec.session_id, record)
        self._metrics.calls += 1
        self._metrics.hosted_tools += call.request.hosted_tools
        self._metrics.prompt_tokens += commit.prompt_tokens
        self._metrics.sampled_tokens += commit.sampled
        return Answered(intent.number, reply)

    def _alone(self, call: Call, intent: Intent, commit: "asyncio.Future[None]") -> None:
        """A commit has ended for which nobody waited any more."""
        error = None if commit.cancelled() else commit.exception()
        if error is None and not commit.cancelled():
            self._metrics.undelivered += 1
            self._sessions.mark(Mark(call.session.spec.session_id, intent.number, "no"))
        elif not isinstance(error, Refused):
            self._sessions.owe_release(Release(call.session.spec.session_id, call.id, call.sending.body))

    async def _release(
        self, call: Call, *, fault: Fault | None = None, spent: BudgetSpent | None = None, abandoned: bool = False
    ) -> None:
        """Give the reservation back. A failure here is not the agent's: it is tried again, and the seal ends what is left."""
        release = Release(
            call.session.spec.session_id,
            call.id,
            call.sending.body,
            failures=call.failures,
            fault=fault.cause if fault else "",
            error=fault.detail if fault else "",
            spent=spent,
            abandoned=abandoned,
        )
        try:
            await self._store.release(release)
        except RedisError as error:
            _log.error("release_failed", call_id=call.id, error=str(error))
            self._sessions.owe_release(release)


def _to_sample(request: CallRequest, model: str, temperature: float) -> SampleRequest:
    """What the engine is asked: the sampling is the session's, whatever the agent wished."""
    body = neutral_request(model, request.messages, temperature)
    body.tools = request.tools
    body.tool_choice = request.tool_choice
    body.parallel_tool_calls = request.parallel_tool_calls
    body.response_format = request.response_format
    body.stop = request.stop
    return body


async def _completed_version(engine: Engine, sample: Sample, pinned: int | None) -> int:
    """The version at completion: the last token's, else the engine's last status, asked for anew where it is pinned."""
    if sample.versions is not None and len(sample.versions):
        return int(sample.versions[-1])
    if pinned is not None:
        return (await engine.refresh()).version
    assert engine.status is not None, "an engine is picked with its status"
    return engine.status.version


def _check_version(pinned: int | None, sample: Sample, status: EngineStatus, completed: int) -> None:
    if pinned is None:
        return
    if sample.versions is not None:
        found = {int(version) for version in np.unique(sample.versions)}
    else:
        found = {status.version, completed}
    if found - {pinned}:
        raise InfraError("version_changed", f"the session is pinned to version {pinned}, the reply has {sorted(found)}")
