import asyncio
import io
import tarfile
import time

import pytest

from evener.api import Budget
from evener.errors import InfraError, Outcome
from evener.messages import EVENTS, ROLLOUTS, Sealed
from evener_runner import heart, rest

pytestmark = pytest.mark.usefixtures("runner")
EITHER = pytest.mark.parametrize("world", ["process"], indirect=True)
"""For what has nothing to do with the sandbox."""


def contents(tar):
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive if member.isreg()}


async def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def test_an_attempt_from_command_to_report(world):
    session = await world.add("open('made.txt', 'w').write(call(open('given.txt').read())); print('used', access['key'])")
    report = await world.event()
    assert (report.outcome, report.cause, report.exit_code) == (Outcome.FINISHED, None, 0)
    assert report.lease == world.leases[session].lease
    assert report.sealed == Sealed(committed=1, aborted=0, lost=0, undelivered=0)
    assert (report.sandbox, report.harness_version) == (world.sandbox, "1")
    assert report.ended >= report.started > 0
    assert contents(world.blobs.get("snapshots", report.snapshot)) == {"given.txt": b"given", "made.txt": b"answer to given"}
    logs = world.blobs.get("logs", report.logs)
    assert b"used ***" in logs
    assert b"sk-evener" not in logs
    steps = [step.split()[0] for step in world.log if "heartbeat" not in step]
    assert steps == ["claim", "open", "seal"]
    assert await world.bus.depth(ROLLOUTS) == 0


async def test_held_out(world):
    """A runner reads no blob but the agent's side of the task, and the agent finds no tests anywhere."""
    areas, get = [], world.blobs.get
    world.blobs.get = lambda area, digest: areas.append(area) or get(area, digest)
    await world.add(
        "import os; call('x')\nfound = [p for p in ('/tests', '/solution', '/logs') if os.path.exists(p)]\n"
        "open('found', 'w').write(str(found))"
    )
    report = await world.event()
    assert areas == ["agent"]
    if world.sandbox == "bubblewrap":
        assert contents(get("snapshots", report.snapshot))["found"] == b"[]"


async def test_the_sandbox_is_what_was_promised(world):
    await world.add(
        "import os; call('x'); open('out', 'w').write(' '.join([os.getcwd(), os.environ['HOME'], access['base_url']]))"
    )
    report = await world.event()
    cwd, home, base_url = contents(world.blobs.get("snapshots", report.snapshot))["out"].decode().split()
    if world.sandbox == "bubblewrap":
        assert (cwd, home, base_url) == ("/workspace", "/home/agent", "http://127.0.0.1:8701")
    else:
        assert base_url == world.settings.proxy


async def test_the_time_limit_seals_then_kills_and_keeps_the_workspace(world):
    session = await world.add("call('x'); open('half', 'w').write('done'); time.sleep(60)", budget=Budget(wall_s=2))
    report = await world.event()
    assert (report.outcome, report.cause, report.exit_code) == (Outcome.BUDGET, "budget_wall", 137)
    assert contents(world.blobs.get("snapshots", report.snapshot))["half"] == b"done"
    assert f"seal {session}" in world.log


async def test_a_failing_agent_is_the_agents_fault(world):
    await world.add("call('x'); sys.exit(3)")
    report = await world.event()
    assert (report.outcome, report.cause, report.exit_code) == (Outcome.AGENT_ERROR, "agent_exit", 3)
    assert report.snapshot is not None


@EITHER
async def test_infra_is_not_a_grade_where_nobody_would_be_answered_when_an_agent_fails(world):
    session = await world.add("call('x'); time.sleep(1); sys.exit(3)")
    await until(lambda: world.calls.get(session))
    world.down = "redis: no answer within 3 s"
    report = await world.event()
    assert (report.outcome, report.cause, report.snapshot) == (Outcome.INFRA_ERROR, "proxy_unavailable", None)


@EITHER
async def test_heartbeats_go_on_while_it_runs(world):
    await world.add("call('x'); time.sleep(4)")
    assert (await world.event()).outcome is Outcome.FINISHED
    assert sum("heartbeat" in step for step in world.log) >= 4


@pytest.mark.parametrize("action", ["cancel", "pause"])
async def test_the_ledger_can_end_it(world, action):
    session = await world.add("call('x'); time.sleep(60)")
    await until(lambda: world.calls.get(session))
    world.action = action
    report = await world.event(5)
    assert (report.outcome, report.snapshot) == (Outcome.CANCELLED, None)
    assert f"seal {session}" in world.log


