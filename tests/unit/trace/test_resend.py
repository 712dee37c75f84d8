"""The table of `evener.trace.resend`, row by row: which call a sending of a body is."""

import asyncio
import time

import fakeredis
import pytest

from evener.trace import lane, resend
from evener.trace.store import Intent, Mark, OpenedSession, Refused, Release, Sending, Stored, TraceStore
from tests.unit.trace.test_store import SESSION, commit_of, opened


class Session:
    """One session and two replicas, ``here`` and ``there``; a third, ``dead``, has no lease."""

    def __init__(self, store: TraceStore, session: OpenedSession) -> None:
        self.store = store
        self.session = session
        self.asked = 0

    async def send(self, body="B", *, again=False, at="here", waited_for=0, patience_over=False) -> Intent | Stored:
        self.asked += 1
        sending = Sending(body.encode(), again, waited_for, patience_over)
        return await self.store.intent(self.session, f"c{self.asked}", replica=at, asked=5, digests=[], sending=sending)

    async def begin(self, body="B", **sending) -> tuple[str, int]:
        """A sending that is a new call: its id and number."""
        found = await self.send(body, **sending)
        assert isinstance(found, Intent)
        return f"c{self.asked}", found.number

    async def answered(self, body="B", mark=None, *, ago=0.0, **sending) -> int:
        """A committed call, marked so long ago (None: not marked)."""
        call, number = await self.begin(body, **sending)
        await self.store.commit(SESSION, commit_of(call, number))
        if mark is not None:
            await self.store.mark([Mark(SESSION, number, mark, time.monotonic() - ago)])
        return number

    async def taken(self, **sending) -> int:
        found = await self.send(**sending)
        assert isinstance(found, Stored)
        return found.number

    async def waits_for(self, **sending) -> int:
        with pytest.raises(Refused, match="busy") as refused:
            await self.send(**sending)
        return refused.value.number


@pytest.fixture
async def session() -> Session:
    store = TraceStore(fakeredis.FakeAsyncRedis())
    found = await opened(store)
    for replica in ("here", "there"):
        await store.beat(replica, lease_s=60, sessions=())
    return Session(store, found)


@pytest.mark.parametrize("again", [False, True])
async def test_a_missed_reply_is_taken_once(session, again):
    first = await session.answered(mark="no", at="there")
    assert await session.taken(again=again) == first
    await session.begin()  # while that reply is on its way again
    assert [record.delivered for record in await session.store.load(SESSION)] == ["unknown"]


@pytest.mark.parametrize("again", [False, True])
async def test_the_reply_of_a_dead_replica_is_taken(session, again):
    assert await session.answered(at="dead") == await session.taken(again=again)


async def test_a_retry_gets_the_newer_reply_and_never_the_older(session):
    await session.answered(mark="yes")
    second, number = await session.begin()
    assert await session.waits_for(again=True) == number
    await session.store.commit(SESSION, commit_of(second, number))
    assert await session.waits_for(again=True) == number, "it is being sent"
    await session.store.mark([Mark(SESSION, number, "no")])
    assert await session.taken(again=True) == number


async def test_an_old_delivered_reply_is_nobodys(session):
    await session.answered(mark="yes", ago=resend.AGAIN_S + 1)
    await session.begin(again=True)


async def test_a_delivered_reply_that_the_agent_went_on_from_is_nobodys(session):
    await session.answered(mark="yes")
    await session.answered("C", mark="yes")
    await session.begin(again=True)


async def test_a_retry_at_once_after_a_delivered_reply_gets_it(session):
    await session.begin("parallel")
    first = await session.answered(mark="yes")
    assert await session.taken(again=True, at="there") == first


async def test_a_retry_that_waited_gets_that_call_whatever_else_began_meanwhile(session):
    call, number = await session.begin(at="there")
    assert await session.waits_for(again=True) == number
    await session.store.commit(SESSION, commit_of(call, number))
    await session.store.mark([Mark(SESSION, number, "yes")])
    await session.begin("parallel")
    assert await session.taken(again=True, waited_for=number) == number


async def test_the_same_body_beside_or_after_a_connected_client_is_a_new_sample(session):
    numbers = [(await session.begin())[1] for _ in range(3)]
    assert numbers == [1, 2, 3]
    await session.answered(mark="yes")
    assert (await session.begin())[1] == 5


