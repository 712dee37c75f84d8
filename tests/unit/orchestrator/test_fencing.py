"""What an older attempt, a lapsed lease or an older learner says changes nothing."""

import asyncio
from datetime import timedelta

import msgspec
import pytest
from sqlalchemy import select

from evener.api import Refused
from evener.errors import InfraError, InputError, Outcome
from evener.ids import session_id
from evener.messages import (
    ROLLOUTS,
    WORKSPACES,
    GroupClosed,
    PolicyPublished,
    RolloutScored,
    StepFinished,
    train_queue,
)
from evener_orchestrator.ledger import scores
from evener_orchestrator.ledger.models import Run
from evener_orchestrator.ledger.reissue import reissue
from evener_orchestrator.loops import drain_outbox
from evener_runner.heart import Heart
from tests.unit.orchestrator.world import Workers, World, everyone, finished, run_file, runner, verifier

LONG_S = 600.0


@pytest.fixture
async def impatient(tmp_path):
    world = World(tmp_path, lease_s=0.5)
    await world.start()
    yield world
    await world.close()


@pytest.fixture
async def patient(tmp_path):
    world = World(tmp_path, lease_s=LONG_S)
    await world.start()
    yield world
    await world.close()


async def clock(tx):
    return tx.now


async def a_command(world):
    async with world.bus.consume(ROLLOUTS) as commands, asyncio.timeout(10):
        delivery = await commands.get()
        await delivery.ack()
    return delivery.message


async def a_lease(world):
    command = await a_command(world)
    return await world.api.claim_rollout(session_id(command.rollout_id, command.attempt), runner="r")


async def refusals(world, word, number):
    async with asyncio.timeout(10):
        while world.context.refused[word] < number:
            await asyncio.sleep(0.02)


async def rollout(world, lease):
    return await world.api.get(f"/v1/rollouts/{lease.rollout_id}")


async def until_rollout(world, lease, condition):
    async with asyncio.timeout(15):
        while not condition(state := await rollout(world, lease)):
            await asyncio.sleep(0.05)
    return state


async def test_a_lease_is_given_once(world):
    await world.submit()
    lease = await a_lease(world)
    assert (lease.version, lease.purpose, lease.policy, lease.attempt) == (None, "train", "first-run", 1)
    with pytest.raises(Refused):
        await world.api.claim_rollout(lease.session_id, runner="other")
    with pytest.raises(Refused):
        await world.api.heartbeat(lease.session_id, lease="guess")
    assert (await world.api.heartbeat(lease.session_id, lease=lease.lease)).action == "continue"


async def test_an_expired_lease_gives_a_new_attempt_and_late_words_are_refused(impatient):
    world = impatient
    await world.submit(run_file(rollouts={"group_size": 2, "concurrent": 99}))
    old = await a_lease(world)
    state = await until_rollout(world, old, lambda state: state["attempt"] == 2)
    assert [attempt["cause"] for attempt in state["attempts"]] == ["lease_expired", None]
    with pytest.raises(Refused):
        await world.api.heartbeat(old.session_id, lease=old.lease)
    await world.bus.publish(finished(world, old))
    await refusals(world, "RolloutFinished", 1)
    state = await rollout(world, old)
    assert (state["attempt"], state["outcome"]) == (2, None)
    async with asyncio.timeout(10):
        while old.session_id not in world.sessions.deleted:
            await asyncio.sleep(0.05)
    assert old.session_id in world.sessions.sealed  # a zombie's agent samples nothing more


async def test_fenced_what_a_silent_runner_never_opened_is_given_up_as_well(impatient, monkeypatch):
    """The proxy knows no such session, and has to hear of its deletion before the runner comes to itself and opens it."""
    world = impatient

    async def unknown(session_id):
        raise InfraError("session_lost", session_id)

    monkeypatch.setattr(world.sessions, "seal", unknown)
    await world.submit(run_file(rollouts={"group_size": 2, "concurrent": 99}))
    old = await a_lease(world)
    async with asyncio.timeout(20):
        while old.session_id not in world.sessions.deleted:
            await asyncio.sleep(0.05)


async def test_a_wrong_lease_and_an_unknown_rollout_are_refused(world):
    await world.submit()
    lease = await a_lease(world)
    event = finished(world, lease)
    await world.bus.publish(msgspec.structs.replace(event, lease="guess"))
    await world.bus.publish(msgspec.structs.replace(event, rollout_id="01a22899-4263-752e-a9db-46e524203e52"))
    await refusals(world, "RolloutFinished", 2)
    assert (await rollout(world, lease))["state"] == "running"


