"""The way of one call: intent, reservation, engine, commit; what is returned is durable, and what fails leaves no call.

A failure of an engine is never the policy's reply: it is asked again inside, for up to `RETRY_S`, and then told as 503. A
call that does not end in a commit is released, whatever ends it, so that it holds no budget. A request that is sent again
because its reply did not arrive gets that reply (`evener.trace.resend`); a spent budget is a last reply of ours. Called by the
delivery.
"""

import asyncio
import hashlib
import time
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
from redis.exceptions import RedisError

from evener import log
from evener.engines.sampler import EngineRefused, EngineStatus, EngineUnavailable, Sample, SampleRequest, neutral_request
from evener.errors import InfraError
from evener.ids import new_id
from evener.trace.prefix import Head, find_base, find_messages_base, message_digests, prefix_digests
from evener.trace.record import NO_BASE, CallRecord, Ids, encode
from evener.trace.session import BudgetSpent
from evener.trace.store import Commit, Intent, Mark, OpenedSession, Refused, Sending, Stored
from evener_proxy import budget
from evener_proxy.budget import Spent
from evener_proxy.canonical import CallError, CallRequest, Dialect, R, Reply, mint_reply
from evener_proxy.engines import Engine, Engines
from evener_proxy.faults import Fault, engine_fault, refusal, request_fault, uncaptured
from evener_proxy.metrics import Metrics
from evener_proxy.sessions import Sessions, unknown_key

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


@dataclass(slots=True)
class _Asked:
    """A sample and where it came from."""

    sample: Sample
    engine: Engine
    used: dict[str, Any]
    dispatched: int
    completed: int


class Calls:
    """Takes calls of any session; holds nothing between them."""

    def __init__(self, sessions: Sessions, engines: Engines, metrics: Metrics, *, retry_s: float = RETRY_S) -> None:
        self._sessions = sessions
        self._store = sessions.store
        self._engines = engines
        self._metrics = metrics
        self._retry_s = retry_s

    async def run(self, session: OpenedSession, request: R, dialect: Dialect[R], sending: Sending) -> Answered:
        """Sample and commit one call. Raises CallError. Cancelled before its commit, it leaves no call; later, it is whole."""
        spec = session.spec
        if spec.purpose == "train" and request.constrained is not None:
            raise CallError(
                400,
                "constrained_decoding",
                f"{request.constrained}: constrained decoding is refused in training sessions",
                param=request.constrained,
            )
        call = _Call(new_id(), session, request, dialect.name, dialect.call_prefix, time.time(), sending)
        try:
            intent = await self._intent(call)
            if isinstance(intent, Stored):
                return await self._stored(call, intent.number)
            asked = await self._ask(call, intent)
            return await self._commit(call, intent, asked)
        except RedisError as error:
            _log.error("store_failed", session_id=spec.session_id, call_id=call.id, error=str(error))
            await self._release(call)  # of a commit that did land there is nothing to release
            raise uncaptured() from error
        except Fault as fault:
            await self._release(call, fault=fault)
            raise fault.error from fault
        except Spent as spent:
            await self._release(call, spent=spent.budget)
            self._metrics.spent[spent.budget] += 1
            return Answered(None, budget.last_reply(spent.budget), spent.budget)
        except BaseException:
            if not call.settled:
                await self._release(call)
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
            raise engine_fault("engine_unavailable", str(error)).error from error
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

    async def _stored(self, call: "_Call", number: int) -> Answered:
        """The reply that a committed call has left, for the client that has not got it."""
        reply = await self._store.reply(call.session.spec.session_id, number)
        if reply is None:
            raise unknown_key()
        self._metrics.replayed += 1
        return Answered(number, msgspec.convert(reply, Reply))

    async def _intent(self, call: "_Call") -> Intent | Stored:
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

    async def _ask(self, call: "_Call", intent: Intent) -> _Asked:
        """The engine's reply, asked for again while engines fail. Raises Fault."""
        deadline = time.monotonic() + self._retry_s
        pause = 0.25
        while True:
            try:
                return await self._ask_once(call, intent)
            except EngineUnavailable as error:
                call.failures += 1
                self._metrics.engine_failures += 1
                _log.warning("engine_failed", call_id=call.id, session_id=call.session.spec.session_id, error=str(error))
                if time.monotonic() + pause > deadline:
                    raise engine_fault("engine_unavailable", str(error)) from error
            except InfraError as error:
                raise engine_fault(error.cause, error.detail) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    async def _ask_once(self, call: "_Call", intent: Intent) -> _Asked:
        spec, request = call.session.spec, call.request
        engine, status = await self._pick(call)
        body = _to_sample(request, status.model, spec.sampling.temperature)
        body.request_id = f"{call.id}-{call.failures}"
        try:
            body.max_tokens = await budget.output_limit(
                engine.sampler,
                body,
                grant=intent.grant,
                window=budget.window_of(spec, status),
                engine_window=status.window,
            )
            sample = await engine.sampler.sample(body, spec.session_id)
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
        return _Asked(sample, engine, used | {"stop": request.stop}, status.version, completed)

    async def _pick(self, call: "_Call") -> tuple[Engine, EngineStatus]:
        return await self._engines.pick(call.session.spec, attempt=call.failures)

    async def _commit(self, call: "_Call", intent: Intent, asked: _Asked) -> Answered:
        reply = mint_reply(asked.sample, call.prefix)
        commit = _to_commit(call, intent, asked, reply)
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
        self._metrics.calls += 1
        self._metrics.hosted_tools += call.request.hosted_tools
        self._metrics.prompt_tokens += commit.prompt_tokens
        self._metrics.sampled_tokens += commit.sampled
        return Answered(intent.number, reply)

    def _alone(self, call: "_Call", intent: Intent, commit: "asyncio.Future[None]") -> None:
        """A commit has ended for which nobody waited any more."""
        error = None if commit.cancelled() else commit.exception()
        if error is None and not commit.cancelled():
            self._metrics.undelivered += 1
            self._sessions.mark(Mark(call.session.spec.session_id, intent.number, "no"))
        elif not isinstance(error, Refused):
            self._sessions.owe_release(call.session.spec.session_id, call.id, call.sending.body)

    async def _release(self, call: "_Call", *, fault: Fault | None = None, spent: BudgetSpent | None = None) -> None:
        """Give the reservation back. A failure here is not the agent's: it is tried again, and the seal ends what is left."""
        try:
            await self._store.release(
                call.session.spec.session_id,
                call.id,
                call.sending.body,
                failures=call.failures,
                fault=fault.cause if fault else "",
                error=fault.detail if fault else "",
                spent=spent,
            )
        except RedisError as error:
            _log.error("release_failed", call_id=call.id, error=str(error))
            self._sessions.owe_release(call.session.spec.session_id, call.id, call.sending.body)