async def test_a_lost_lease_is_not_reported(world):
    session = await world.add("call('x'); time.sleep(60)")
    await until(lambda: world.calls.get(session))
    world.action = "refuse"
    await until(lambda: f"seal {session}" in world.log)
    await until(lambda: not list((world.settings.data / "sandboxes").glob("*")))
    assert await world.bus.depth(EVENTS) == 0


async def test_a_refused_claim_is_acknowledged_and_dropped(world):
    session = await world.add("pass")
    world.refuse.add(session)
    await until(lambda: f"claim {session}" in world.log)
    await world.add("call('x')")
    assert (await world.event()).outcome is Outcome.FINISHED
    assert await world.bus.depth(ROLLOUTS) == 0
    assert world.log.count(f"claim {session}") <= 1


async def test_a_stop_ends_agents_and_lets_the_leases_go(world, runner):
    stop, task = runner
    sessions = [await world.add("call('x'); time.sleep(60)") for _ in range(2)]
    await until(lambda: all(world.calls.get(session) for session in sessions))
    stop.set()
    await asyncio.wait_for(task, 20)  # the agents would go on for a minute
    for _ in sessions:
        report = await world.event(1)
        assert (report.outcome, report.cause) == (Outcome.INFRA_ERROR, "service_stopped")


@pytest.mark.parametrize("runner", [10.0], indirect=True)
async def test_a_drain_lets_agents_end_and_takes_nothing_more(world, runner):
    stop, task = runner
    for _ in range(2):
        await world.add("call('x'); time.sleep(1)")
    await until(lambda: sum(world.calls.values()) == 2)
    await world.add("call('x')")
    stop.set()
    await asyncio.wait_for(task, 9)
    assert [(await world.event(1)).outcome for _ in range(2)] == [Outcome.FINISHED] * 2
    assert await world.bus.depth(ROLLOUTS) == 1


@pytest.mark.parametrize("runner", [0.3], indirect=True)
async def test_a_drain_is_bounded(world, runner):
    stop, task = runner
    session = await world.add("call('x'); time.sleep(60)")
    await until(lambda: world.calls.get(session))
    stop.set()
    await asyncio.wait_for(task, 5)
    assert (await world.event(1)).cause == "service_stopped"


async def test_a_claim_on_its_way_at_the_stop_is_not_forgotten(world, runner):
    stop, task = runner
    world.claim_takes_s = 0.2
    session = await world.add("time.sleep(60)")
    await until(lambda: f"claim {session}" in world.log)
    stop.set()
    await asyncio.wait_for(task, 5)
    assert (await world.event(1)).cause == "service_stopped"
    assert await world.bus.depth(ROLLOUTS) == 0


@EITHER
async def test_a_reported_attempt_is_heard_of_until_the_ledger_has_read_it(world, runner):
    """The ledger reads late: the attempt is neither lost nor does it keep others from running; a stop does not wait for it."""
    session = await world.add("call('x')")
    await world.event()
    for _ in range(2):
        await world.add("call('x')")
        await world.event()
    beats = world.log.count(f"heartbeat {session}")
    await until(lambda: world.log.count(f"heartbeat {session}") >= beats + 3)
    world.action = "refuse"
    await asyncio.sleep(1.5)
    beats = len(world.log)
    await asyncio.sleep(1.5)
    assert len(world.log) == beats
    world.action = "continue"
    await world.add("call('x')")
    await world.event()
    stop, task = runner
    stop.set()
    await asyncio.wait_for(task, 20)


@EITHER
async def test_a_heartbeat_that_hangs_does_not_cost_the_lease(world):
    """A replica that starts accepts connections before it answers; the next beat goes elsewhere."""
    world.hangs = 1
    session = await world.add("call('x'); time.sleep(4)")
    assert (await world.event()).outcome is Outcome.FINISHED
    assert world.log.count(f"heartbeat {session}") >= 3


@EITHER
async def test_a_ledger_that_is_away_for_longer_than_a_lease_costs_no_attempt(world):
    """Its database restarts; who was given up meanwhile is refused when it is back."""
    world.hangs = 99
    session = await world.add("call('x'); time.sleep(6)")
    assert (await world.event()).outcome is Outcome.FINISHED
    assert world.log.count(f"heartbeat {session}") >= 5