async def test_a_fault_of_ours_is_tried_three_times_and_never_graded(world):
    world.finish = lambda _, event: [msgspec.structs.replace(event, outcome=Outcome.INFRA_ERROR, cause="sandbox_failed")]
    await world.submit(
        run_file(rollouts={"group_size": 2, "concurrent": 2}, train={"steps": 1, "groups_per_step": 1, "max_staleness": 0})
    )
    async with Workers(lambda: runner(world)):
        await world.until(lambda state: state["groups"]["train"]["rejected"] == 1)
    lease = world.leases[0]
    state = await rollout(world, lease)
    assert (state["outcome"], state["cause"], state["score"], state["attempt"]) == ("infra_error", "sandbox_failed", None, 3)


@pytest.mark.parametrize(
    ("sealed", "cause"),
    [({"committed": 2, "aborted": 0, "lost": 0, "undelivered": 0}, "capture_gap"), (None, "capture_gap")],
)
async def test_a_gap_in_the_trace_is_a_fault_of_ours(world, sealed, cause):
    await world.submit()
    lease = await a_lease(world)
    event = finished(world, lease)
    event = msgspec.structs.replace(event, sealed=sealed and type(event.sealed)(**sealed))
    await world.bus.publish(event)
    state = await until_rollout(world, lease, lambda state: state["attempts"][0]["outcome"])
    assert (state["attempts"][0]["outcome"], state["attempts"][0]["cause"]) == ("infra_error", cause)


async def test_other_weights_than_the_pinned_ones_void_an_evaluation(world):
    document = run_file()
    del document["train"]
    await world.submit(document)
    lease = await a_lease(world)
    assert lease.version == 1
    await world.bus.publish(finished(world, msgspec.structs.replace(lease, version=2)))
    state = await until_rollout(world, lease, lambda state: state["attempts"][0]["outcome"])
    assert state["attempts"][0]["cause"] == "version_changed"


@pytest.mark.parametrize("by_verifier", [False, True])
async def test_a_fault_of_the_tasks_author_rejects_the_group(world, by_verifier):
    def fault(event):
        return [RolloutScored(rollout_id=event.rollout_id, attempt=event.attempt, cause="reward_missing")]

    def setup_fault(_, event):
        return [msgspec.structs.replace(event, outcome=Outcome.TASK_ERROR, cause="task_setup")]

    if by_verifier:
        world.scored = fault
    else:
        world.finish = setup_fault
    await world.submit()
    async with Workers(lambda: runner(world), lambda: verifier(world)):
        state = await world.until(lambda state: state["groups"]["train"]["rejected"] > 0)
    assert state["rollouts"]["outcomes"]["task_error"] > 0
    group = await world.api.get(f"/v1/groups/{world.leases[0].group_id}")
    assert group["state"] == "rejected"
    assert "task_error" in group["reason"]
    assert state["groups"]["train"]["trained"] == 0


async def test_what_a_verifier_is_at_is_not_given_to_a_second(world):
    await world.submit()
    async with Workers(lambda: runner(world)):
        await world.until(lambda state: state["rollouts"]["scoring"] == 8)
    await drain_outbox(world.context)
    assert await issued(world, 8) == {lease.rollout_id for lease in world.leases}
    before = await world.context.ledger.write(clock)
    await world.api.scoring(world.leases[0].session_id)
    await world.context.ledger.write(lambda tx: reissue(tx, before=before))
    await drain_outbox(world.context)
    await asyncio.sleep(0.2)
    assert await issued(world, 7) == {lease.rollout_id for lease in world.leases[1:]}


async def test_complete_a_snapshot_that_no_verifier_survives_ends_its_rollout(world):
    await world.submit()
    async with Workers(lambda: runner(world)):
        await world.until(lambda state: state["rollouts"]["scoring"] == 8)
    poison = world.leases[0]
    for _ in range(scores.ORDERS):
        await world.api.scoring(poison.session_id)
        await world.api.scoring(poison.session_id, begins=False)  # one that lives says so, as often as it likes
    with pytest.raises(Refused, match="none has told a score"):
        await world.api.scoring(poison.session_id)
    state = await world.api.get(f"/v1/rollouts/{poison.rollout_id}")
    assert (state["outcome"], state["cause"]) == ("infra_error", "verifier_failed")
    async with everyone(world):
        assert (await world.until_over())["state"] == "done"


async def issued(world, expected):
    """The rollouts whose workspaces wait to be scored, once there are so many; an outbox may send a message twice."""
    found = set()
    async with asyncio.timeout(10), world.bus.consume(WORKSPACES, prefetch=20) as consumer:
        while len(found) < expected or await world.bus.depth(WORKSPACES):
            delivery = await consumer.get()
            found.add(delivery.message.rollout_id)
            await delivery.ack()
    return found


