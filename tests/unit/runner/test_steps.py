"""The agent of a task of several steps is started for each, in one session and one workspace, as long as all goes well."""

import io
import tarfile

import pytest

from evener.api import Budget
from evener.errors import Outcome
from evener.snapshots import split
from evener.tasks import TaskToml

pytestmark = pytest.mark.usefixtures("runner")
TOML = b"[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n[[steps]]\nname = 'three'\n"
BUBBLEWRAP = pytest.mark.parametrize("world", ["bubblewrap"], indirect=True)
CALL = "call('x'); print('done');"


def task(one, two, three, **files):
    texts = {"one": one, "two": two, "three": three}
    steps = {f"steps/{name}/instruction.md": f"{CALL}{text}".encode() for name, text in texts.items()}
    return {"task.toml": TOML, "environment/workspace/given": b"1", **steps, **files}


def contents(world, report):
    steps = {"steps": [{"name": name} for name in ("one", "two", "three")]}
    found = []
    for left in split(TaskToml.model_validate(steps), world.blobs.get("snapshots", report.snapshot)):
        found.append(files_of(left.workspace))
    return found


def files_of(tar):
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive if member.isreg()}


async def test_each_step_finds_what_the_one_before_left_and_what_its_own_adds(world):
    """Whatever an agent has put in the way of a later step's files is gone, and a link of his leads nowhere."""
    files = task(
        "os.mkdir('data'); os.symlink('/tmp', 'link'); os.mkdir('data/late'); open('a', 'w').write('1')",
        "open('a', 'a').write('2'); open('b', 'w').write(open('data/late').read() + open('link/new').read())",
        "open(os.path.expanduser('~/seen'), 'a'); os.remove('a')",
        **{"steps/two/workdir/data/late": b"late ", "steps/two/workdir/link/new": b"new"},
    )
    session = await world.add("never given", files)
    report = await world.event()
    assert (report.outcome, report.cause, report.sealed.committed) == (Outcome.FINISHED, None, 3)
    one, two, three = contents(world, report)
    assert one == {"given": b"1", "a": b"1"}
    assert two == {"given": b"1", "a": b"12", "b": b"late new", "data/late": b"late ", "link/new": b"new"}
    assert three == {name: content for name, content in two.items() if name != "a"}
    assert [step.split()[0] for step in world.log if "heartbeat" not in step] == ["claim", "open", "seal"]
    assert world.calls[session] == 3
    assert world.blobs.get("logs", report.logs).count(b"done") == 3


@BUBBLEWRAP
async def test_a_step_that_does_not_end_well_is_the_last_and_the_rest_is_scored_as_it_stands(world):
    files = task("open('a', 'w')", "open('b', 'w'); sys.exit(3)", "open('c', 'w')", **{"steps/three/workdir/new": b""})
    session = await world.add("", files)
    report = await world.event()
    assert (report.outcome, report.cause, report.exit_code) == (Outcome.AGENT_ERROR, "agent_exit", 3)
    assert [sorted(found) for found in contents(world, report)] == [
        ["a", "given"],
        ["a", "b", "given"],
        ["a", "b", "given", "new"],
    ]
    assert world.calls[session] == 2


@BUBBLEWRAP
async def test_all_steps_share_the_time_of_the_budget_and_each_may_have_less(world):
    files = task("open('a', 'w')", "time.sleep(60)", "open('c', 'w')")
    files["task.toml"] = TOML.replace(b"'two'", b"'two'\nagent.timeout_sec = 1")
    await world.add("", files, budget=Budget(wall_s=30))
    report = await world.event(20)
    assert (report.outcome, report.cause) == (Outcome.BUDGET, "budget_wall")
    assert [sorted(found) for found in contents(world, report)] == [["a", "given"]] * 3


@BUBBLEWRAP
async def test_infra_is_not_a_grade_where_an_agent_does_not_begin_a_step(world):
    files = task("", "", "")
    files["steps/two/instruction.md"] = b"pass"
    await world.add("", files)
    report = await world.event()
    assert (report.outcome, report.cause, report.snapshot) == (Outcome.INFRA_ERROR, "agent_no_call", None)


async def test_a_steps_set_up_script_runs_before_its_agent_in_what_the_one_before_left(world):
    files = task(
        "open('a', 'w').write(open('made').read())",
        "open('b', 'w').write(open('seen').read())",
        "",
        **{
            "steps/one/workdir/setup.sh": b"echo made > made",
            "steps/two/workdir/setup.sh": b"cat a more > seen; rm a",
            "steps/two/workdir/more": b"more",
        },
    )
    await world.add("", files)
    report = await world.event()
    assert (report.outcome, report.cause) == (Outcome.FINISHED, None)
    one, two, three = contents(world, report)
    assert (one["a"], sorted(one)) == (b"made\n", ["a", "given", "made", "setup.sh"])
    assert (two["b"], sorted(two)) == (b"made\nmore", ["b", "given", "made", "more", "seen", "setup.sh"])
    assert three == two


@BUBBLEWRAP
async def test_a_set_up_script_that_fails_is_the_authors_fault_only_where_no_agent_ran_before(world):
    """Else an agent that does badly could break what comes next, and have no score at all."""
    files = task("", "", "open('c', 'w')", **{"steps/one/workdir/setup.sh": b"echo no such thing >&2; exit 3"})
    session = await world.add("", files)
    report = await world.event()
    assert (report.outcome, report.cause) == (Outcome.TASK_ERROR, "task_setup")
    assert report.detail == "steps/one/workdir/setup.sh ended with 3: no such thing"
    assert world.calls[session] == 0
    files["steps/two/workdir/setup.sh"] = files.pop("steps/one/workdir/setup.sh")
    await world.add("", files)
    report = await world.event()
    assert (report.outcome, report.cause) == (Outcome.FINISHED, None)
    assert [sorted(found) for found in contents(world, report)][2] == ["c", "given", "setup.sh"]
    assert b"steps/two/workdir/setup.sh ended with 3: no such thing" in world.blobs.get("logs", report.logs)


@BUBBLEWRAP
async def test_artifacts_outside_of_the_workspace_are_archived_beside_it(world):
    said = {
        "artifacts": ["/data/out/answer", "/logs/artifacts"],
        "steps": [{"name": "one"}, {"name": "two", "artifacts": ["/data/more"]}],
    }
    toml = b"artifacts = ['/data/out/answer', '/logs/artifacts']\n[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n"
    files = {
        "task.toml": toml + b"artifacts = ['/data/more']\n",
        "environment/workspace/given": b"1",
        "steps/one/instruction.md": f"{CALL}os.mkdir('/data/out'); open('/data/out/answer', 'w').write('42')".encode(),
        "steps/two/instruction.md": f"{CALL}os.mkfifo('/data/pipe'); open('/logs/artifacts/log', 'w').write('said')".encode(),
    }
    await world.add("", files)
    report = await world.event()
    assert (report.outcome, report.cause, report.detail) == (Outcome.FINISHED, None, "1 left out of the snapshot")
    one, two = split(TaskToml.model_validate(said), world.blobs.get("snapshots", report.snapshot))
    assert files_of(one.workspace) == files_of(two.workspace) == {"given": b"1"}
    assert {place: files_of(tar) for place, tar in one.outside.items()} == {
        "/data": {"out/answer": b"42"},
        "/logs/artifacts": {},
    }
    assert files_of(two.outside["/logs/artifacts"]) == {"log": b"said"}
    assert b"two: /data: pipe: not a regular file" in world.blobs.get("logs", report.logs)
