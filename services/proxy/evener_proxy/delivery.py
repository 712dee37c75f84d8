"""The last bytes of a reply leave after its capture is committed; an agent that leaves ends its call.

The head of the response is held until the call has ended or the dialect's grace is over, so that a failure has its status
code. After that the agent gets 200 and what adds nothing to the reply (empty chunks, spaces before JSON) until the call ends; a
late failure is an event of the dialect in a stream, and a broken connection in a document. Raw ASGI: a plain endpoint would
not learn that its client has gone.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Generic

from evener.trace.store import Mark, OpenedSession, Sending
from evener_proxy.calls import Answered, Calls
from evener_proxy.canonical import CallError, Dialect, R
from evener_proxy.metrics import Metrics
from evener_proxy.sessions import Flight, Sessions, sealed_session

KEEP_ALIVE_S = 10.0
AWAITED_POLL_S = 0.25

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds before the response head must leave (None: as the dialect says), and between two keep-alives."""

    grace_s: float | None = None
    keep_alive_s: float = KEEP_ALIVE_S


class Delivery:
    """Runs calls for ASGI connections whose request body has been read."""

    def __init__(self, calls: Calls, sessions: Sessions, metrics: Metrics, patience: Patience) -> None:
        self._calls = calls
        self._sessions = sessions
        self._metrics = metrics
        self._patience = patience

    async def answer(
        self,
        session: OpenedSession,
        request: R,
        dialect: Dialect[R],
        sending: Sending,
        receive: Receive,
        send: Send,
    ) -> None:
        """Run one call and send what came of it. Raises CallError while the response head can still say so."""
        task = asyncio.current_task()
        assert task is not None, "ASGI applications run in tasks"
        await self._sessions.settle(session.spec.session_id, sending)
        flight = Flight(session.spec.session_id, sending.body, task)
        response = _Response(send, dialect, request, self._patience)
        watching = asyncio.create_task(_watch(receive, flight, self._sessions))
        self._sessions.enter(flight)
        self._metrics.in_flight += 1
        try:
            await self._run(session, request, dialect, sending, flight, response)
        finally:
            self._metrics.in_flight -= 1
            self._sessions.leave(flight)
            watching.cancel()
            response.stop()

    async def _run(
        self,
        session: OpenedSession,
        request: R,
        dialect: Dialect[R],
        sending: Sending,
        flight: Flight,
        response: "_Response[R]",
    ) -> None:
        response.hold()
        try:
            answered = await self._calls.run(session, request, dialect, sending, flight)
        except CallError as error:
            flight.over = True
            await response.fail(error)
            self._metrics.errors[error.code] += 1  # one whose head is held is counted where it is told
            return
        except asyncio.CancelledError:
            flight.over = True
            if flight.cut is None:
                raise
            flight.task.uncancel()
            if flight.cut == "sealed":
                await response.fail(sealed_session())
            return
        flight.over = True
        delivered = False
        try:
            if not flight.left():
                await response.finish(dialect.render(request, answered.reply), _mark_of(answered))
                delivered = not flight.left()
        finally:
            self._metrics.undelivered += not delivered
            if answered.number is not None:
                self._sessions.mark(Mark(session.spec.session_id, answered.number, "yes" if delivered else "no"))


class _Response(Generic[R]):
    """One HTTP response: a held head, keep-alives once it is late, and an end."""

    def __init__(self, send: Send, dialect: Dialect[R], request: R, patience: Patience) -> None:
        self._send = send
        self._dialect = dialect
        self._request = request
        self._framing = dialect.framing(request)
        self._grace_s = dialect.grace_s if patience.grace_s is None else patience.grace_s
        self._keep_alive_s = patience.keep_alive_s
        self._timer: asyncio.TimerHandle | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._started = False

    def hold(self) -> None:
        """Hold the head until the grace is over."""
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._late)

    def stop(self) -> None:
        """Send no further keep-alive."""
        if self._timer is not None:
            self._timer.cancel()
        if self._keeping is not None:
            self._keeping.cancel()

    async def finish(self, body: bytes, headers: Headers) -> None:
        """Send the reply's last bytes; ``headers`` too, while the head is held."""
        self.stop()
        if not self._started:
            length = (b"content-length", str(len(body)).encode())
            await self._send(_start(200, [*self._headers(), *headers, length]))
        await self._send(_chunk(body, more=False))

    async def fail(self, error: CallError) -> None:
        """End a late response with the error. Raises it while the head is held.

        A document's status can no longer say that it is an error, and SDKs take its envelope for a reply of nothing. So it is
        left unfinished after the envelope: the server closes the connection, and clients raise and ask again.
        """
        self.stop()
        if not self._started:
            raise error
        await self._send(_chunk(self._dialect.late_error(self._request, error), more=not self._request.stream))

    def _late(self) -> None:
        self._keeping = asyncio.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        self._started = True
        await self._send(_start(200, self._headers()))
        while True:
            kept = self._framing.keep_alive
            await self._send(_chunk(kept if isinstance(kept, bytes) else kept(self._request), more=True))
            self._request.kept += 1
            await asyncio.sleep(self._keep_alive_s)

    def _headers(self) -> Headers:
        headers = [(b"content-type", self._framing.content_type)]
        if self._request.stream:
            headers.append((b"cache-control", b"no-cache"))
        return headers


def _mark_of(answered: Answered) -> Headers:
    """A reply that is not the policy's says so."""
    return [(b"x-evener-budget", answered.spent.encode())] if answered.spent is not None else []


async def send_json(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """A response in one piece."""
    length = (b"content-length", str(len(body)).encode())
    await send(_start(status, [(b"content-type", b"application/json"), length, *(headers or ())]))
    await send(_chunk(body, more=False))


def _start(status: int, headers: Headers) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _chunk(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _watch(receive: Receive, flight: Flight, sessions: Sessions) -> None:
    """Wait for the client to leave. The body has been read, so that the next message is the disconnect.

    A call that its client has sent again already, and waits for, goes on: that sending takes its reply.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    flight.gone = True
    while await sessions.awaited(flight):  # noqa: ASYNC110 - another replica's word
        await asyncio.sleep(AWAITED_POLL_S)
    flight.cancel("left")
