import asyncio
import time

import msgspec
import pytest
from aiohttp import web

from evener.bus.memory import MemoryBus
from evener.errors import InfraError, InputError
from evener.ids import new_id
from evener.messages import EVENTS, WORKSPACES, ScoreWorkspace
from evener.settings import Settings
from evener_verifier import service, verifier
from tests.unit.verifier.orders import order

PASS_IF_DONE = b"[ -f /workspace/done ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"


async def test_solved_and_not_solved(score):
    solved, unsolved = await score(PASS_IF_DONE), await score(PASS_IF_DONE, {"other": b""})
    assert (solved.scores, solved.cause) == ({"reward": 1.0}, None)
    assert (unsolved.scores, unsolved.cause) == ({"reward": 0.0}, None)


async def test_evidence(score):
    scored = await score(
        b"echo said; echo wrong >&2; cat /tests/expected; echo 0.5 > /logs/verifier/reward.txt; exit 3",
        {"given": b"2", "new": b""},
        pristine={"given": b"1", "gone": b"x"},
    )
    evidence = scored.evidence
    assert (evidence["exit_code"], evidence["stdout"], evidence["stderr"]) == (3, "said\nsecret", "wrong\n")
    assert evidence["changes"] == {
        "added": {"count": 1, "names": ["new"]},
        "changed": {"count": 1, "names": ["given"]},
        "removed": {"count": 1, "names": ["gone"]},
    }
    assert scored.scores == {"reward": 0.5}
    assert scored.seconds > 0


async def test_planted_rewards_have_no_influence(score):
    planted = dict.fromkeys(("logs/verifier/reward.txt", "reward.txt", "tests/test.sh"), b"1")
    planted["logs/verifier/reward.json"] = b'{"reward": 1}'
    scored = await score(b"ls -A /logs/verifier; true", planted)
    assert (scored.scores, scored.cause) == ({}, "reward_missing")
    assert scored.evidence["stdout"] == ""


async def test_a_reward_that_is_a_link_or_a_folder_is_not_read(score):
    for script in (b"ln -s /etc/hostname /logs/verifier/reward.txt", b"mkdir /logs/verifier/reward.json"):
        assert (await score(script)).cause == "reward_missing"


async def test_faults_of_the_author(score):
    assert (await score(b"true")).cause == "reward_missing"
    assert (await score(b"echo 1000000 > /logs/verifier/reward.txt")).cause == "reward_invalid"
    assert (await score(b"true", toml=b"verifier = 1")).cause == "task_setup"
    slow = await score(b"sleep 60", toml=b"[verifier]\ntimeout_sec = 0.3\n")
    assert (slow.cause, slow.detail) == ("reward_missing", "tests/test.sh did not end within 0.3 s")
    assert slow.seconds < 5


async def test_environment_of_the_task(score):
    toml = b'[verifier]\nenv = {LEVEL = "0.75"}\n'
    assert (await score(b"echo $LEVEL > /logs/verifier/reward.txt", toml=toml)).scores == {"reward": 0.75}


def timeless(seen):
    """All but the measured times."""
    if isinstance(seen, dict):
        return {name: timeless(value) for name, value in seen.items() if name != "seconds"}
    return [timeless(each) for each in seen] if isinstance(seen, list) else seen


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)  # a plain process has the host's /tmp
@pytest.mark.parametrize("toml", [b"", b'[verifier]\ntier = "out_of_process"\nbaseline = true\n'])
async def test_replicas_are_pure(blobs, kind, tmp_path, toml):
    """Whatever another verifier scored before, and whatever is scored beside it, a snapshot has the same score and evidence."""
    test = b"ls /workspace /tmp $HOME; touch /tmp/x $HOME/x /workspace/x; candidate cat done < /dev/null; " + PASS_IF_DONE
    wanted = [order(blobs, kind, test, {"done": b"1", "given": b"2"}, toml=toml), order(blobs, kind, test, {}, toml=toml)]
    seen = []
    for replica in ("one", "two", "one"):
        mine, other = await asyncio.gather(*(verifier.score(each, blobs, tmp_path / replica) for each in wanted))
        assert (mine.scores, other.scores) == ({"reward": 1.0}, {"reward": 0.0})
        seen.append(timeless(mine.evidence))
    assert seen[0] == seen[1] == seen[2]


