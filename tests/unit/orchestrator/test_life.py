"""The whole life of a run, with scripted workers over the real API and bus."""

import asyncio
import sqlite3

import pytest

from evener.errors import InfraError
from evener.messages import train_queue
from evener_orchestrator import queues
from evener_orchestrator.loops import drain_outbox, drain_sessions, drop_queues
from tests.unit.orchestrator.world import FakeSessions, Workers, World, alternating, everyone, run_file, runner, verifier

EVAL = {"tasks": "./held-out", "every": 0, "group_size": 2}


def rows(world, sql):
    with sqlite3.connect(world.settings.data / "ledger.db") as database:
        return database.execute(sql).fetchall()


@pytest.mark.parametrize("repeat", [1, 2])
async def test_a_training_run_with_evaluations_ends_done(world, repeat):
    world.finish = lambda _, event: [event] * repeat
    world.scored = lambda event: [event] * repeat
    submitted = await world.submit(run_file(eval=EVAL | {"every": 1}, train={"steps": 3, "groups_per_step": 2}))
    assert submitted == {"run_id": submitted["run_id"], "resumed": False, "state": "running", "policy": "first-run"}
    async with everyone(world, repeat=repeat):
        state = await world.until_over()
    assert state["state"] == "done", state
    assert (state["step"], state["version"]) == (3, 4)
    assert state["groups"]["train"]["trained"] == 6
    assert len(world.trained) == len(set(world.trained)) == 6
    # complete: every planned rollout has exactly one outcome
    assert state["rollouts"]["done"] == state["rollouts"]["total"] == sum(state["rollouts"]["outcomes"].values())
    evals = {(cell["version"], cell["n"], cell["pass1"]) for cell in state["pass1"] if cell["purpose"] == "eval"}
    assert evals == {(1, 4, 0.5), (2, 4, 0.5), (3, 4, 0.5), (4, 4, 0.5)}
    assert rows(world, "SELECT count(*) FROM outbox") == [(0,)]
    await drain_sessions(world.context)
    assert rows(world, "SELECT count(*) FROM attempts WHERE ended_at IS NULL OR released_at IS NULL") == [(0,)]
    assert world.trace.calls == {}  # the proxy forgot every session


async def test_a_session_that_cannot_be_deleted_holds_back_no_other(world, monkeypatch):
    await world.submit()
    async with everyone(world):
        await world.until_over()
    names = [name for (name,) in rows(world, "SELECT id FROM attempts WHERE released_at IS NULL ORDER BY id")]
    assert len(names) > 1
    delete = FakeSessions.delete

    async def refuses(sessions, session_id):
        if session_id == names[0]:
            raise InfraError("proxy_refused", "503: the store is full")
        await delete(sessions, session_id)

    monkeypatch.setattr(FakeSessions, "delete", refuses)
    with pytest.raises(InfraError, match="full"):
        await drain_sessions(world.context)
    assert rows(world, "SELECT id FROM attempts WHERE released_at IS NULL") == [(names[0],)]
    monkeypatch.undo()
    await drain_sessions(world.context)
    assert rows(world, "SELECT id FROM attempts WHERE released_at IS NULL") == []


async def test_the_queue_of_a_policy_goes_when_its_run_is_over(world, monkeypatch):
    run = (await world.submit())["run_id"]
    queue = train_queue("first-run")
    async with Workers(lambda: runner(world), lambda: verifier(world)):
        await world.until(lambda state: state["groups"]["train"]["closed"] >= 2)
    monkeypatch.setattr(queues, "IDLE_S", 0.0)
    lease = await world.api.claim_policy("first-run", learner="l")
    await drain_outbox(world.context)
    await drop_queues(world.context)
    assert await world.bus.depth(queue) >= 2
    await world.api.post(f"/v1/runs/{run}/cancel")
    await drop_queues(world.context)
    assert await world.bus.depth(queue) >= 2  # the learner may still be at it
    await world.api.release_policy("first-run", epoch=lease.epoch, step=0)
    await drop_queues(world.context)
    assert queue not in world.bus._queues
    assert rows(world, "SELECT count(*) FROM runs WHERE queue_deleted_at IS NULL") == [(0,)]