@EITHER
async def test_an_attempt_that_is_unheard_for_long_is_given_up(world, monkeypatch):
    monkeypatch.setattr(heart, "SILENCE_S", 0.1)
    world.hangs = 99
    session = await world.add("call('x'); time.sleep(60)")
    await until(lambda: f"seal {session}" in world.log)
    await until(lambda: not list((world.settings.data / "sandboxes").glob("*")))
    assert await world.bus.depth(EVENTS) == 0


async def test_only_free_slots_take_commands(world):
    sessions = [await world.add("call('x'); time.sleep(1.5)") for _ in range(3)]
    await until(lambda: sum(world.calls.values()) == 2)
    await asyncio.sleep(0.2)
    assert await world.bus.depth(ROLLOUTS) == 1
    reports = [await world.event() for _ in sessions]
    assert [report.outcome for report in reports] == [Outcome.FINISHED] * 3


async def test_an_environment_that_cannot_be_made_is_the_authors(world):
    await world.add("call('x')", files={"environment/Dockerfile": b"FROM debian\nRUN make world\n"})
    report = await world.event()
    assert (report.outcome, report.cause) == (Outcome.TASK_ERROR, "task_setup")
    assert "line 2: RUN make world" in report.detail
    assert not any(step.startswith("open") for step in world.log)


async def test_a_missing_blob_is_ours(world):
    bundle = world.blobs.put
    world.blobs.put = lambda area, data: "sha256:" + "0" * 64 if area == "agent" else bundle(area, data)
    session = await world.add("call('x')")
    report = await world.event()
    assert (report.outcome, report.cause) == (Outcome.INFRA_ERROR, "blob_missing")
    assert f"seal {session}" not in world.log


async def test_tasks_of_others_need_a_real_sandbox(world):
    await world.add("call('x')", trusted=False)
    report = await world.event()
    expected = Outcome.FINISHED if world.sandbox == "bubblewrap" else Outcome.INFRA_ERROR
    assert report.outcome is expected


async def test_an_engine_that_failed_is_no_grade(world):
    world.state.fault, world.state.last_error = "engine_unavailable", "connection refused"
    await world.add("call('x')")
    report = await world.event()
    assert (report.outcome, report.cause, report.snapshot) == (Outcome.INFRA_ERROR, "engine_unavailable", None)


@EITHER
async def test_a_host_whose_attempts_fail_takes_ever_fewer_and_goes_on(world, monkeypatch):
    """The blob store is full: each attempt would be run for nothing, and three of them are a rollout's end."""
    monkeypatch.setattr(rest, "FIRST_S", 0.4)
    put = world.blobs.put

    def full(area, data):
        if area == "snapshots":
            raise InfraError("blob_refused", "no space left on device")
        return put(area, data)

    world.blobs.put = full
    sessions = [await world.add("call('x')") for _ in range(8)]
    await asyncio.sleep(3)
    claimed = sum(step.startswith("claim") for step in world.log)
    assert 2 <= claimed < len(sessions)
    world.blobs.put = put
    reports = [await world.event() for _ in sessions]
    assert {report.cause for report in reports[:2]} == {"blob_refused"}
    assert reports[-1].outcome is Outcome.FINISHED


@pytest.mark.parametrize("needs", [{"oldest_version": 3}, {"version": 3, "purpose": "eval"}])
async def test_an_engine_with_too_old_weights_lets_an_attempt_wait(world, needs):
    session = await world.add("call('x')", **needs)
    await until(lambda: f"heartbeat {session}" in world.log)
    assert f"open {session}" not in world.log
    world.version = 3
    report = await world.event()
    assert (report.outcome, report.attempt) == (Outcome.FINISHED, 1)


async def test_a_wait_for_weights_ends_where_the_ledger_wants_the_attempt_no_more(world):
    session = await world.add("call('x')", oldest_version=3)
    world.action = "cancel"
    report = await world.event()
    assert (report.outcome, report.cause) == (Outcome.CANCELLED, None)
    assert f"open {session}" not in world.log


async def test_while_no_engine_answers_no_attempt_is_begun(world):
    world.down = "engine http://e: refused"
    await world.add("call('x')")
    await asyncio.sleep(0.5)
    assert await world.bus.depth(ROLLOUTS) == 1
    assert world.log == []
    world.down = None
    report = await world.event()
    assert (report.outcome, report.attempt) == (Outcome.FINISHED, 1)
