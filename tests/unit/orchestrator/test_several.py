"""Several orchestrators over one database: the work is shared, and nothing is planned, issued or published twice."""

import asyncio
from collections import Counter

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.exc import DBAPIError

from evener.messages import RunRollout, ScoreWorkspace, TrainGroup
from evener_orchestrator import planner
from evener_orchestrator.ledger import attempts, idle, runs
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.faults import is_down, is_victim
from evener_orchestrator.ledger.locks import lock_run
from evener_orchestrator.ledger.models import Attempt, Group, Outgoing, Rollout, Run
from evener_orchestrator.ledger.reissue import reissue
from evener_orchestrator.outbox import BATCH, send
from evener_orchestrator.states import RolloutState, RunState
from tests.unit.orchestrator.rows import NOW, a_claimed_run, a_group, a_rollout, a_run, a_task, an_attempt, write
from tests.unit.orchestrator.world import World, everyone, run_file


class SlowBus:
    """Counts what is published; each publication takes a while."""

    def __init__(self, refuse=()):
        self.said = Counter()
        self.refuse = refuse

    async def publish(self, message, *, priority=0):
        await asyncio.sleep(0.02)
        if message.rollout_id in self.refuse:
            raise ConnectionError(message.rollout_id)
        self.said[message.rollout_id] += 1


async def ask(ledger, statement):
    async with ledger.read() as session:
        return (await session.scalars(statement)).all()


async def fill_outbox(ledger, number):
    async def work(tx):
        for each in range(number):
            tx.send(RunRollout(run_id="r", rollout_id=f"o{each:03}", attempt=1))

    await ledger.write(work)


async def drain(ledger, bus):
    sent = 0
    while number := await send(ledger, bus):
        sent += number
    return sent


async def test_two_outboxes_publish_each_message_once(ledgers):
    await fill_outbox(ledgers[0], 3 * BATCH)
    bus = SlowBus()
    async with asyncio.timeout(60):
        shares = await asyncio.gather(*(drain(ledger, bus) for ledger in ledgers))
    assert set(bus.said.values()) == {1}
    assert len(bus.said) == sum(shares) == 3 * BATCH
    if not ledgers[0].sqlite:
        assert min(shares) >= BATCH  # both worked at the same time
    assert await ask(ledgers[0], select(Outgoing.id)) == []


async def test_a_refused_message_stays_and_holds_back_no_other(ledger):
    await fill_outbox(ledger, 3)
    with pytest.raises(ConnectionError, match="o001"):
        await send(ledger, SlowBus(refuse={"o001"}))
    bodies = await ask(ledger, select(Outgoing.body))
    assert len(bodies) == 1
    assert "o001" in bodies[0]


async def test_two_planners_plan_each_group_once(ledgers):
    async def submit(tx):
        tx.session.add(a_task())
        await tx.session.flush()
        return (await runs.submit(tx, a_submission()))[0].id

    run_id = await ledgers[0].write(submit)
    async with asyncio.timeout(60):
        await asyncio.gather(*(ledger.write(lambda tx: planner.advance(tx, run_id)) for ledger in ledgers * 4))
    assert sorted(await ask(ledgers[0], select(Group.number))) == [0, 1, 2, 3]
    assert len(await ask(ledgers[0], select(Attempt.id))) == len(await ask(ledgers[0], select(Outgoing.id))) == 4


async def test_a_planner_passes_by_a_run_that_another_is_planning(two_on_postgres):
    await write(two_on_postgres[0], [a_run("r", state=RunState.PAUSED)])
    inside, done = asyncio.Event(), asyncio.Event()

    async def slow(tx):
        await planner.advance(tx, "r")
        inside.set()
        await done.wait()

    async with asyncio.timeout(20):
        first = asyncio.create_task(two_on_postgres[0].write(slow))
        await inside.wait()
        await two_on_postgres[1].write(lambda tx: planner.advance(tx, "r"))  # would wait for the run's lock
        done.set()
        await first


async def test_a_command_is_issued_again_by_one_of_two(ledgers):
    rollouts = [f"o{number}" for number in range(40)]
    await write(
        ledgers[0],
        [a_run(), a_task()],
        [a_group("g")],
        [a_rollout(rollout, "g") for rollout in rollouts],
        [an_attempt(rollout) for rollout in rollouts],
    )
    async with asyncio.timeout(60):
        numbers = await asyncio.gather(*(ledger.write(lambda tx: reissue(tx, before=NOW)) for ledger in ledgers * 2))
    assert sum(numbers) == 40
    assert len(await ask(ledgers[0], select(Outgoing.id))) == 40


