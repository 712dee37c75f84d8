"""`evener tasks new`: what it writes passes its check as it stands, and nothing that is there is overwritten."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evener.cli.main import app
from evener.errors import InputError
from evener.sandbox.probe import bubblewrap_missing
from evener.tasks import read_task


def evener(*words: Path | str):
    return CliRunner().invoke(app, ["tasks", *map(str, words)])


@pytest.mark.parametrize("kind", ["bubblewrap", "process"])
def test_its_check_passes(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "bubblewrap" and (missing := asyncio.run(bubblewrap_missing())):
        pytest.skip(f"bubblewrap does not work here: {missing}")
    monkeypatch.setenv("EVENER_SANDBOX", kind)
    made = evener("new", tmp_path / "words")
    assert made.exit_code == 0
    assert f"{tmp_path}/words/task.toml" in made.stdout.splitlines()
    assert read_task(tmp_path / "words").toml.verifier.tier == "out_of_process"
    checked = evener("check", tmp_path / "words", "--json")
    assert checked.exit_code == 0, checked.stdout
    found = json.loads(checked.stdout)
    assert (found["passed"], found["solution"], found["untouched"], found["out_of_process"]) == (1, 1, 0, 1)
    assert found["checks"][0]["solution"]["evidence"]["candidate"]["calls"] == 3


def test_other_answers_are_judged_by_what_they_print(tmp_path: Path) -> None:
    task = tmp_path / "words"
    evener("new", task)
    answers = {
        "tr -s ' \\t\\n' '\\n\\n\\n' | grep -c .; true": True,
        "cat > text; awk '{ n += NF } END { print n + 0 }' text": True,
        "echo 3": False,
        "wc -w; exit 1": False,
        "cat /tests/cases/*.out": False,
    }
    for answer, right in answers.items():
        (task / "solution/solve.sh").write_text(f"cat > /workspace/count.sh <<'E'\n{answer}\nE\n")
        assert evener("check", task).exit_code == (0 if right else 1), answer


def test_an_empty_folder_is_filled_and_any_other_is_left_alone(tmp_path: Path) -> None:
    empty, full, file = tmp_path / "empty", tmp_path / "full", tmp_path / "file"
    empty.mkdir()
    full.mkdir()
    (full / "task.toml").write_text("mine")
    file.write_text("mine")
    assert evener("new", empty).exit_code == 0
    for place in (full, file, file / "below"):
        error = evener("new", place).exception
        assert isinstance(error, InputError)
        assert error.exit_code == 2
    assert [path.name for path in full.iterdir()] == ["task.toml"]
    assert (full / "task.toml").read_text() == file.read_text() == "mine"