async def test_evaluations_hold_the_version_and_training_waits(world):
    await world.submit(run_file(eval=EVAL))
    async with Workers(lambda: runner(world)):
        state = await world.until(lambda state: state["rollouts"]["scoring"] == 4)
    assert state["phase"] == "eval"
    assert state["rollouts"]["total"] == 4  # no training group is planned before the evaluation is over
    lease = await world.api.claim_policy("first-run", learner="l")
    assert (await world.api.allot_version("first-run", epoch=lease.epoch, step=1)).wait_s == 0.5
    async with Workers(lambda: verifier(world)):
        await world.until(lambda state: state["phase"] == "train" and state["rollouts"]["total"] > 4)
    assert (await world.api.allot_version("first-run", epoch=lease.epoch, step=1)).version == 2


async def test_an_evaluation_run_ends_without_a_learner(world):
    document = run_file(harness=[{"name": "pi"}, {"name": "codex"}])
    del document["train"]
    await world.submit(document)
    async with Workers(lambda: runner(world), lambda: verifier(world)):
        state = await world.until_over()
    assert state["state"] == "done"
    assert state["groups"]["eval"]["closed"] == 6
    assert {lease.version for lease in world.leases} == {1}


async def test_a_run_goes_on_after_the_orchestrator_restarts(world):
    await world.submit(run_file(eval=EVAL, train={"steps": 6, "groups_per_step": 2, "max_staleness": 1}))
    for step in (1, 3):
        async with everyone(world):
            await world.until(lambda state, step=step: state["step"] >= step)
        await world.restart()  # with a bus that has forgotten everything
    async with everyone(world):
        state = await world.until_over()
    assert state["state"] == "done"
    assert state["rollouts"]["done"] == state["rollouts"]["total"]
    assert state["groups"]["train"]["trained"] == 12


async def test_the_steps_after_the_checkpoint_are_trained_again(world):
    await world.submit()
    async with everyone(world, checkpoints=False, dies_after=1):
        await world.until(lambda state: (state["step"], state["version"], state["rollouts"]["done"]) == (1, 2, 8))
    first = set(world.trained)
    await world.api.release_policy("first-run", epoch=1, step=0)
    lease = await world.api.claim_policy("first-run", learner="l2")
    assert (lease.epoch, lease.step, lease.version, lease.checkpoint) == (2, 0, 1, None)
    state = await world.api.get("/v1/runs/latest")
    assert (state["step"], state["groups"]["train"]["trained"]) == (0, 0)
    await world.api.release_policy("first-run", epoch=2, step=0)
    world.engine_version = 1
    async with everyone(world, name="l3"):
        state = await world.until_over()
    assert state["state"] == "done"
    assert state["groups"]["train"]["trained"] == 4
    assert first <= set(world.trained[2:])  # sampled at version 1, which lives on
    assert rows(world, "SELECT learner, epoch FROM runs") == [("l3", 3)]
    assert rows(world, "SELECT version FROM policies WHERE state = 'lost'") == [(2,)]
    assert rows(world, "SELECT count(*) FROM groups WHERE reason = 'lost_version' AND state = 'trained'") == [(0,)]


async def test_a_policy_that_solves_everything_is_trained_and_goes_on_to_its_evaluation(world):
    varied = alternating()
    world.score = lambda lease: 1.0 if world.engine_version > 1 else varied(lease)
    await world.submit(run_file(train={"steps": 9, "groups_per_step": 2, "max_staleness": 0}, eval=EVAL))
    async with everyone(world):
        state = await world.until_over()
    assert state["state"] == "done"
    assert state["reason"] == f"every rollout of the last 16 groups was right: training ended at step {state['step']} of 9"
    assert 1 <= state["step"] == state["steps"] < 9
    assert state["groups"]["train"]["skipped"] >= 16
    evaluated = rows(world, "SELECT DISTINCT version FROM groups WHERE purpose = 'eval' ORDER BY version")
    assert evaluated == [(1,), (state["step"] + 1,)]