async def test_a_reported_attempt_is_not_lost_while_its_runner_is_heard_of(impatient):
    """The ledger reads the report after several leases; the last beat is refused, which ends the beating."""
    world, reads = impatient, asyncio.Event()
    load = world.trace.load

    async def late(session):
        await reads.wait()
        return await load(session)

    world.trace.load = late
    await world.submit(run_file(rollouts={"group_size": 2, "concurrent": 1}))
    lease = await a_lease(world)
    heart = Heart(world.api, lease, lambda why: None)
    async with heart.beating():
        await world.bus.publish(finished(world, lease))
        await asyncio.sleep(2)
        reads.set()
        async with asyncio.timeout(10):
            await heart.until_read(60)
    state = await rollout(world, lease)
    assert (state["attempt"], state["state"]) == (1, "archived")
    assert world.context.refused["RolloutFinished"] == 0


async def test_a_failing_verifier_is_asked_three_times(world):
    world.scored = lambda event: [RolloutScored(rollout_id=event.rollout_id, attempt=event.attempt, cause="verifier_failed")]
    await world.submit(run_file(rollouts={"group_size": 2, "concurrent": 1}))
    async with Workers(lambda: runner(world), lambda: verifier(world)):
        async with asyncio.timeout(15):
            while not world.leases:
                await asyncio.sleep(0.05)
        state = await until_rollout(world, world.leases[0], lambda state: state["outcome"])
    assert (state["outcome"], state["cause"], state["score"]) == ("infra_error", "verifier_failed", None)


async def test_the_words_of_an_older_learner_are_refused(world):
    await world.submit()
    async with Workers(lambda: runner(world), lambda: verifier(world)):
        await world.until(lambda state: state["groups"]["train"]["closed"] >= 2)
    old = await world.api.claim_policy("first-run", learner="l1")
    async with world.bus.consume(train_queue("first-run")) as commands:
        group = (await commands.get()).message.group_id
    order = await world.api.claim_group(group, epoch=old.epoch)
    assert {len(sequence.ids) for each in order.rollouts for sequence in each.sequences} == {8 * 4}
    grant = await world.api.allot_version("first-run", epoch=old.epoch, step=1)
    assert await world.api.allot_version("first-run", epoch=old.epoch, step=1) == grant  # a repeated request
    with pytest.raises(Refused, match="l1 holds"):
        await world.api.claim_policy("first-run", learner="l2")
    await world.api.release_policy("first-run", epoch=old.epoch, step=1)  # whose report the ledger has not read yet
    with pytest.raises(Refused, match="l1 holds"):
        await world.api.claim_policy("first-run", learner="l2")
    await world.api.release_policy("first-run", epoch=old.epoch, step=0)
    new = await world.api.claim_policy("first-run", learner="l2")
    assert new.epoch == old.epoch + 1
    with pytest.raises(Refused):
        await world.api.hold_policy("first-run", epoch=old.epoch)
    with pytest.raises(Refused):
        await world.api.release_policy("first-run", epoch=old.epoch, step=0)
    with pytest.raises(Refused):
        await world.api.claim_group(group, epoch=old.epoch)
    with pytest.raises(Refused):
        await world.api.allot_version("first-run", epoch=old.epoch, step=1)
    base = {"policy": "first-run", "epoch": old.epoch, "step": 1, "version": grant.version}
    await world.bus.publish(StepFinished(run_id=new.run_id, groups=[group], **base))
    await world.bus.publish(PolicyPublished(weights="sha256:" + "0" * 64, **base))
    await world.bus.publish(GroupClosed(group_id=group, epoch=old.epoch, disposition="skipped"))
    for word in ("StepFinished", "PolicyPublished", "GroupClosed"):
        await refusals(world, word, 1)
    state = await world.api.get("/v1/runs/latest")
    assert (state["step"], state["version"]) == (0, 1)
    assert (await world.api.get(f"/v1/groups/{group}"))["state"] == "closed"
    assert (await world.api.claim_group(group, epoch=new.epoch)).group_id == group
    assert (await world.api.claim_group(group, epoch=new.epoch)).group_id == group  # a repeated request
    assert (await world.api.allot_version("first-run", epoch=new.epoch, step=1)).version == grant.version + 1


async def age(world, seconds):
    """Let the learner's lease be older than it is; how long it still holds then."""

    async def work(tx):
        run = (await tx.session.scalars(select(Run))).one()
        run.learner_expires_at -= timedelta(seconds=seconds)
        return (run.learner_expires_at - tx.now).total_seconds()

    return await world.context.ledger.write(work)