async def test_a_lapsed_lease_is_ended_by_one_of_two(ledgers):
    await write(ledgers[0], [a_task()])
    rollouts = [await a_claimed_run(ledgers[0], name=name) for name in ("r2", "r1")]
    async with asyncio.timeout(60):
        numbers = await asyncio.gather(*(ledger.write(attempts.expire) for ledger in ledgers * 2))
    assert sum(numbers) == sum(map(len, rollouts))
    assert set(await ask(ledgers[0], select(Rollout.state))) == {RolloutState.PLANNED}
    assert set(await ask(ledgers[0], select(Attempt.cause))) == {"lease_expired"}


async def test_a_heartbeat_that_came_first_keeps_the_lease(two_on_postgres):
    await write(two_on_postgres[0], [a_task()])
    rollouts = await a_claimed_run(two_on_postgres[0], groups=1)
    held, go = asyncio.Event(), asyncio.Event()

    async def speak(tx):
        await lock_run(tx, "r")
        held.set()
        await go.wait()
        later = func.now() + text("interval '1 hour'")
        await tx.session.execute(update(Attempt).where(Attempt.id == f"{rollouts[0]}.1").values(lease_expires_at=later))

    async with asyncio.timeout(20):
        speaking = asyncio.create_task(two_on_postgres[0].write(speak))
        await held.wait()
        expiring = asyncio.create_task(two_on_postgres[1].write(attempts.expire))
        await asyncio.sleep(0.3)  # it has read what lapsed, and waits for the run
        go.set()
        await speaking
        assert await expiring == 1


async def test_heartbeats_wait_for_no_other_change_of_the_run(two_on_postgres):
    await write(two_on_postgres[0], [a_task()])
    rollouts = await a_claimed_run(two_on_postgres[0], groups=1, lease="secret")
    held, go = asyncio.Event(), asyncio.Event()

    async def at_work(tx):
        await lock_run(tx, "r")
        held.set()
        await go.wait()

    def beat(lease):
        return lambda tx: attempts.heartbeat(tx, f"{rollouts[0]}.1", lease=lease, lease_s=3600)

    async with asyncio.timeout(20):
        working = asyncio.create_task(two_on_postgres[0].write(at_work))
        await held.wait()
        assert (await two_on_postgres[1].write(beat("secret"))).action == "continue"
        go.set()
        await working
        with pytest.raises(Conflict):
            await two_on_postgres[1].write(beat("another"))
        assert await two_on_postgres[0].write(attempts.expire) == 1


async def test_a_heartbeat_that_meets_the_end_of_its_lease_is_refused(two_on_postgres):
    await write(two_on_postgres[0], [a_task()])
    rollouts = await a_claimed_run(two_on_postgres[0], groups=1, lease="secret")
    ended, go = asyncio.Event(), asyncio.Event()

    async def expire(tx):
        number = await attempts.expire(tx)
        await tx.session.flush()
        ended.set()
        await go.wait()
        return number

    async with asyncio.timeout(20):
        expiring = asyncio.create_task(two_on_postgres[0].write(expire))
        await ended.wait()
        beat = two_on_postgres[1].write(lambda tx: attempts.heartbeat(tx, f"{rollouts[0]}.1", lease="secret", lease_s=3600))
        beating = asyncio.create_task(beat)
        await asyncio.sleep(0.3)  # it waits for the attempt
        go.set()
        assert await expiring == 2
        with pytest.raises(Conflict):
            await beating


async def test_an_idle_connection_that_died_is_replaced(two_on_postgres, monkeypatch):
    monkeypatch.setattr(idle, "IDLE_S", 0.0)
    here, there = two_on_postgres
    (pid,) = await ask(here, select(func.pg_backend_pid()))
    await there.write(lambda tx: tx.session.scalar(select(func.pg_terminate_backend(pid))))
    await asyncio.sleep(0.2)
    assert await ask(here, select(func.pg_backend_pid())) != [pid]


def a_submission(**changes):
    from evener.runfile import RunFile

    file = RunFile.model_validate(run_file())
    given = {"file": file, "tasks": ["sha256:a"], "eval_tasks": [], "weights": "sha256:w", "trusted": True, "new": False}
    return runs.Submission(**given | changes)


