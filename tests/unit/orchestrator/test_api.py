"""The API's face: submission, refusals with clear texts, ids, traces, probes."""

import asyncio

import aiohttp
import pytest

from evener.api import Refused
from evener.errors import InputError
from evener_orchestrator.context import Feed
from tests.unit.orchestrator.world import TOKEN, World, everyone, run_file


@pytest.fixture
async def http(world):
    async with aiohttp.ClientSession(world.settings.api) as session:
        yield session


async def test_no_token_no_answer(world, http):
    for path in ("/v1/runs", "/v1/tasks", "/nowhere"):
        assert (await http.get(path)).status == 401
        assert (await http.get(path, headers={"Authorization": "Bearer wrong"})).status == 401
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"):
        assert (await http.get(path)).status == 200


async def test_the_same_name_resumes_and_other_content_is_refused_by_name(world):
    first = await world.submit()
    again = await world.submit()
    assert (again["run_id"], again["resumed"], again["state"]) == (first["run_id"], True, "running")
    with pytest.raises(Refused, match=r"harness .*--new"):
        await world.submit(run_file(harness=[{"name": "codex"}]))
    with pytest.raises(Refused, match=r"policy \(other weights\)"):
        await world.submit(weights=world.blobs.put("weights", b"other"))
    with pytest.raises(Refused, match=r"tasks \(train: 2 differ\)"):
        await world.submit(tasks=[await world.upload_task("task-0")])
    with pytest.raises(Refused, match=r"budget\.calls \(50 -> 7\)"):
        await world.submit(run_file(budget={"calls": 7}))
    faster = await world.submit(run_file(rollouts={"group_size": 2, "concurrent": 9}))
    assert faster["resumed"]
    other = await world.submit(run_file(harness=[{"name": "codex"}]), new=True)
    assert (other["resumed"], other["policy"]) == (False, "first-run-2")
    assert (await world.api.get(f"/v1/runs/{first['run_id'][-8:]}"))["state"] == "cancelled"


async def test_a_second_run_is_refused_while_the_engines_serve_the_first(world):
    first = (await world.submit())["run_id"]
    with pytest.raises(InputError, match=f"run first-run .{first}. is running") as caught:
        await world.submit(run_file(name="other"))
    assert caught.value.cause == "stack_in_use"
    await world.api.post(f"/v1/runs/{first}/pause")
    other = (await world.submit(run_file(name="other")))["run_id"]
    for again in (world.submit(), world.api.post(f"/v1/runs/{first}/resume")):
        with pytest.raises(InputError, match=f"run other .{other}. is running") as caught:
            await again
        assert caught.value.cause == "stack_in_use"
    await world.api.post(f"/v1/runs/{other}/cancel")
    assert (await world.submit())["state"] == "running"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": run_file(harnes=[])}, "did you mean 'harness'"),
        ({"tasks": ["sha256:" + "0" * 64]}, "was not uploaded"),
        ({"weights": "sha256:" + "0" * 64}, "weights: sha256:0+ was not uploaded"),
        ({"weights": "nonsense"}, "weights: "),
        ({"tasks": []}, "tasks: is empty"),
        ({"run": run_file(eval={"tasks": "x"})}, "eval_tasks"),
    ],
)
async def test_a_bad_submission_names_the_field(world, changes, message):
    with pytest.raises(InputError, match=message):
        await world.submit(**changes)


async def test_a_malformed_body_names_the_field(world):
    with pytest.raises(InputError, match="runner"):
        await world.api.post("/v1/attempts/nobody.1/claim", {})
    with pytest.raises(InputError, match="nobody"):
        await world.api.post("/v1/attempts/nobody.1/claim", {"runner": "r"})


async def test_uploads_are_checked(world, http):
    http.headers["Authorization"] = f"Bearer {TOKEN}"
    reply = await http.put("/v1/tasks/sha256:" + "0" * 64, data=b"\x81\xa2id\xa1x")
    assert reply.status == 400
    assert "agent" in (await reply.json())["detail"]
    assert (await http.put("/v1/policies?name=p", data=b"no tar file")).status == 400
    digest = await world.upload_task("t")
    (task,) = await world.api.get("/v1/tasks")
    assert (task["digest"], task["task_id"], task["family"]) == (digest, "t", "files")
    assert world.blobs.get("agent", task["agent_bundle"]) == b"agent t"
    assert world.blobs.get("grader", task["grader_bundle"]) == b"grader t"


