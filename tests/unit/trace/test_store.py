"""The store against a model of it: guarded, idempotent writes in any order of events."""

import asyncio

import fakeredis
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from evener.api.types import Budget
from evener.ids import new_id
from evener.trace.prefix import HEADS_KEPT, Head
from evener.trace.record import encode
from evener.trace.session import SessionSpec
from evener.trace.store import Commit, Mark, OpenedSession, Refused, Release, Sending, SessionExists, TraceStore
from tests.unit.trace.test_record import make

SESSION = "s.1"


def spec(**budget) -> SessionSpec:
    return SessionSpec(
        session_id=SESSION,
        rollout_id="s",
        attempt=1,
        harness="pi",
        policy="tiny",
        purpose="train",
        budget=Budget(**({"calls": 1000, "sampled_tokens": 100_000} | budget)),
    )


def commit_of(call_id: str, number: int, *, sampled: int = 5, texts: dict[str, bytes] | None = None) -> Commit:
    record = encode(make(number, np.array([1, 2, 3]), np.arange(sampled), call_id=call_id))
    head = Head(number, 3, 3 + sampled, 1, b"p" * 16, b"t" * 16, b"m" * 16)
    return Commit(call_id, number, record, head, sampled, 3, 0, texts or {})


async def opened(store: TraceStore, **budget) -> OpenedSession:
    await store.open(spec(**budget), "hash")
    session = await store.by_key("hash")
    assert session is not None
    return session


async def intent(store: TraceStore, session: OpenedSession, call_id: str, *, asked: int = 10, replica: str = "alive"):
    return await store.intent(session, call_id, replica=replica, asked=asked, digests=["d"], sending=Sending(call_id.encode()))


@pytest.fixture
async def store() -> TraceStore:
    store = TraceStore(fakeredis.FakeAsyncRedis())
    await store.beat("alive", lease_s=60, sessions=())
    return store


async def test_open_is_idempotent_for_its_key_only(store):
    session = await opened(store)
    await store.open(session.spec, "hash")
    with pytest.raises(SessionExists):
        await store.open(session.spec, "other")
    assert await store.by_key("other") is None


async def test_a_repeated_intent_and_commit_change_nothing(store):
    session = await opened(store)
    first = await intent(store, session, "a")
    assert await intent(store, session, "a") == first
    for _ in range(3):
        await store.commit(SESSION, commit_of("a", 1))
    state = await store.read(SESSION)
    assert (state.calls, state.sampled_tokens, state.in_flight) == (1, 5, 0)
    assert [record.call_id for record in await store.load(SESSION)] == ["a"]


async def test_texts_are_kept_once_and_heads_are_bounded(store):
    session = await opened(store)
    for number in range(1, 40):
        found = await intent(store, session, f"c{number}")
        assert found.known == [number > 1]
        assert len(found.heads) == min(number - 1, HEADS_KEPT)
        await store.commit(SESSION, commit_of(f"c{number}", number, texts={} if number > 1 else {"d": b"tools"}))
    assert await store.texts(SESSION, ["d", "e"]) == {"d": b"tools"}
    assert await store.texts(SESSION, []) == {}
    assert found.heads[-1].number == 38


async def test_a_released_call_gives_its_reservation_back_and_cannot_commit(store):
    session = await opened(store, sampled_tokens=10)
    await intent(store, session, "a")
    with pytest.raises(Refused, match="busy"):
        await intent(store, session, "b")
    await store.release(Release(SESSION, "a", b"a", fault="engine_error", error="boom", failures=2))
    with pytest.raises(Refused, match="released"):
        await store.commit(SESSION, commit_of("a", 1))
    state = await store.read(SESSION)
    assert (state.fault, state.last_error, state.engine_failures) == ("engine_error", "boom", 2)
    assert (await intent(store, session, "b")).grant == 10
    await store.commit(SESSION, commit_of("b", 2))
    assert (await store.read(SESSION)).fault is None


async def test_a_dead_replicas_calls_hold_no_budget_and_are_lost(store):
    session = await opened(store, sampled_tokens=10)
    await intent(store, session, "a", replica="dead")
    with pytest.raises(Refused, match="busy"):
        await intent(store, session, "b")
    await store.reap(SESSION)
    await intent(store, session, "b", asked=4)
    await intent(store, session, "c", asked=4, replica="dead")
    sealed = await store.seal(SESSION)
    assert (sealed.committed, sealed.aborted, sealed.lost) == (0, 1, 2)