async def test_a_name_submitted_twice_at_once_is_one_run(ledgers):
    await write(ledgers[0], [a_task()])
    async with asyncio.timeout(60):
        done = await asyncio.gather(*(ledger.write(lambda tx: runs.submit(tx, a_submission())) for ledger in ledgers * 2))
    assert sorted(resumed for _, resumed in done) == [False, True, True, True]
    assert len({run.id for run, _ in done}) == len(await ask(ledgers[0], select(Run.id))) == 1


async def test_what_was_read_before_the_lock_is_read_again_under_it(two_on_postgres):
    await write(two_on_postgres[0], [a_run()])

    async def pause(tx):
        await runs.pause(tx, "r")

    async def look_then_lock(tx):
        before = (await tx.session.get_one(Run, "r")).state
        await two_on_postgres[1].write(pause)
        return before, (await lock_run(tx, "r")).state

    async with asyncio.timeout(20):
        assert await two_on_postgres[0].write(look_then_lock) == (RunState.RUNNING, RunState.PAUSED)


async def test_the_victim_of_a_deadlock_is_done_again(two_on_postgres):
    await write(two_on_postgres[0], [a_run("a"), a_run("b")])
    met, tries = asyncio.Barrier(2), Counter()

    async def both(tx, first, second):
        tries[first] += 1
        await lock_run(tx, first)
        if tries[first] == 1:
            await met.wait()
        (await lock_run(tx, second)).step += 1

    async with asyncio.timeout(30):
        await asyncio.gather(
            two_on_postgres[0].write(lambda tx: both(tx, "a", "b")), two_on_postgres[1].write(lambda tx: both(tx, "b", "a"))
        )
    assert sorted(tries.values()) == [1, 2]
    assert await ask(two_on_postgres[0], select(Run.step)) == [1, 1]


async def test_one_is_alone_at_what_takes_several_transactions(two_on_postgres):
    here, there = two_on_postgres
    async with asyncio.timeout(30):
        async with here.alone("x") as mine, there.alone("x") as theirs, there.alone("y") as other:
            assert (mine, theirs, other) == (True, False, True)
        async with there.alone("x") as theirs:
            assert theirs
        with pytest.raises(LookupError):
            async with here.alone("x"):
                raise LookupError
        with pytest.raises(DBAPIError):
            async with here.alone("x") as mine:
                await there.write(lambda tx: tx.session.execute(text(KILL_LOCKERS)))
        async with there.alone("x") as theirs:
            assert mine
            assert theirs


KILL_LOCKERS = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"


async def test_faults_of_the_database_are_told_apart(two_on_postgres):
    ledger, _ = two_on_postgres

    async def fault(sql):
        with pytest.raises(DBAPIError) as caught:
            await ledger.write(lambda tx: tx.session.execute(text(sql)))
        return is_victim(caught.value), is_down(caught.value)

    assert await fault("SELECT 1 / 0") == (False, False)
    assert await fault("SELECT pg_terminate_backend(pg_backend_pid())") == (False, True)
    raise_state = "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{}'; END $$"
    assert await fault(raise_state.format("40001")) == (True, False)
    assert await fault(raise_state.format("57P03")) == (False, True)


async def test_two_orchestrators_share_a_run(fresh_database_url, tmp_path):
    first = World(tmp_path / "one", database=fresh_database_url)
    second = World(tmp_path / "two", database=fresh_database_url)
    second.bus, second.trace, second.sessions, second.blobs = first.bus, first.trace, first.sessions, first.blobs
    second.scores, second.trained = first.scores, first.trained
    said: Counter[tuple[object, ...]] = Counter()
    publish = first.bus.publish

    async def count(message, *, priority=0):
        match message:
            case RunRollout() | ScoreWorkspace():
                said[type(message).__name__, message.rollout_id, message.attempt] += 1
            case TrainGroup():
                said["TrainGroup", message.group_id] += 1
            case _:
                pass
        await publish(message, priority=priority)

    first.bus.publish = count
    async with asyncio.timeout(120):
        await first.start()
        await second.start()
        document = run_file(eval={"tasks": "./held-out", "every": 1, "group_size": 2}, train={"steps": 3, "groups_per_step": 2})
        await first.submit(document)
        async with everyone(first):
            state = await second.until_over(timeout=90)
        await first.close()
        await second.close()
    assert state["state"] == "done"
    assert state["groups"]["train"]["trained"] == 6
    assert state["rollouts"]["done"] == state["rollouts"]["total"]
    assert said
    # a command may be repeated only by the learner's claim, which issues every closed group again
    repeated = {key for key, number in said.items() if number > 1}
    assert {kind for kind, *_ in repeated} <= {"TrainGroup"}