async def test_a_rollout_can_be_looked_at(world, http):
    await world.submit(run_file(train={"steps": 1, "groups_per_step": 1, "max_staleness": 0}))
    async with everyone(world):
        await world.until_over()
    (rollout, *_) = await world.api.get("/v1/rollouts")
    assert (rollout["tier"], rollout["tampered"]) == ("in_process", False)
    assert (rollout["outcome"], rollout["trained"], rollout["task_id"][:5]) == ("finished", True, "task-")
    suffix = rollout["rollout_id"][-9:]
    shown = await world.api.get(f"/v1/rollouts/{suffix}")
    assert shown["scores"][0]["scores"] == {"reward": shown["score"]}
    assert shown["scores"][0]["evidence"] == {"tier": "in_process", "tampered": False}
    trace = await world.api.get(f"/v1/rollouts/{suffix}/trace")
    (call,) = trace["calls"]
    assert call["tokens"] == {
        "start": 0,
        "ids": [0, 1, 2, 3, 4, 7, 8, 9],
        "mask": [0] * 5 + [1] * 3,
        "logprobs": [0.0] * 5 + [-0.5, -0.25, 0.0],
        "versions": [0] * 5 + [1] * 3,
    }
    assert call["reply"]["content"] == "ok"
    assert trace["texts"] == {"t1": "You are an agent."}
    (sequence,) = (await world.api.get("/v1/rollouts/latest/sequences"))["sequences"]
    assert {len(sequence[name]) for name in ("ids", "mask", "logprobs", "versions")} == {8}
    http.headers["Authorization"] = f"Bearer {TOKEN}"
    assert await (await http.get(f"/v1/rollouts/{suffix}/logs")).read() == b"hello\n"
    assert await (await http.get(f"/v1/rollouts/{suffix}/snapshot")).read() == b"workspace"
    (pi,) = [each for each in await world.api.get("/v1/harnesses") if each["name"] == "pi"]
    assert pi == {"name": "pi", "dialect": "chat", "version": "1.6.0", "profiles": ["default", "minimal"]}
    (row,) = await world.api.get("/v1/harnesses/matrix")
    assert (row["harness"], row["n"], row["pass_at_1"]) == ("pi", 2, 0.5)
    versions = await world.api.get("/v1/policies")
    assert [(each["version"], each["state"]) for each in versions] == [(2, "published"), (1, "published")]
    assert (await world.api.get("/v1/policies/first-run/versions/2"))["step"] == 1


async def test_changes_can_be_waited_for(world):
    waiting = asyncio.create_task(world.api.get("/v1/events", after="0", timeout_s="10"))
    await asyncio.sleep(0.1)
    run = await world.submit()
    (change, *_) = await waiting
    assert (change["kind"], change["run_id"]) == ("run", run["run_id"])
    assert await world.api.get("/v1/events", after=str(2**50), timeout_s="0") == []


async def test_a_reader_gets_only_what_is_new_of_its_run():
    feed = Feed()
    feed.add([{"kind": "run", "run_id": "a"}, {"kind": "run", "run_id": "b"}])
    (change,) = await feed.after(0, run_id="b", timeout=0)
    assert await feed.after(change["number"], run_id="b", timeout=0.01) == []


async def test_readiness_names_what_is_missing(world, http):
    async def refuse():
        raise ConnectionRefusedError

    world.context.ping_redis = refuse
    reply = await http.get("/readyz")
    assert (reply.status, (await reply.json())["missing"]) == (503, ["redis: ConnectionRefusedError"])


async def test_an_occupied_port_is_the_users_fault(world, tmp_path):
    other = World(tmp_path / "other", migrated=False)
    other.settings = other.settings.model_copy(update={"api_port": world.settings.api_port})
    with pytest.raises(InputError, match="EVENER_API_PORT"):
        await other.start()
    assert not (tmp_path / "other" / "ledger.db").exists()
