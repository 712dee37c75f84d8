"""A captured call is in Redis whole, once, or not at all; the proxy alone writes, others read.

Every write is one guarded script (`evener.trace.lua`), so that any replica may serve any call, a repeated write changes
nothing, and a sealed or deleted session refuses late words. Keys are stored as SHA-256. Works on Redis and on fakeredis.
"""

import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec
from redis.asyncio import Redis

from evener.messages import Sealed
from evener.trace import lua
from evener.trace.lane import Lane
from evener.trace.prefix import HEADS_BYTES, Head, pack_head, unpack_heads
from evener.trace.record import CallRecord, Delivered, decode_all, decode_reply
from evener.trace.session import BudgetSpent, SessionSpec, SessionState

KEEP_S = 24 * 3600  # after its wall budget an unfetched session, and after its deletion a tombstone, lives this long

Refusal = Literal["gone", "sealed", "lost", "released", "busy", "calls", "tokens", "wall"]
_spec = msgspec.msgpack.Decoder(SessionSpec)


class Refused(Exception):
    """The session does not take this word: it is gone or sealed, the call was released, or a budget is spent.

    ``lost``: the server is not the one that the session was opened on, or has been restarted since, and may have lost calls.
    ``busy``: calls in flight hold the rest of a budget, or call ``number`` has to end, or to be marked, before it can be said
    whether this is its body sent again (`evener.trace.resend`); ask again soon.
    """

    def __init__(self, reason: Refusal, number: int = 0) -> None:
        self.reason: Refusal = reason
        self.number = number
        super().__init__(reason)


class SessionExists(Exception):
    """The session was opened before."""


class OpenedSession(NamedTuple):
    """A session and when it was opened (Unix seconds)."""

    spec: SessionSpec
    opened: float


class Intent(NamedTuple):
    """A call that may go ahead: its number, the sampled tokens reserved for it, earlier heads, and whether texts are kept."""

    number: int
    grant: int
    heads: list[Head]
    known: list[bool]


class Stored(NamedTuple):
    """The call that has answered this body already, while the agent has not got its reply."""

    number: int


class Commit(NamedTuple):
    """A whole call to store. ``texts``: system texts and tool lists by digest, those not yet kept."""

    call_id: str
    number: int
    record: bytes
    head: Head
    sampled: int
    prompt_tokens: int
    failures: int
    texts: Mapping[str, bytes]


class Mark(NamedTuple):
    """Whether the agent was seen to take the reply of a call, and since when (``time.monotonic()``; None: now)."""

    session_id: str
    number: int
    delivered: Literal["yes", "no"]
    since: float | None = None


class Release(NamedTuple):
    """A call that ends without a reply, after ``failures`` of engines, with a ``fault`` and ``error`` that its session keeps,
    or because a budget is ``spent``. ``body``: the digest of its request. ``abandoned``: its agent left while the engine
    sampled it, so that it is one of the calls that the session may make.
    """

    session_id: str
    call_id: str
    body: bytes
    failures: int = 0
    fault: str = ""
    error: str = ""
    spent: BudgetSpent | None = None
    abandoned: bool = False


class Sending(NamedTuple):
    """One sending of a request: a digest of its ``body``, and whether the client says that it sends it ``again``.

    ``waited_for``: the call that an earlier intent of this sending was refused for as ``busy``, 0 for none; ``patience_over``:
    a mark has been waited for long enough.
    """

    body: bytes
    again: bool = False
    waited_for: int = 0
    patience_over: bool = False