async def test_sealed_and_deleted_sessions_refuse_late_words(store):
    session = await opened(store)
    await intent(store, session, "a")
    await store.mark([Mark(SESSION, 1, "no")])
    sealed = await store.seal(SESSION)
    assert (sealed.aborted, sealed.undelivered) == (1, 1)
    assert await store.beat("alive", lease_s=60, sessions=[SESSION]) == {SESSION}
    await store.mark([Mark(SESSION, 2, "no")])
    assert await store.seal(SESSION) == sealed
    for expected in ("sealed", "gone"):
        with pytest.raises(Refused, match=expected):
            await store.commit(SESSION, commit_of("a", 1))
        with pytest.raises(Refused, match=expected):
            await intent(store, session, "b")
        await store.release(Release(SESSION, "a", b"a"))
        await store.delete(SESSION)
    assert await store.read(SESSION) is None
    assert await store.seal(SESSION) is None
    assert await store.load(SESSION) == []
    with pytest.raises(SessionExists):
        await store.open(session.spec, "hash")


async def test_fenced_a_session_that_was_given_up_is_not_opened_any_more(store):
    """Its runner hung before it opened it, and goes on when the ledger has made another attempt."""
    await store.delete(SESSION)
    with pytest.raises(SessionExists):
        await opened(store)
    assert await store.read(SESSION) is None
    await store.delete(SESSION)


async def test_every_key_expires():
    redis = fakeredis.FakeAsyncRedis()
    store = TraceStore(redis)
    session = await opened(store)
    await store.beat("alive", lease_s=60, sessions=())
    await intent(store, session, "a")
    await store.commit(SESSION, commit_of("a", 1, texts={"d": b"x"}))
    assert all([await redis.ttl(key) > 0 for key in await redis.keys("*")])
    await store.delete(SESSION)
    assert all([await redis.ttl(key) > 0 for key in await redis.keys("*")])


async def test_scripts_come_back_after_redis_forgot_them():
    redis = fakeredis.FakeAsyncRedis()
    store = TraceStore(redis)
    session = await opened(store)
    await intent(store, session, "a")
    await redis.script_flush()
    results = await asyncio.gather(*(intent(store, session, f"c{n}") for n in range(50)))
    assert sorted(found.number for found in results) == list(range(2, 52))


class StoreMachine(RuleBasedStateMachine):
    """Calls of two replicas, one of them dead from the start, until the session is sealed."""

    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.store = TraceStore(fakeredis.FakeAsyncRedis())
        self.session = self.run(opened(self.store, sampled_tokens=60, calls=9))
        self.run(self.store.beat("alive", lease_s=600, sessions=()))
        self.flying: dict[str, tuple[int, int, str]] = {}
        self.committed: dict[str, int] = {}
        self.aborted = 0
        self.abandoned = 0
        self.number = 0

    def run(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    def teardown(self) -> None:
        dead = sum(replica == "dead" for _, _, replica in self.flying.values())
        sealed = self.run(self.store.seal(SESSION))
        assert sealed.committed == len(self.committed)
        assert sealed.lost == dead
        assert sealed.aborted == self.aborted + len(self.flying) - dead
        self.loop.close()

    @rule(target=calls, asked=st.integers(1, 30), replica=st.sampled_from(["alive", "dead"]))
    def begin(self, asked, replica):
        call_id = new_id()
        reserved = sum(grant for _, grant, _ in self.flying.values())
        unspent = 60 - sum(self.committed.values())
        left = unspent - reserved
        made = len(self.flying) + len(self.committed) + self.abandoned
        allowed = left > 0 and left >= min(asked, unspent) and made < 9
        try:
            found = self.run(intent(self.store, self.session, call_id, asked=asked, replica=replica))
        except Refused as refused:
            assert not allowed
            if refused.reason == "busy":
                assert self.flying
            return call_id
        assert allowed
        self.number += 1
        assert found.number == self.number
        assert found.grant == min(asked, unspent)
        self.flying[call_id] = (found.number, found.grant, replica)
        return call_id

    @rule(call_id=calls, data=st.data())
    def commit(self, call_id, data):
        if call_id in self.flying:
            number, grant, _ = self.flying.pop(call_id)
            sampled = data.draw(st.integers(1, grant))
            self.run(self.store.commit(SESSION, commit_of(call_id, number, sampled=sampled)))
            self.committed[call_id] = sampled
        elif call_id not in self.committed:
            with pytest.raises(Refused, match="released"):
                self.run(self.store.commit(SESSION, commit_of(call_id, 999)))

    @rule(call_id=consumes(calls), abandoned=st.booleans())
    def release(self, call_id, abandoned):
        for _ in range(2):  # an answer may have been lost
            self.run(self.store.release(Release(SESSION, call_id, call_id.encode(), abandoned=abandoned)))
        if self.flying.pop(call_id, None) is not None:
            self.aborted += 1
            self.abandoned += abandoned

    @invariant()
    def counts(self):
        state = self.run(self.store.read(SESSION))
        assert state.calls == len(self.committed)
        assert state.in_flight == len(self.flying)
        assert state.sampled_tokens == sum(self.committed.values()) <= 60


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=25, stateful_step_count=25)