async def test_of_two_clients_with_one_body_the_one_that_left_gets_what_it_missed(session):
    first = await session.answered()
    _, second = await session.begin()
    await session.store.mark([Mark(SESSION, first, "no")])
    assert await session.taken(again=True) == first
    await session.store.mark([Mark(SESSION, first, "yes")])
    assert await session.waits_for(again=True) == second, "from here on only the other can be meant"


async def test_the_retry_of_an_ended_call_is_a_new_sample_beside_a_connected_client(session):
    first, _ = await session.begin()
    _, second = await session.begin()
    await session.store.release(Release(SESSION, first, b"B"))
    _, third = await session.begin(again=True)
    assert third == second + 1
    assert await session.waits_for(again=True) == third, "the ended call is used up"


async def test_an_ended_call_is_forgotten_in_time(session, monkeypatch):
    call, _ = await session.begin()
    await session.store.release(Release(SESSION, call, b"B"))
    _, second = await session.begin()
    await session.store._redis.hset(f"evener:session:{SESSION}", "mark:1", b"ended 1")
    assert await session.waits_for(again=True) == second


async def test_a_call_lost_with_its_replica_is_a_new_sample(session):
    _, number = await session.begin(at="dead")
    assert await session.waits_for(again=True) == number
    await session.store.reap(SESSION)
    await session.begin(again=True)


async def test_another_replicas_mark_is_waited_for_and_ones_own_client_is_connected(session):
    number = await session.answered(at="there")
    assert await session.waits_for() == number
    await session.begin(at="there")
    await session.store.mark([Mark(SESSION, number, "yes")])
    await session.begin()


async def test_a_connection_that_hangs_is_waited_for_so_long_only(session):
    number = await session.answered(at="there")
    assert await session.taken(again=True, waited_for=number, patience_over=True) == number
    number = await session.answered("C", at="there")
    await session.begin("C", waited_for=number, patience_over=True)


async def test_a_reply_that_was_taken_and_not_delivered_is_missed_again(session):
    first = await session.answered(mark="no")
    assert await session.taken() == first
    await session.store.release(Release(SESSION, f"c{session.asked}", b"B"))  # its client left before the reply was read
    assert await session.taken(at="there") == first


async def test_a_call_whose_commit_landed_unseen_is_missed(session):
    number = await session.answered()
    await session.store.release(Release(SESSION, "c1", b"B"))
    assert await session.taken() == number
    assert (await session.store.read(SESSION)).calls == 1


async def test_a_repeated_intent_takes_the_same_call(session):
    first = await session.answered(mark="no")
    for _ in range(2):
        session.asked = 1
        assert await session.taken() == first


async def test_only_so_many_calls_of_a_body_are_kept(session):
    for _ in range(3 * resend.KEPT):
        await session.begin()
    kept = await session.store._redis.hget(f"evener:session:{SESSION}", "body:B")
    assert kept.count(b"\n") == resend.KEPT


async def test_a_session_of_another_server_takes_no_call_and_its_fault_is_ours(monkeypatch):
    server = "one"

    async def named(_):
        return server

    monkeypatch.setattr(lane, "_server_of", named)
    redis = fakeredis.FakeAsyncRedis()
    store = TraceStore(redis)
    session = Session(store, await opened(store))
    call, number = await session.begin()
    await session.answered("C", mark="yes")
    server = "two"
    session.store = TraceStore(redis)
    for refused in (session.send("D"), session.store.commit(SESSION, commit_of(call, number))):
        with pytest.raises(Refused, match="lost"):
            await refused
    assert await session.store.beat("here", lease_s=60, sessions=[SESSION]) == {SESSION}
    state = await session.store.read(SESSION)
    assert (state.state, state.fault, state.budget_spent) == ("open", "session_lost", None)
    await session.store.seal(SESSION)
    assert (await session.store.read(SESSION)).fault == "session_lost"


async def test_a_seal_on_another_server_says_so_too(monkeypatch):
    names = iter(("one", "two"))

    async def named(_):
        return next(names)

    monkeypatch.setattr(lane, "_server_of", named)
    redis = fakeredis.FakeAsyncRedis()
    await opened(TraceStore(redis))
    other = TraceStore(redis)
    await asyncio.wait_for(other.seal(SESSION), 5)
    assert (await other.read(SESSION)).fault == "session_lost"
