"""No session, no answer; and a sealed session's calls end within a second, on whichever replica they are.

Holds the calls in flight of this replica, the lease that proves it alive, and a bounded cache of session specs by key hash
(they never change). Whether a session is still open is not cached: every call's intent asks.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from redis.exceptions import RedisError

from evener import log
from evener.ids import new_id
from evener.messages import Sealed
from evener.trace.session import SessionSpec
from evener.trace.store import Mark, OpenedSession, Release, Sending, TraceStore
from evener_proxy.canonical import CallError

BEAT_S = 1.0
LEASE_S = 15.0  # a replica that is silent for this long is dead; a busy machine stalls an event loop for seconds
MARKS_S = 0.05
AWAITED_ANSWER_S = 0.5
_CACHED = 4096
_log = log.get("proxy")


@dataclass(slots=True, eq=False)
class Flight:
    """A call in flight: the digest of its request, the task that serves it, whether its client has ``gone``, and why it was
    cut. Once ``over``, what is left is sending.
    """

    session_id: str
    digest: bytes
    task: "asyncio.Task[None]"
    call_id: str = field(default_factory=new_id)
    gone: bool = False
    cut: Literal["left", "sealed"] | None = None
    over: bool = False

    def left(self) -> bool:
        """Whether the client has gone, by now."""
        return self.gone or self.cut == "left"

    def cancel(self, cut: Literal["left", "sealed"]) -> None:
        """Abort the call, once."""
        if self.cut is None:
            self.cut = cut
            if not self.over:
                self.task.cancel()


class Sessions:
    """The sessions that this replica serves."""

    def __init__(self, store: TraceStore) -> None:
        self.store = store
        self.replica = new_id()
        self._flights: dict[str, set[Flight]] = {}  # by session: no call looks at those of other sessions
        self._specs: dict[str, OpenedSession] = {}
        self._marks: list[Mark] = []
        self._owed: set[Release] = set()
        self.problem: str | None = None  # why the store takes nothing, since the last beat
        self._all_told = 0.0  # when each replica has told what failed in the last outage
        self._marked = asyncio.Event()

    async def open(self, spec: SessionSpec) -> str:
        """Make a session and return its key, which is never stored. Raises SessionExists."""
        key = "sk-evener-" + secrets.token_urlsafe(32)
        await self.store.open(spec, hash_key(key))
        return key

    async def find(self, keys: Sequence[str]) -> OpenedSession:
        """The session of the first key that has one; it may have been sealed or deleted since. Raises CallError 401."""
        if not keys:
            raise CallError(401, "invalid_api_key", "no API key was given")
        for key in keys:
            hashed = hash_key(key)
            session = self._specs.get(hashed) or await self._load(hashed)
            if session is not None:
                return session
        raise unknown_key()

    async def find_open(self, keys: Sequence[str]) -> OpenedSession:
        """Like `find`, for what makes no call, whose intent would ask. Raises CallError 401 and 403."""
        session = await self.find(keys)
        state = await self.store.state(session.spec.session_id)
        if state is None:
            raise unknown_key()
        if state != "open":
            raise sealed_session()
        return session

    async def _load(self, hashed: str) -> OpenedSession | None:
        session = await self.store.by_key(hashed)
        if session is not None:
            if len(self._specs) >= _CACHED:
                del self._specs[next(iter(self._specs))]
            self._specs[hashed] = session
        return session

    async def seal(self, session_id: str) -> Sealed | None:
        """Close a session, and abort what this replica holds of it at once.

        Raises RedisError, also for a moment after an outage: another replica may still have to tell which calls failed.
        """
        if self.problem is not None or time.monotonic() < self._all_told:
            raise RedisError(f"the store was away a moment ago: {self.problem or 'replicas tell what failed meanwhile'}")
        await self._flush()
        await self._release_owed(session_id)  # what an agent ended over is known before its attempt is judged
        sealed = await self.store.seal(session_id)
        self._cut({session_id})
        return sealed

    def enter(self, flight: Flight) -> None:
        """A call begins."""
        self._flights.setdefault(flight.session_id, set()).add(flight)

    def leave(self, flight: Flight) -> None:
        """A call has ended."""
        others = self._flights[flight.session_id]
        others.discard(flight)
        if not others:
            del self._flights[flight.session_id]

    async def awaited(self, flight: Flight) -> bool:
        """Whether a retry, at whichever replica, waits for the reply of a call whose own client has gone.

        It does not where the store is silent: what nobody may want is aborted within a second.
        """
        if flight.over:
            return False
        try:
            async with asyncio.timeout(AWAITED_ANSWER_S):
                return await self.store.awaited(flight.session_id, flight.call_id)
        except (RedisError, TimeoutError):
            return False

    async def settle(self, session_id: str, sending: Sending) -> None:
        """See to its end what this replica knows of earlier sendings of a request, before the store decides on the next.

        Those whose clients have left end first; what is owed is released, so that a failure is not told after a later success;
        and the marks are written that the next sending is decided by.
        """
        left = [
            flight.task
            for flight in self._flights.get(session_id, ())
            if flight.cut == "left" and flight.digest == sending.body
        ]
        if left:
            await asyncio.wait(left)
        if self._owed:
            await self._release_owed(session_id)
        if any(mark.session_id == session_id and (sending.again or mark.delivered == "no") for mark in self._marks):
            await self._flush()

    def mark(self, mark: Mark) -> None:
        """Note a delivery; it is written within `MARKS_S`, and before a seal by this replica."""
        self._marks.append(mark._replace(since=time.monotonic()))
        self._marked.set()

    def owe_release(self, release: Release) -> None:
        """A call could not be released: while this replica lives it would hold its budget, so that it is tried again."""
        self._owed.add(release)

    async def watch(self) -> None:
        """Prolong the lease, release what is owed and abort the calls of sessions that are no longer open, for ever."""
        while True:
            try:
                ended = await self.store.beat(self.replica, lease_s=LEASE_S, sessions=set(self._flights))
                self._cut(ended)
                await self._release_owed()
                if self.problem is not None:
                    self.problem, self._all_told = None, time.monotonic() + 2 * BEAT_S
            except RedisError as error:
                self.problem = str(error)
                _log.error("beat_failed", error=str(error))
            await asyncio.sleep(BEAT_S)

    async def _release_owed(self, session_id: str | None = None) -> None:
        """Release what is owed (of one session)."""
        for owed in tuple(self._owed):
            if session_id in (None, owed.session_id):
                await self.store.release(owed)
                self._owed.discard(owed)

    async def hear_seals(self) -> None:
        """Abort the calls of sessions that another replica seals, at once, for ever; `watch` finds what is missed here."""
        while True:
            try:
                async for session_id in self.store.sealed():
                    self._cut({session_id})
            except (RedisError, OSError) as error:
                _log.warning("seals_unheard", error=str(error))
            await asyncio.sleep(BEAT_S)

    async def flush_marks(self) -> None:
        """Write marks together, for ever."""
        while True:
            await self._marked.wait()
            await asyncio.sleep(MARKS_S)
            try:
                await self._flush()
            except RedisError as error:
                _log.error("marks_failed", error=str(error))
                await asyncio.sleep(BEAT_S)

    async def end(self) -> None:
        """Write what is left, when no call is in flight any more."""
        try:
            await self._flush()
        except RedisError as error:
            _log.error("marks_failed", error=str(error))

    async def _flush(self) -> None:
        marks, self._marks = self._marks, []
        self._marked.clear()
        try:
            if marks:
                await self.store.mark(marks)
        except RedisError:
            self._marks = marks + self._marks
            self._marked.set()
            raise

    def _cut(self, sessions: set[str]) -> None:
        for session_id in sessions:
            for flight in tuple(self._flights.get(session_id, ())):
                flight.cancel("sealed")


def hash_key(key: str) -> str:
    """SHA-256 of a key, as it is stored. Keys are 256 random bits: no salt is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def unknown_key() -> CallError:
    """No session has this key."""
    return CallError(401, "invalid_api_key", "unknown API key")


def sealed_session() -> CallError:
    """The session takes no further call."""
    return CallError(403, "session_sealed", "this session is closed; no further call is answered")
