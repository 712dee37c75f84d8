"""A snapshot is graded again beside its score: what was trained on never changes, and no word is lost or taken for another."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import select

from evener.errors import InputError, Outcome
from evener.messages import RolloutScored
from evener_orchestrator.ledger import regrades, scores
from evener_orchestrator.ledger.conflict import Conflict
from evener_orchestrator.ledger.models import Outgoing, Regrade, Rollout, Score
from evener_orchestrator.loops import issue_regrades_again
from evener_orchestrator.states import GroupState, RolloutState
from tests.unit.orchestrator.rows import a_group, a_rollout, a_run, a_score, a_task, an_attempt, write
from tests.unit.orchestrator.world import Workers, everyone, run_file, verifier

SCORED = {"state": RolloutState.SCORED, "outcome": Outcome.FINISHED, "score": 0.0, "reward": 0.0}


@pytest.fixture
async def graded(ledger):
    """A trained group of two rollouts with scores, a third rollout whose runner left no snapshot, a fourth to be scored."""
    await write(
        ledger,
        [a_run(), a_task()],
        [a_group("g", state=GroupState.TRAINED), a_group("h", number=1)],
        [
            a_rollout("a", "g", **SCORED),
            a_rollout("b", "g", **SCORED),
            a_rollout("c", "h", state=RolloutState.ENDED, outcome=Outcome.INFRA_ERROR),
            a_rollout("d", "h", state=RolloutState.ARCHIVED),
        ],
        [an_attempt(name, snapshot="sha256:s") for name in "abd"] + [an_attempt("c")],
        [a_score(name, 0.0) for name in "ab"],
    )
    return ledger


async def ask(ledger, given):
    return await ledger.write(lambda tx: regrades.ask(tx, given))


async def order(ledger, session):
    return await ledger.write(lambda tx: regrades.order(tx, session, begins=True))


async def record(ledger, rollout, regrade, **said):
    said = said or {"scores": {"reward": 1.0}}
    await ledger.write(lambda tx: regrades.record(tx, RolloutScored(rollout_id=rollout, attempt=1, regrade=regrade, **said)))


async def rows(ledger, table):
    async with ledger.read() as session:
        return (await session.scalars(select(table).order_by(table.id))).all()


async def until_graded(world, of):
    while True:
        found = await world.api.get("/v1/regrades", of=of)
        if all(row["new"] for row in found):
            return found
        await asyncio.sleep(0.05)


async def test_the_new_score_is_kept_beside_the_old_one(graded):
    asked = await ask(graded, "g")
    assert (asked.kind, asked.id, asked.rollouts, asked.left_out) == ("group", "g", 2, 0)
    assert len(await rows(graded, Outgoing)) == 2
    given = await order(graded, "a.1")
    assert (given.session_id, given.snapshot, given.regrade is None) == ("a.1", "sha256:s", False)
    await record(
        graded, "a", given.regrade, scores={"reward": 1.0, "style": 0.5}, evidence={"tier": "out_of_process"}, seconds=2.0
    )
    async with graded.read() as session:
        (first, second) = await regrades.newest(session, "g")
        rollout = await session.get_one(Rollout, "a")
        score = await session.get_one(Score, "a.1")
    assert (rollout.score, rollout.reward, score.score, score.scores) == (0.0, 0.0, 0.0, {"reward": 0.0})
    regrade, old, group, task = first
    assert (regrade.rollout_id, regrade.score, regrade.scores["style"], old.score) == ("a", 1.0, 0.5, 0.0)
    assert (regrade.evidence, regrade.seconds, regrade.ended_at is None) == ({"tier": "out_of_process"}, 2.0, False)
    assert (group.id, task.task_id) == ("g", "a")
    assert second[0].ended_at is None


async def test_a_rollout_a_group_and_a_run_can_be_meant(graded):
    run = await ask(graded, "r")
    assert (run.kind, run.rollouts, run.left_out) == ("run", 2, 2)
    rollout = await ask(graded, "a")
    assert (rollout.kind, rollout.rollouts, rollout.left_out) == ("rollout", 1, 0)
    with pytest.raises(InputError, match="rollout, group or run 'nothing'"):
        await ask(graded, "nothing")
    with pytest.raises(InputError, match="a snapshot of rollout c that was scored"):
        await ask(graded, "c")
    with pytest.raises(InputError, match="a snapshot of rollout d"):
        await ask(graded, "d")


async def test_what_waits_is_not_asked_twice_and_what_was_graded_can_be_asked_again(graded):
    await ask(graded, "g")
    await ask(graded, "r")
    assert len(await rows(graded, Regrade)) == 2
    await record(graded, "a", (await order(graded, "a.1")).regrade)
    await ask(graded, "a")
    mine = [row for row in await rows(graded, Regrade) if row.rollout_id == "a"]
    assert [row.score for row in mine] == [1.0, None]
    async with graded.read() as session:
        assert [row[0].ended_at for row in await regrades.newest(session, "a")] == [None]


async def test_only_the_report_that_names_the_regrade_counts(graded):
    await ask(graded, "g")
    ours = (await order(graded, "a.1")).regrade
    late = RolloutScored(rollout_id="a", attempt=1, scores={"reward": 1.0})
    with pytest.raises(Conflict):  # a second delivery of the attempt's own score
        await graded.write(lambda tx: scores.record(tx, late))
    for rollout, regrade in (("b", ours), ("a", "unknown")):
        with pytest.raises(Conflict, match="is over"):
            await record(graded, rollout, regrade)
    await record(graded, "a", ours)
    with pytest.raises(Conflict, match="is over"):
        await record(graded, "a", ours, scores={"reward": 0.0})
    with pytest.raises(Conflict, match="past scoring"):
        await order(graded, "a.1")
    assert {row.rollout_id: row.score for row in await rows(graded, Regrade)} == {"a": 1.0, "b": None}


async def test_the_attempts_own_score_comes_first(graded):
    assert (await order(graded, "d.1")).regrade is None


async def test_infra_is_not_a_grade(graded):
    await ask(graded, "a")
    regrade = (await order(graded, "a.1")).regrade
    for number in range(scores.SCORINGS):
        (row,) = await rows(graded, Regrade)
        assert (row.ended_at, row.scorings, len(await rows(graded, Outgoing))) == (None, number, 1 + number)
        await record(graded, "a", regrade, cause="verifier_failed", detail="no room")
    (row,) = await rows(graded, Regrade)
    assert (row.score, row.cause, row.detail, row.ended_at is None) == (None, "verifier_failed", "no room", False)


async def test_the_authors_fault_and_a_malformed_score_are_recorded_as_such(graded):
    await ask(graded, "g")
    await record(graded, "a", (await order(graded, "a.1")).regrade, cause="reward_missing", detail="nothing\0written")
    await record(graded, "b", (await order(graded, "b.1")).regrade, scores={"reward": 7.0})
    found = {row.rollout_id: (row.score, row.cause) for row in await rows(graded, Regrade)}
    assert found == {"a": (None, "reward_missing"), "b": (None, "reward_invalid")}


async def test_a_lost_command_is_issued_again_ever_more_seldom(graded):
    await ask(graded, "a")

    async def reissue(after):
        def later(tx):
            tx.now += timedelta(seconds=after)
            return regrades.reissue(tx, before=tx.now - timedelta(seconds=60))

        return await graded.write(later)

    assert [await reissue(after) for after in (10, 61, 100, 130, 200, 290)] == [0, 1, 0, 1, 0, 1]
    everything = await graded.write(lambda tx: regrades.reissue(tx, before=tx.now + timedelta(days=1)))
    assert everything == 1
    await record(graded, "a", (await order(graded, "a.1")).regrade)
    assert await reissue(9999) == 0


async def test_over_the_api_and_the_bus(world):
    await world.submit(run_file(train={"steps": 1, "groups_per_step": 1, "max_staleness": 0}))
    async with everyone(world):
        state = await world.until_over()
    before = {row["rollout_id"]: row for row in await world.api.get("/v1/rollouts", limit="1000")}
    world.scores = dict.fromkeys(world.scores, 1.0)
    asked = await world.api.post("/v1/regrades", {"of": state["run_id"]})
    assert (asked["kind"], asked["rollouts"], asked["left_out"]) == ("run", len(world.scores), len(before) - len(world.scores))
    async with Workers(lambda: verifier(world)), asyncio.timeout(20):
        found = await until_graded(world, asked["id"])
    assert {row["new"]["score"] for row in found} == {1.0}
    assert {row["old"]["score"] for row in found} == {0.0, 1.0}
    assert {row["rollout_id"] for row in found if row["trained"]} == {row for row, each in before.items() if each["trained"]}
    after = {row["rollout_id"]: row for row in await world.api.get("/v1/rollouts", limit="1000")}
    assert after == before
    shown = await world.api.get(f"/v1/rollouts/{found[0]['rollout_id']}")
    assert (shown["regrades"][0]["score"], len(shown["scores"])) == (1.0, 1)
    with pytest.raises(InputError, match="of"):
        await world.api.post("/v1/regrades", {})


async def test_a_restart_forgets_no_regrade(world):
    await world.submit(run_file(train={"steps": 1, "groups_per_step": 1, "max_staleness": 0}))
    async with everyone(world):
        await world.until_over()
    await world.api.post("/v1/regrades", {"of": "latest"})
    await world.restart()  # the bus is new, and empty
    async with Workers(lambda: verifier(world)), asyncio.timeout(20):
        await until_graded(world, "latest")
    assert await issue_regrades_again(world.context, age_s=0) == 0