async def test_infra_is_not_a_grade(blobs, kind, tmp_path):
    wanted = order(blobs, kind, PASS_IF_DONE)
    lost = msgspec.structs.replace(wanted, snapshot="sha256:" + "0" * 64)
    assert (await verifier.score(lost, blobs, tmp_path / "s")).cause == "blob_missing"
    broken = msgspec.structs.replace(wanted, snapshot=blobs.put("snapshots", b"no tar file"))
    assert (await verifier.score(broken, blobs, tmp_path / "s")).cause == "sandbox_failed"


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)  # a plain process isolates nothing
async def test_tests_are_out_of_reach_of_what_they_test(score):
    script = b"touch /tests/x; rm -f /tests/expected; cat /tests/expected; id -u; ls /opt /run; env"
    evidence = (await score(script, trusted=False)).evidence
    assert "Read-only file system" in evidence["stderr"]
    assert evidence["stdout"].startswith("secret")
    assert "8701" not in evidence["stdout"]
    probe = b"python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 2)'; echo 1 > /logs/verifier/reward.txt"
    assert "OSError" in (await score(probe)).evidence["stderr"] or "not found" in (await score(probe)).evidence["stderr"]


async def test_cost(score, kind):
    await score(PASS_IF_DONE)
    seconds = sorted([(await score(PASS_IF_DONE)).seconds for _ in range(5)])
    print(f"{kind}: {1000 * seconds[0]:.0f} to {1000 * seconds[-1]:.0f} ms a verification")
    assert seconds[0] < 1.0


@pytest.fixture
async def api(blobs, kind, tmp_path):
    """An orchestrator that knows three attempts: solved, unknown, and one past scoring."""
    orders, asked = {}, []

    async def scoring(request):
        session = request.match_info["session"]
        asked.append(session)
        if session not in orders:
            return web.json_response({"detail": "past scoring"}, status=409)
        return web.Response(body=msgspec.json.encode(orders[session]))

    app = web.Application()
    app.add_routes([web.post("/v1/attempts/{session}/scoring", scoring)])
    server = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{server.addresses[0][1]}"
    yield Settings(data=tmp_path / "data", url=url, verifier_slots=2), orders, asked
    await server.cleanup()


async def test_service(api, blobs, kind):
    settings, orders, _ = api
    bus, stop = MemoryBus(), asyncio.Event()
    wanted = order(blobs, kind, PASS_IF_DONE)
    orders[wanted.session_id] = wanted
    rollout = wanted.session_id.split(".")[0]
    await bus.publish(ScoreWorkspace(run_id="r", rollout_id=new_id(), attempt=1))  # past scoring: dropped
    await bus.publish(ScoreWorkspace(run_id="r", rollout_id=rollout, attempt=1))
    serving = asyncio.create_task(service.serve(settings, bus, blobs, stop=stop, name="verifier-1"))
    async with asyncio.timeout(20), bus.consume(EVENTS) as consumer:
        scored = (await consumer.get()).message
    assert (scored.rollout_id, scored.attempt, scored.scores) == (rollout, 1, {"reward": 1.0})
    stop.set()
    await asyncio.wait_for(serving, 5)
    assert await bus.depth(WORKSPACES) == 0


async def test_what_was_seen_is_told_whatever_files_are_called(api, blobs, kind):
    """An archive of another country's names is enough; no evidence is worth a rollout."""
    settings, orders, _ = api
    bus, stop = MemoryBus(), asyncio.Event()
    wanted = order(blobs, kind, PASS_IF_DONE, {"done": b"", "caf\udce9.txt": b"x"})
    orders[wanted.session_id] = wanted
    await bus.publish(ScoreWorkspace(run_id="r", rollout_id=wanted.session_id.split(".")[0], attempt=1))
    serving = asyncio.create_task(service.serve(settings, bus, blobs, stop=stop, name="verifier-1"))
    async with asyncio.timeout(20), bus.consume(EVENTS) as consumer:
        scored = (await consumer.get()).message
    assert scored.scores == {"reward": 1.0}
    assert "caf?.txt" in scored.evidence["changes"]["added"]["names"]
    stop.set()
    await asyncio.wait_for(serving, 5)