async def test_a_learner_that_is_heard_of_keeps_the_policy_and_a_silent_one_loses_it(patient):
    world = patient
    await world.submit()
    first = await world.api.claim_policy("first-run", learner="l1")
    assert first.lease_s == LONG_S
    for _ in range(3):  # longer than a lease, by the ledger's clock
        assert 0 < await age(world, LONG_S / 2) < LONG_S / 2
        with pytest.raises(Refused, match="l1 holds"):
            await world.api.claim_policy("first-run", learner="l2")
        assert (await world.api.hold_policy("first-run", epoch=first.epoch)).action == "continue"
    assert await age(world, LONG_S) < 0
    await world.api.hold_policy("first-run", epoch=first.epoch)  # late, but nobody took it
    with pytest.raises(Refused, match="l1 holds"):
        await world.api.claim_policy("first-run", learner="l2")
    await age(world, LONG_S)
    second = await world.api.claim_policy("first-run", learner="l2")
    assert second.epoch == first.epoch + 1
    with pytest.raises(Refused):
        await world.api.hold_policy("first-run", epoch=first.epoch)
    await world.api.post("/v1/runs/latest/pause")
    assert (await world.api.hold_policy("first-run", epoch=second.epoch)).action == "continue"
    await world.api.post("/v1/runs/latest/cancel")
    assert (await world.api.hold_policy("first-run", epoch=second.epoch)).action == "cancel"


async def test_tokens_of_a_lost_version_are_never_trained(world):
    await world.submit()
    lease = await world.api.claim_policy("first-run", learner="l1")
    grant = await world.api.allot_version("first-run", epoch=lease.epoch, step=1)
    world.engine_version = grant.version  # loaded by the engine, then the learner dies
    async with Workers(lambda: runner(world), lambda: verifier(world)):
        await world.until(lambda state: state["groups"]["train"]["closed"] >= 1)
    lease = await world.api.claim_policy("first-run", learner="l1")  # restarted under its name: it need not wait
    async with world.bus.consume(train_queue("first-run")) as commands:
        group = (await commands.get()).message.group_id
    with pytest.raises(Refused, match="died with its learner"):
        await world.api.claim_group(group, epoch=lease.epoch)
    assert (await world.api.get(f"/v1/groups/{group}"))["reason"] == "lost_version"


async def test_a_paused_run_starts_nothing_and_goes_on(world):
    await world.submit()
    lease = await a_lease(world)
    command = await a_command(world)
    await world.api.post("/v1/runs/latest/pause")
    assert (await world.api.heartbeat(lease.session_id, lease=lease.lease)).action == "pause"
    with pytest.raises(Refused, match="paused"):
        await world.api.claim_rollout(session_id(command.rollout_id, command.attempt), runner="r")
    await world.api.post("/v1/runs/latest/resume")
    async with everyone(world):  # the command that was refused and dropped is issued again
        await world.bus.publish(finished(world, lease))
        state = await world.until_over()
    assert state["state"] == "done"


async def test_complete_what_was_let_go_of_for_a_pause_goes_on_after_it(world):
    """The runner's words arrive when the run has been resumed already."""
    await world.submit()
    let_go = [await a_lease(world), await a_lease(world)]
    await world.api.post("/v1/runs/latest/pause")
    for lease in let_go:
        assert (await world.api.heartbeat(lease.session_id, lease=lease.lease)).action == "pause"
    await world.api.post("/v1/runs/latest/resume")
    for lease in let_go:
        await world.bus.publish(msgspec.structs.replace(finished(world, lease), outcome=Outcome.CANCELLED))
    async with everyone(world):
        state = await world.until_over()
    assert state["state"] == "done"
    assert {outcome for outcome, number in state["rollouts"]["outcomes"].items() if number} == {"finished"}


async def test_a_cancelled_run_ends_every_rollout(world):
    await world.submit()
    lease = await a_lease(world)
    await world.api.post("/v1/runs/latest/cancel")
    assert (await world.api.heartbeat(lease.session_id, lease=lease.lease)).action == "cancel"
    await world.bus.publish(msgspec.structs.replace(finished(world, lease), outcome=Outcome.CANCELLED))
    state = await world.until(lambda state: state["rollouts"]["done"] == state["rollouts"]["total"])
    assert state["state"] == "cancelled"
    assert state["rollouts"]["outcomes"]["cancelled"] == state["rollouts"]["total"]
    assert await world.api.claim_policy("first-run", learner="l") is None
    with pytest.raises(Refused):
        await world.api.post("/v1/runs/latest/pause")
    with pytest.raises(InputError):
        await world.api.get("/v1/runs/nonsense")


async def test_complete_a_cancelled_run_waits_for_no_verifier(world):
    """Its commands are not issued again, so that one that was lost would leave a rollout without an outcome."""
    await world.submit()
    async with Workers(lambda: runner(world)):
        await world.until(lambda state: state["rollouts"]["scoring"] == 8)
    await world.api.post("/v1/runs/latest/cancel")
    state = await world.until(lambda state: state["rollouts"]["done"] == state["rollouts"]["total"])
    assert state["rollouts"]["outcomes"]["finished"] == state["rollouts"]["total"] == 8
    with pytest.raises(Refused):
        await world.api.scoring(world.leases[0].session_id)