class TraceStore:
    """Sessions and captures in ``redis`` (made with ``decode_responses=False``)."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._lane = Lane(redis)

    async def open(self, spec: SessionSpec, key_hash: str) -> None:
        """Make a session. Raises SessionExists, also where it was deleted."""
        args = (
            spec.session_id,
            key_hash,
            msgspec.msgpack.encode(spec),
            repr(time.time()),
            int(spec.budget.wall_s) + KEEP_S,
        )
        if await self._lane.run(lua.OPEN, [_key(spec.session_id), lua.KEY_PREFIX + key_hash], args) != b"ok":
            raise SessionExists(spec.session_id)

    async def by_key(self, key_hash: str) -> OpenedSession | None:
        """The session of a key, whatever its state; None where there is none."""
        found = await self._lane.run(lua.BY_KEY, [lua.KEY_PREFIX + key_hash], ())
        return OpenedSession(_spec.decode(found[0]), float(found[1])) if found else None

    async def state(self, session_id: str) -> Literal["open", "sealed"] | None:
        """None where there is no such session, or it was deleted."""
        state = cast("bytes | None", await cast("Any", self._redis.hget(_key(session_id), "state")))
        return cast("Literal['open', 'sealed']", state.decode()) if state in (b"open", b"sealed") else None

    async def intent(
        self,
        session: OpenedSession,
        call_id: str,
        *,
        replica: str,
        asked: int,
        digests: Sequence[str],
        sending: Sending,
    ) -> Intent | Stored:
        """Number a call and reserve up to ``asked`` sampled tokens for it, before it is dispatched. Raises Refused.

        `evener.trace.resend` says when a sending takes the reply of an earlier call instead.
        """
        spec = session.spec
        wall_spent = time.time() - session.opened >= spec.budget.wall_s
        budget = (spec.budget.calls, spec.budget.sampled_tokens, int(wall_spent))
        sent = (sending.body, int(sending.again), sending.waited_for, int(sending.patience_over))
        args = (call_id, replica, asked, *budget, *sent, *digests)
        answer = await self._lane.run(lua.INTENT, [_key(spec.session_id)], args)
        if answer[0] == b"stored":
            return Stored(int(answer[1]))
        if answer[0] != b"ok":
            raise Refused(cast("Refusal", answer[0].decode()), *map(int, answer[1:]))
        _, number, grant, heads, known = answer
        return Intent(int(number), int(grant), unpack_heads(heads), [flag == ord("1") for flag in known])

    async def commit(self, session_id: str, commit: Commit) -> None:
        """Store a call that has an intent. Raises Refused; a repeated commit is no error."""
        args: list[Any] = [
            commit.call_id,
            commit.number,
            commit.record,
            pack_head(commit.head),
            commit.sampled,
            commit.prompt_tokens,
            commit.failures,
            HEADS_BYTES,
        ]
        for digest, text in commit.texts.items():
            args += (digest, text)
        answer = await self._lane.run(lua.COMMIT, [_key(session_id)], args)
        if answer != b"ok":
            raise Refused(cast("Refusal", answer.decode()))

    async def release(self, release: Release) -> None:
        """End a call whose client got no reply, and give its reservation back. A session that is not open changes nothing.

        Where the call was committed all the same, or had taken a stored reply, that reply is marked as missed.
        """
        session_id, call_id, body, failures, fault, error, spent, abandoned = release
        args = (call_id, failures, fault, error, spent or "", body, int(abandoned))
        await self._lane.run(lua.RELEASE, [_key(session_id)], args)

    async def awaited(self, session_id: str, call_id: str) -> bool:
        """Whether a retry waits for the reply of a call in flight."""
        return bool(await self._lane.run(lua.AWAITED, [_key(session_id)], (call_id,)))

    async def mark(self, marks: Sequence[Mark]) -> None:
        """Note what was delivered; sessions that are not open change nothing."""
        now = time.monotonic()
        args: list[Any] = []
        for mark in marks:
            args += (mark.number, mark.delivered, 0 if mark.since is None else round((now - mark.since) * 1e6))
        await self._lane.run(lua.MARK, [_key(mark.session_id) for mark in marks], args)

    async def beat(self, replica: str, *, lease_s: float, sessions: Iterable[str]) -> set[str]:
        """Prolong the lease of a replica's calls; returns those of ``sessions`` that are no longer open."""
        asked = list(sessions)
        keys = [lua.REPLICA_PREFIX + replica, *map(_key, asked)]
        states = await self._lane.run(lua.BEAT, keys, (int(lease_s * 1000),))
        return {session for session, state in zip(asked, states, strict=True) if state != b"open"}

    async def read(self, session_id: str) -> SessionState | None:
        """The state of a session; None where there is none, or it was deleted."""
        names = ("committed", "sampled", "flight", "prompt_max", "failures", "aborted", "lost", "undelivered")
        texts = ("state", "spent", "fault", "error")
        values = cast("list[bytes | None]", await cast("Any", self._redis.hmget(_key(session_id), [*names, *texts])))
        count = {name: int(value or 0) for name, value in zip(names, values, strict=False)}
        text = {name: value.decode() if value else None for name, value in zip(texts, values[len(names) :], strict=True)}
        if text["state"] in (None, "deleted"):
            return None
        sealed = Sealed(
            committed=count["committed"],
            aborted=count["aborted"],
            lost=count["lost"],
            undelivered=count["undelivered"],
        )
        return SessionState(
            state=cast("Literal['open', 'sealed']", text["state"]),
            calls=count["committed"],
            sampled_tokens=count["sampled"],
            in_flight=count["flight"],
            prompt_tokens_max=count["prompt_max"],
            engine_failures=count["failures"],
            budget_spent=cast("BudgetSpent | None", text["spent"]),
            fault=text["fault"],
            last_error=text["error"],
            sealed=sealed if text["state"] == "sealed" else None,
        )

    async def reap(self, session_id: str) -> None:
        """End the calls of dead replicas in an open session: they are ``lost`` and hold no budget."""
        await self._lane.run(lua.REAP, [_key(session_id)], ())

    async def seal(self, session_id: str) -> Sealed | None:
        """Close a session for good; the same answer when repeated. None where there is none, or it was deleted.

        A call in flight is ``aborted`` where its replica is alive, else ``lost``; intents = committed + aborted + lost.
        """
        numbers = await self._lane.run(lua.SEAL, [_key(session_id)], ())
        if not numbers:
            return None
        committed, aborted, lost, undelivered = map(int, numbers)
        return Sealed(committed=committed, aborted=aborted, lost=lost, undelivered=undelivered)

    async def delete(self, session_id: str) -> None:
        """Forget a session but for a tombstone, which one that was never opened gets as well."""
        await self._lane.run(lua.DELETE, [_key(session_id)], (KEEP_S,))

    async def load(self, session_id: str) -> list[CallRecord]:
        """The committed calls in order of number; empty where there is no such session."""
        stored: dict[int, bytes] = {}
        delivered: dict[int, Delivered] = {}
        fields = cast("dict[bytes, bytes]", await cast("Any", self._redis.hgetall(_key(session_id))))
        for field, value in fields.items():
            kind, _, name = field.partition(b":")
            if kind == b"record":
                stored[int(name)] = value
            elif kind == b"mark":
                delivered[int(name)] = cast("Delivered", value.split(b" ")[0].decode())
        return decode_all(stored, delivered)

    async def reply(self, session_id: str, number: int) -> dict[str, Any] | None:
        """The canonical reply of a committed call; None where it is gone."""
        record = cast("bytes | None", await cast("Any", self._redis.hget(_key(session_id), f"record:{number}")))
        return decode_reply(record) if record is not None else None

    async def sealed(self) -> AsyncIterator[str]:
        """The sessions that are sealed from now on, by any replica. Raises RedisError where the connection is lost."""
        listener = self._redis.pubsub(ignore_subscribe_messages=True)
        try:
            await listener.subscribe(lua.SEALED_CHANNEL)
            async for message in listener.listen():
                yield message["data"].decode()
        finally:
            await listener.aclose()

    async def texts(self, session_id: str, digests: Collection[str]) -> dict[str, bytes]:
        """Those of the system texts and tool lists that are there, by digest (64 hex digits)."""
        if not digests:
            return {}
        fields = [f"text:{digest}" for digest in digests]
        values = cast("list[bytes | None]", await cast("Any", self._redis.hmget(_key(session_id), fields)))
        return {digest: value for digest, value in zip(digests, values, strict=True) if value is not None}


def _key(session_id: str) -> str:
    return lua.SESSION_PREFIX + session_id
