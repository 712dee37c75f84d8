"""`evener tasks check`: a line names each task whose solution does not score 1, or that scores without one."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from evener.cli.main import app
from evener.errors import InputError
from evener.sandbox.probe import bubblewrap_missing

PASS_IF_DONE = "[ -f /workspace/done ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
SOLVE = "cp /solution/answer /workspace/done\n"
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "first-run" / "tasks" / "held-out"


@pytest.fixture(params=["bubblewrap", "process"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "bubblewrap" and (missing := asyncio.run(bubblewrap_missing())):
        pytest.skip(f"bubblewrap does not work here: {missing}")
    monkeypatch.setenv("EVENER_SANDBOX", request.param)
    return request.param


def make(folder: Path, *, toml: str = "", test: str = PASS_IF_DONE, solve: str | None = SOLVE, given: str = "given") -> Path:
    files = {"task.toml": toml, "instruction.md": "Do it.", f"environment/workspace/{given}": "1", "tests/test.sh": test}
    if solve is not None:
        files |= {"solution/solve.sh": solve, "solution/answer": "42"}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def check(*arguments: Path | str) -> Result:
    return CliRunner().invoke(app, ["tasks", "check", *map(str, arguments)])


def document(*arguments: Path | str) -> dict:
    return json.loads(check(*arguments, "--json").stdout)


def test_a_sound_task_passes(tmp_path: Path, kind: str) -> None:
    done = check(make(tmp_path / "sound"))
    assert done.exit_code == 0
    (line,) = done.stdout.splitlines()
    assert line.startswith("1 of 1 tasks pass; the solution scores 1 in 1 of 1, the untouched workspace in 0 of 1 (")
    assert line.endswith(f"sandbox {kind})")


def test_the_solution_runs_where_an_agent_would_and_is_graded_from_the_snapshot(tmp_path: Path) -> None:
    """What it leaves beside the workspace does not reach the tests."""
    elsewhere = make(tmp_path / "elsewhere", solve="echo 1 > /home/agent/done; pwd > here; cat given >> here\n")
    found = document(elsewhere)["checks"][0]
    assert found["solution"]["evidence"]["changes"]["added"] == {"count": 1, "names": ["here"]}
    assert found["untouched"]["evidence"]["changes"]["added"]["count"] == 0
    assert not found["passed"]


def test_each_failing_task_is_named_with_its_reason(tmp_path: Path) -> None:
    make(tmp_path / "broken", solve="echo cannot >&2; exit 3\n")
    make(tmp_path / "easy", given="done")
    make(tmp_path / "half", test="echo 0.5 > /logs/verifier/reward.txt; echo half of it >&2\n")
    make(tmp_path / "hurried", toml="agent.timeout_sec = 0.5\n", solve="sleep 60\n")
    make(tmp_path / "malformed", toml="[verifier]\ntimeout_sec = 0\n")
    make(tmp_path / "silent", test="[ -f /workspace/done ] && echo 1 > /logs/verifier/reward.txt\n")
    make(tmp_path / "sound")
    make(tmp_path / "unsolved", solve=None)
    done = check(tmp_path, "-j", "4")
    assert done.exit_code == 1
    *lines, last = done.stdout.splitlines()
    why = dict(line.split(": ", 1) for line in lines)
    assert why["broken"] == "solution: scores 0, not 1; solve.sh ended with 3: cannot"
    assert why["easy"] == "untouched: scores 1 as the solution does"
    assert why["half"] == "solution: scores 0.5, not 1; tests: half of it"
    assert why["hurried"] == "solution: scores 0, not 1; solve.sh ran out of time"
    assert "timeout_sec" in why["malformed"]
    assert why["silent"].startswith("untouched: reward_missing: ")
    assert why["unsolved"] == "solution: task_setup: solution/solve.sh is missing"
    assert why.keys() == {path.name for path in tmp_path.iterdir()} - {"sound"}
    assert last.startswith("1 of 8 tasks pass; the solution scores 1 in 3 of 8, the untouched workspace in 1 of 8 (")


def test_the_document(tmp_path: Path) -> None:
    found = document(make(tmp_path / "sound"), make(tmp_path / "easy", given="done"))
    assert (found["tasks"], found["passed"], found["solution"], found["untouched"]) == (2, 1, 2, 1)
    sound, easy = found["checks"]
    assert (sound["task"], sound["passed"], sound["why"]) == ("sound", True, "")
    assert (easy["task"], easy["passed"]) == ("easy", False)
    assert (sound["solution"]["scores"], sound["untouched"]["scores"]) == ({"reward": 1.0}, {"reward": 0.0})


def test_a_task_of_several_steps(tmp_path: Path) -> None:
    """Each step is solved in what the one before left, and graded by its own tests."""
    toml = "[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n"
    test = "[ $(cat /workspace/sum) = $(cat /tests/wanted) ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n"
    for name, second in (("sound", "more"), ("unsound", "given")):
        folder = make(tmp_path / name, toml=toml, test=test, solve=None)
        for step, wanted, added, workdir in (("one", "1", "given", "sum"), ("two", "3", second, "more")):
            solve = f"echo $(($(cat sum) + $(cat {added}))) > sum\n"
            files = {"instruction.md": "Add.", "tests/wanted": wanted, "solution/solve.sh": solve}
            files |= {"workdir/setup.sh": "echo 0 > sum\n"} if workdir == "sum" else {"workdir/more": "2"}
            for path, content in files.items():
                (folder / "steps" / step / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / "steps" / step / path).write_text(content)
    done = check(tmp_path)
    assert done.exit_code == 1
    why, last = done.stdout.splitlines()
    assert why == "unsound: solution: scores 0.5, not 1; step two: scores 0"
    assert last.startswith("1 of 2 tasks pass; the solution scores 1 in 1 of 2, the untouched workspace in 0 of 2 (")


def test_nothing_is_written_where_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make(tmp_path / "sound")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = {path: path.read_text() for path in task.rglob("*") if path.is_file()}
    assert check(task).exit_code == 0
    assert list((tmp_path / "here").iterdir()) == []
    assert {path: path.read_text() for path in task.rglob("*") if path.is_file()} == before


def test_what_is_no_folder_of_tasks_is_bad_input(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        error = check(folder).exception
        assert isinstance(error, InputError)
        assert error.exit_code == 2


def test_tasks_of_the_first_run_pass() -> None:
    done = check(EXAMPLE / "backup-01", EXAMPLE / "log-level-01", "-j", "2")
    assert (done.exit_code, done.stdout.split(" (")[0].split(";")[0]) == (0, "2 of 2 tasks pass")
