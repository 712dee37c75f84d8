import io
import os
import tarfile
from pathlib import Path

import pytest

from evener.archive import UnsafeArchive
from evener.errors import InputError
from evener.tasks import agent_bundle, grader_bundle, read_instructions, read_task, read_tasks, task_digest, unpack


def make(folder: Path) -> Path:
    for name, text in {
        "task.toml": 'schema_version = "1.4"\n[metadata]\ncategory = "modes"\n[verifier]\ntimeout_sec = 5\n',
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM debian:bookworm-slim\n",
        "environment/workspace/a.txt": "a\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "true\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_read(tmp_path):
    task = read_task(make(tmp_path / "one"))
    assert (task.id, task.family, task.toml.verifier.timeout_sec) == ("one", "modes", 5)
    assert [t.id for t in read_tasks(tmp_path)] == ["one"]
    assert [t.id for t in read_tasks(tmp_path / "one")] == ["one"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("task.toml", "x = [", "task.toml: "),
        ("task.toml", "[verifier]\ntimeout_sec = -1\n", "task.toml: verifier.timeout_sec: "),
        ("task.toml", "[verifier]\ntimeout_sec = 'soon'\n", "task.toml: verifier.timeout_sec: "),
        ("task.toml", None, "task.toml: No such file"),
        ("instruction.md", " \n", "instruction.md: is empty"),
        ("instruction.md", None, "instruction.md"),
        ("tests/test.sh", None, "tests/test.sh: is missing"),
    ],
)
def test_errors_name_file_and_field(tmp_path, name: str, text: str | None, says: str):
    path = make(tmp_path / "one") / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_tasks(tmp_path)
    assert says in str(caught.value)


def test_an_empty_folder_and_none(tmp_path):
    with pytest.raises(InputError, match="holds no task directory"):
        read_tasks(tmp_path)
    with pytest.raises(InputError, match="is not a folder of tasks"):
        read_tasks(tmp_path / "absent")


def names_in(bundle: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(bundle)) as archive:
        return set(archive.getnames())


def test_held_out_the_agent_side_holds_no_test_and_no_solution(tmp_path):
    task = read_task(make(tmp_path / "one"))
    assert names_in(agent_bundle(task)) == {
        "task.toml",
        "instruction.md",
        "environment",
        "environment/Dockerfile",
        "environment/workspace",
        "environment/workspace/a.txt",
    }
    assert names_in(grader_bundle(task)) == {"task.toml", "tests", "tests/test.sh", "solution", "solution/solve.sh"}


def test_the_digest_depends_on_content_alone(tmp_path):
    one, two = read_task(make(tmp_path / "a" / "one")), read_task(make(tmp_path / "b" / "one"))
    os.utime(two.folder / "instruction.md", (1, 1))
    digests = [task_digest(agent_bundle(t), grader_bundle(t)) for t in (one, two)]
    assert digests[0] == digests[1]
    (two.folder / "tests/test.sh").write_text("echo 0 > /logs/verifier/reward.txt\n")
    assert task_digest(agent_bundle(two), grader_bundle(two)) != digests[0]


def test_unpack_gives_the_files_back_and_refuses_to_leave_the_folder(tmp_path):
    task = read_task(make(tmp_path / "one"))
    unpack(agent_bundle(task), tmp_path / "out")
    assert (tmp_path / "out/environment/workspace/a.txt").read_text() == "a\n"
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"), io.BytesIO(b""))
    with pytest.raises(UnsafeArchive):
        unpack(evil.getvalue(), tmp_path / "out")
    assert not (tmp_path / "escaped").exists()


def test_a_link_is_not_bundled(tmp_path):
    folder = make(tmp_path / "one")
    (folder / "environment/workspace/link").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="only files and folders"):
        agent_bundle(read_task(folder))


STEPS = """
artifacts = ["out"]
agent.timeout_sec = 60
verifier = {timeout_sec = 5, env = {A = "1"}}
[[steps]]
name = "one"
min_reward = 0.5
[[steps]]
name = "two"
agent.timeout_sec = 30
verifier = {tier = "out_of_process", env = {B = "2"}}
artifacts = ["more"]
min_reward = {style = 1}
"""


def make_steps(folder: Path, toml: str = STEPS) -> Path:
    make(folder)
    (folder / "instruction.md").unlink()
    (folder / "task.toml").write_text(toml)
    for name in ("one/instruction.md", "two/instruction.md", "two/workdir/new", "two/tests/test.sh", "two/solution/solve.sh"):
        (folder / "steps" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "steps" / name).write_text(name)
    return folder