@pytest.mark.parametrize(("failed_groups", "reason"), [(1, "every rollout of the last 16"), (99, "in each of the last 32")])
async def test_training_goes_on_while_a_task_is_failed_whole(world, failed_groups, reason):
    varied, seen = alternating(), []

    def score(lease):
        if world.engine_version == 1 and lease.task_id != "task-0":
            return varied(lease)
        if lease.task_id == "task-0" and lease.group_id not in seen:
            seen.append(lease.group_id)
        return float(lease.task_id != "task-0" or seen.index(lease.group_id) >= failed_groups)

    world.score = score
    await world.submit(run_file(train={"steps": 9, "groups_per_step": 2, "max_staleness": 0}, eval=EVAL))
    async with everyone(world):
        state = await world.until_over()
    assert state["state"] == "done"
    assert state["reason"].startswith(reason)
    assert state["reason"].endswith(f": training ended at step {state['step']} of 9")
    evaluated = rows(world, "SELECT DISTINCT version FROM groups WHERE purpose = 'eval' ORDER BY version")
    assert evaluated == [(1,), (state["step"] + 1,)]


@pytest.mark.parametrize("score", [0.0, 1.0])
async def test_a_run_without_variance_says_so_and_stops(world, score):
    world.score = lambda _: score
    await world.submit()
    async with everyone(world):
        state = await world.until_over()
    assert state["state"] == "failed"
    assert "no variance" in state["reason"]
    assert state["groups"]["train"]["skipped"] == 32
    assert state["rollouts"]["done"] + state["rollouts"]["running"] + state["rollouts"]["scoring"] == state["rollouts"]["total"]


@pytest.mark.parametrize(("score", "groups"), [(1.0, (4, 5)), (0.0, (5, 6))])
async def test_a_task_that_teaches_nothing_gets_half_the_groups(world, score, groups):
    """And one more where it was failed."""
    varied = alternating()
    world.score = lambda lease: score if lease.task_id == "task-0" else varied(lease)
    await world.submit(run_file(train={"steps": 16, "groups_per_step": 1, "max_staleness": 0}))
    async with everyone(world):
        state = await world.until_over()
    assert state["state"] == "done"
    same, *others = rows(
        world,
        "SELECT count(*) FROM groups JOIN tasks ON digest = task_digest GROUP BY task_id ORDER BY task_id",
    )
    assert [trained for (trained,) in others] == [8, 8]
    assert same[0] in groups


async def test_a_straggler_stalls_nobody_and_is_let_go_of_when_the_run_needs_it_no_more(tmp_path):
    world, go = World(tmp_path, lease_s=600.0), asyncio.Event()
    await world.start()

    async def hold(lease):
        if lease is world.leases[0]:
            await go.wait()

    world.hold = hold
    await world.submit(run_file(train={"steps": 3, "groups_per_step": 1, "max_staleness": 1}))
    async with everyone(world):
        state = await world.until(lambda state: state["step"] == 3)
        straggler = world.leases[0]
        await world.until_heartbeat(straggler, "cancel")
        assert state["state"] == "running"  # not one of its rollouts is without an outcome in the end
        go.set()
        state = await world.until_over()
    assert (state["state"], state["rollouts"]["done"]) == ("done", state["rollouts"]["total"])
    await world.close()


async def test_credit_and_concurrency_bound_what_is_in_flight(world):
    await world.submit(run_file(train={"steps": 9, "groups_per_step": 2, "max_staleness": 2}))
    async with Workers(lambda: verifier(world)):
        state = await world.until(lambda state: state["rollouts"]["queued"] == 4)
    assert state["groups"]["train"]["open"] == 6  # (max_staleness + 1) * groups_per_step
    assert state["rollouts"]["planned"] == 8