class _Call:
    """What is known of a call before it is sampled. ``texts``: its system texts and tool list by digest. ``settled``: it was
    committed, or what becomes of its commit is seen to.
    """

    def __init__(
        self,
        call_id: str,
        session: OpenedSession,
        request: CallRequest,
        dialect: str,
        prefix: str,
        started: float,
        sending: Sending,
    ) -> None:
        self.id = call_id
        self.session = session
        self.request = request
        self.dialect = dialect
        self.prefix = prefix
        self.started = started
        self.sending = sending
        self.failures = 0
        self.settled = False
        self.system_digests = [_digest(message) for message in request.messages[: request.systems]]
        self.tools_digest = _digest(request.tools) if request.tools is not None else None
        self.texts = dict(zip(self.system_digests, request.messages, strict=False))
        if self.tools_digest is not None and request.tools is not None:
            self.texts[self.tools_digest] = request.tools


def _to_sample(request: CallRequest, model: str, temperature: float) -> SampleRequest:
    """What the engine is asked: the sampling is the session's, whatever the agent wished."""
    body = neutral_request(model, request.messages, temperature)
    body.tools = request.tools
    body.tool_choice = request.tool_choice
    body.parallel_tool_calls = request.parallel_tool_calls
    body.response_format = request.response_format
    body.stop = request.stop
    return body


def _to_commit(call: _Call, intent: Intent, asked: _Asked, reply: Reply) -> Commit:
    sample, request = asked.sample, call.request
    views = [memoryview(message) for message in request.messages]
    counts = message_digests(views, [len(views), *(head.messages for head in intent.heads)])
    kept = find_messages_base(intent.heads, counts)
    prompt, total = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.completion_ids)
    lengths = [prompt, total, *(length for head in intent.heads for length in (head.prompt, head.total) if length <= prompt)]
    digests = prefix_digests(np.concatenate((sample.prompt_ids, sample.completion_ids)), lengths)
    record = CallRecord(
        call_id=call.id,
        session_id=call.session.spec.session_id,
        number=intent.number,
        prompt_ids=sample.prompt_ids,
        completion_ids=sample.completion_ids,
        logprobs=sample.logprobs,
        versions=_versions(asked),
        version_dispatch=asked.dispatched,
        version_completion=asked.completed,
        request={
            "system_digests": call.system_digests,
            "tools_digest": call.tools_digest,
            "messages": request.messages[max(request.systems, kept.shared) :],
            "messages_base": kept.number,
            "messages_kept": kept.shared,
            "asked": request.asked,
            "used": asked.used,
            **({"flaw": sample.flaw} if sample.flaw is not None else {}),
        },
        reply=cast("dict[str, Any]", msgspec.to_builtins(reply)),
        dialect=call.dialect,
        started=call.started,
        ended=time.time(),
        delivered="unknown",
        level=sample.level,
        engine=asked.engine.sampler.name,
    )
    return Commit(
        call_id=call.id,
        number=intent.number,
        record=encode(record, find_base(intent.heads, digests) if prompt else NO_BASE),
        head=Head(
            intent.number, prompt, total, len(views), digests.get(prompt, b""), digests.get(total, b""), counts[len(views)]
        ),
        sampled=sample.completion_tokens,
        prompt_tokens=sample.prompt_tokens,
        failures=call.failures,
        texts={
            digest: bytes(text) for (digest, text), known in zip(call.texts.items(), intent.known, strict=True) if not known
        },
    )


def _versions(asked: _Asked) -> Ids:
    """Per token; the version at dispatch, the oldest that it can be, where the engine does not say."""
    if asked.sample.versions is not None:
        return asked.sample.versions
    return np.full(len(asked.sample.completion_ids), asked.dispatched, np.int32)


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


def _digest(text: msgspec.Raw) -> str:
    return hashlib.sha256(memoryview(text)).hexdigest()