def test_what_a_step_says_goes_before_what_the_task_says(tmp_path):
    task = read_task(make_steps(tmp_path / "one"))
    one, two = task.toml.each_step()
    assert (one.min_reward, two.min_reward) == ({"reward": 0.5}, {"style": 1})
    assert (one.toml.agent.timeout_sec, two.toml.agent.timeout_sec) == (60, 30)
    assert (one.toml.verifier.tier, two.toml.verifier.tier) == ("in_process", "out_of_process")
    assert (two.toml.verifier.timeout_sec, two.toml.verifier.env) == (5, {"A": "1", "B": "2"})
    assert [[each.source for each in step.toml.artifacts] for step in (one, two)] == [["out"], ["out", "more"]]
    assert read_instructions(task.folder, task.toml) == ["one/instruction.md", "two/instruction.md"]
    assert task.instruction == "one/instruction.md\n\ntwo/instruction.md\n"


def test_held_out_of_several_steps_too(tmp_path):
    task = read_task(make_steps(tmp_path / "one"))
    agent = {name for name in names_in(agent_bundle(task)) if not name.startswith("environment")}
    steps = {"steps/one/instruction.md", "steps/two/instruction.md", "steps/two/workdir", "steps/two/workdir/new"}
    assert agent == {"task.toml", *steps}
    unpack(agent_bundle(task), tmp_path / "out")
    assert read_instructions(tmp_path / "out", task.toml) == ["one/instruction.md", "two/instruction.md"]
    grader = {name for name in names_in(grader_bundle(task)) if name.startswith("steps")}
    assert grader == {f"steps/two/{name}" for name in ("tests", "tests/test.sh", "solution", "solution/solve.sh")}


@pytest.mark.parametrize(
    ("gone", "toml", "says"),
    [
        ("steps/two/instruction.md", STEPS, "steps/two/instruction.md: "),
        ("tests/test.sh", STEPS, "steps/one/tests/test.sh: is missing"),
        (None, STEPS.replace('"two"', '"one"'), "two have one name"),
        (None, STEPS.replace('"two"', '"../two"'), "steps.1.name: "),
        (None, STEPS.replace("min_reward = 0.5", "verifier.user = 'postgres'"), "steps.0.verifier.user: "),
        (None, 'multi_step_reward_strategy = "best"\n' + STEPS, "multi_step_reward_strategy: "),
    ],
)
def test_errors_name_the_step(tmp_path, gone, toml, says):
    folder = make_steps(tmp_path / "one", toml)
    if gone:
        (folder / gone).unlink()
    with pytest.raises(InputError) as caught:
        read_task(folder)
    assert says in str(caught.value)


def test_an_image_that_nobody_built_is_refused(tmp_path):
    folder = make(tmp_path / "one")
    (folder / "tests/Dockerfile").write_text("FROM debian\nRUN apt-get install jq\n")
    read_task(folder)  # as in Harbor it means nothing where the grader shares the agent's environment
    (folder / "task.toml").write_text("verifier.environment_mode = 'separate'")
    with pytest.raises(InputError, match="tests/Dockerfile: no image is built when a grader is needed"):
        read_task(folder)
    (folder / "task.toml").write_text("verifier.environment.docker_image = 'example.org/judge:1@sha256:ab'")
    (folder / "tests/test.sh").unlink()  # the image has it
    assert read_task(folder).toml.verifier.image == "example.org/judge:1@sha256:ab"


@pytest.mark.parametrize("image", ["", "/etc", "../up", "a/../b", "a//b", "a/.", ":a"])
def test_the_name_of_an_image_leads_nowhere_else(tmp_path, image):
    folder = make(tmp_path / "one")
    (folder / "task.toml").write_text(f"verifier.environment.docker_image = '{image}'")
    with pytest.raises(InputError, match=r"task.toml: verifier\.environment\.docker_image: "):
        read_task(folder)


@pytest.mark.parametrize(
    ("usual", "own", "separate", "image"),
    [
        ("{}", "{}", False, None),
        ("{environment = {docker_image = 'a'}}", "{}", True, "a"),
        ("{environment = {docker_image = 'a'}}", "{environment = {cpus = 1}}", True, "a"),
        ("{environment = {docker_image = 'a'}}", "{environment = {docker_image = 'b'}}", True, "b"),
        ("{environment = {docker_image = 'a'}}", "{environment_mode = 'shared'}", False, None),
        ("{environment_mode = 'shared'}", "{environment = {docker_image = 'b'}}", True, "b"),
        ("{environment_mode = 'separate'}", "{environment_mode = 'shared'}", False, None),
        ("{environment_mode = 'separate'}", "{}", True, None),
    ],
)
def test_where_a_steps_grader_runs(tmp_path, usual, own, separate, image):
    """As in Harbor: the step's mode, else that its environment implies, else the task's; an image is inherited."""
    toml = f"verifier = {usual}\n[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\nverifier = {own}\n"
    step = read_task(make_steps(tmp_path / "one", toml)).toml.each_step()[1]
    assert (step.toml.verifier.separate, step.toml.verifier.image) == (separate, image)