async def test_evidence_that_no_broker_takes_is_left_out(api, blobs, kind, monkeypatch):
    settings, orders, _ = api
    bus, stop, publish = MemoryBus(), asyncio.Event(), MemoryBus.publish

    async def picky(bus, message, *, priority=0):
        if getattr(message, "evidence", {}).get("changes"):
            raise InfraError("bus_refused", "a message of 17 MB")
        await publish(bus, message, priority=priority)

    monkeypatch.setattr(MemoryBus, "publish", picky)
    wanted = order(blobs, kind, PASS_IF_DONE)
    orders[wanted.session_id] = wanted
    await bus.publish(ScoreWorkspace(run_id="r", rollout_id=wanted.session_id.split(".")[0], attempt=1))
    serving = asyncio.create_task(service.serve(settings, bus, blobs, stop=stop, name="verifier-1"))
    async with asyncio.timeout(20), bus.consume(EVENTS) as consumer:
        scored = (await consumer.get()).message
    assert (scored.scores, scored.evidence) == ({"reward": 1.0}, {"left_out": "a message of 17 MB"})
    stop.set()
    await asyncio.wait_for(serving, 5)


async def test_a_stop_hands_the_unfinished_back(api, blobs, kind):
    settings, orders, _ = api
    bus, stop = MemoryBus(), asyncio.Event()
    wanted = order(blobs, kind, b"sleep 60")
    orders[wanted.session_id] = wanted
    await bus.publish(ScoreWorkspace(run_id="r", rollout_id=wanted.session_id.split(".")[0], attempt=1))
    serving = asyncio.create_task(service.serve(settings, bus, blobs, stop=stop, name="verifier-1"))
    deadline = time.monotonic() + 10
    while not list((settings.data / "sandboxes").glob("score-*/label.json")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    stop.set()
    await asyncio.wait_for(serving, 5)
    assert await bus.depth(WORKSPACES) == 1
    assert await bus.depth(EVENTS) == 0
    assert not list((settings.data / "sandboxes").glob("*"))


async def test_a_command_that_is_delivered_again_meanwhile_is_scored_once(api, blobs, kind):
    settings, orders, asked = api
    bus, stop = MemoryBus(), asyncio.Event()
    wanted = order(blobs, kind, b"sleep 1; " + PASS_IF_DONE)
    orders[wanted.session_id] = wanted
    command = ScoreWorkspace(run_id="r", rollout_id=wanted.session_id.split(".")[0], attempt=1)
    for _ in range(2):
        await bus.publish(command)
    serving = asyncio.create_task(service.serve(settings, bus, blobs, stop=stop, name="verifier-1"))
    async with asyncio.timeout(20), bus.consume(EVENTS) as consumer:
        scored = (await consumer.get()).message
        assert (scored.scores, scored.cause) == ({"reward": 1.0}, None)
        assert asked == [wanted.session_id]
        assert await bus.depth(EVENTS) == 0
    stop.set()
    await asyncio.wait_for(serving, 5)
    assert await bus.depth(WORKSPACES) == 0


async def test_a_fault_of_ours_is_told_after_a_pause(api, blobs, kind, monkeypatch):
    """Three in a row end a rollout: a store that restarts is to be back before the third."""
    monkeypatch.setattr(service, "FAULT_S", 1.0)
    settings, orders, asked = api
    bus, stop = MemoryBus(), asyncio.Event()
    wanted = msgspec.structs.replace(order(blobs, kind, PASS_IF_DONE), snapshot="sha256:" + "0" * 64)
    orders[wanted.session_id] = wanted
    await bus.publish(ScoreWorkspace(run_id="r", rollout_id=wanted.session_id.split(".")[0], attempt=1))
    serving = asyncio.create_task(service.serve(settings, bus, blobs, stop=stop, name="verifier-1"))
    async with asyncio.timeout(20), bus.consume(EVENTS) as consumer:
        while not asked:
            await asyncio.sleep(0.02)
        began = time.monotonic()
        scored = (await consumer.get()).message
    assert (scored.cause, scored.scores) == ("blob_missing", {})
    assert time.monotonic() - began > 0.9
    stop.set()
    await asyncio.wait_for(serving, 5)


async def test_two_verifiers_of_a_host_do_not_meet(blobs, kind, tmp_path):
    """A command that the broker delivers again to the other, while the first is at it, spoils neither's sandbox."""
    wanted = order(blobs, kind, b"sleep 0.5; " + PASS_IF_DONE)
    both = [verifier.score(wanted, blobs, tmp_path / "sandboxes") for _ in range(2)]
    async with asyncio.timeout(20):
        scored = await asyncio.gather(*both)
    assert [(each.scores, each.cause) for each in scored] == [({"reward": 1.0}, None)] * 2


async def test_no_command_is_held_for_as_long_as_a_broker_waits(api, blobs, kind, monkeypatch):
    monkeypatch.setattr(service, "HELD_S", 0.1)
    settings, orders, _ = api
    bus, stop = MemoryBus(), asyncio.Event()
    wanted = order(blobs, kind, b"sleep 2; " + PASS_IF_DONE)
    orders[wanted.session_id] = wanted
    await bus.publish(ScoreWorkspace(run_id="r", rollout_id=wanted.session_id.split(".")[0], attempt=1))
    serving = asyncio.create_task(service.serve(settings, bus, blobs, stop=stop, name="verifier-1"))
    async with asyncio.timeout(20):
        while not list((settings.data / "sandboxes").glob("score-*/label.json")):
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
    stop.set()
    await asyncio.wait_for(serving, 5)
    assert (await bus.depth(EVENTS), await bus.depth(WORKSPACES)) == (0, 0)  # cut, and not handed back: the ledger asks again


async def test_a_stop_lets_what_is_in_hand_end_and_takes_nothing_more(api, blobs, kind):
    settings, orders, _ = api
    settings = settings.model_copy(update={"verifier_slots": 1})
    bus, stop = MemoryBus(), asyncio.Event()
    wanted = [order(blobs, kind, b"sleep 1; " + PASS_IF_DONE) for _ in range(2)]
    for one in wanted:
        orders[one.session_id] = one
        await bus.publish(ScoreWorkspace(run_id="r", rollout_id=one.session_id.split(".")[0], attempt=1))
    serving = asyncio.create_task(service.serve(settings, bus, blobs, stop=stop, name="verifier-1", drain_s=15))
    deadline = time.monotonic() + 10
    while not list((settings.data / "sandboxes").glob("score-*/label.json")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    stop.set()
    await asyncio.wait_for(serving, 14)
    assert await bus.depth(WORKSPACES) == 1
    assert await bus.depth(EVENTS) == 1


async def test_a_workspace_is_known_to_be_scored_until_the_ledger_has_the_score(api, blobs, kind):
    """Tests that last longer than the ledger waits, and a ledger that reads late, do not occupy a second verifier."""
    settings, orders, asked = api
    bus, stop = MemoryBus(), asyncio.Event()
    wanted = [msgspec.structs.replace(order(blobs, kind, b"sleep 1; " + PASS_IF_DONE), again_s=0.3) for _ in range(3)]
    serving = asyncio.create_task(service.serve(settings, bus, blobs, stop=stop, name="verifier-1"))

    async def asks(session, number):
        async with asyncio.timeout(10):
            while asked.count(session) < number:
                await asyncio.sleep(0.02)

    for one in wanted:
        orders[one.session_id] = one
        await bus.publish(ScoreWorkspace(run_id="r", rollout_id=one.session_id.split(".")[0], attempt=1))
    first = wanted[0].session_id
    await asks(first, 4)
    assert await bus.depth(EVENTS) == 0
    async with asyncio.timeout(20):
        while await bus.depth(EVENTS) < len(wanted):  # two slots take the third: what waits to be read needs none
            await asyncio.sleep(0.05)
    await asks(first, asked.count(first) + 3)
    del orders[first]  # it was read
    await asyncio.sleep(0.3)
    number = asked.count(first)
    await asyncio.sleep(0.4)
    assert asked.count(first) == number
    stop.set()
    await asyncio.wait_for(serving, 5)


@pytest.mark.parametrize("name", ["grader_root", "grader_images"])
async def test_a_missing_folder_of_graders_is_told_at_once(blobs, tmp_path, name):
    settings = Settings(data=tmp_path / "data", **{name: tmp_path / "nowhere"})
    with pytest.raises(InputError, match=f"EVENER_{name.upper()}"):
        await service.serve(settings, MemoryBus(), blobs, stop=asyncio.Event(), name="verifier-1")
