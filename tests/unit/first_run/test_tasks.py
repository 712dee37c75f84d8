"""The committed tasks are what the generator makes, their hidden tests judge rightly, and the splits share nothing."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import make_tasks
import pytest
from chores import FAMILIES

TASKS = make_tasks.HERE / "tasks"
ALL = sorted(TASKS.glob("*/*"))


def grade(task: Path, box: Path, prepare: str = "") -> str:
    """Run `prepare` and the task's test.sh in `box`, with the stock paths rewritten to lie there."""
    shutil.copytree(task / "environment/workspace", box / "workspace")
    shutil.copytree(task / "tests", box / "tests")
    stock = (task / "tests/test.sh").read_text()
    moved = stock.replace("/workspace", f"{box}/workspace").replace("/tests", f"{box}/tests").replace("/logs", f"{box}/logs")
    environment = {"PATH": os.environ["PATH"]}
    if prepare:
        subprocess.run(["sh", "-c", prepare.replace("/workspace", f"{box}/workspace")], check=True, env=environment)
    subprocess.run(["sh", "-c", moved], check=True, timeout=20, env=environment)
    return (box / "logs/verifier/reward.txt").read_text().strip()


def test_the_committed_tasks_are_what_the_generator_makes(tmp_path: Path) -> None:
    make_tasks.write_tasks(tmp_path)
    assert make_tasks.read_tree(tmp_path) == make_tasks.read_tree(TASKS)


@pytest.mark.parametrize("task", ALL, ids=lambda task: f"{task.parent.name}/{task.name}")
def test_the_solution_scores_one_and_the_untouched_workspace_nothing(task: Path, tmp_path: Path) -> None:
    solve = (task / "solution/solve.sh").read_text()
    assert grade(task, tmp_path / "solved", solve) == "1"
    assert grade(task, tmp_path / "untouched") == "0"


def test_every_wrong_choice_scores_nothing(tmp_path: Path) -> None:
    for family in FAMILIES.values():
        for number, chore in enumerate(make_tasks.chores(family, "held-out"), 1):
            if number % 3 == 1:
                for wrong in set(family.choices) - {chore.choice}:
                    solve = make_tasks.solution(chore).replace(chore.choice, wrong)
                    task = TASKS / "held-out" / f"{family.name}-{number:02d}"
                    assert grade(task, tmp_path / f"{family.name}{number}{wrong}", solve) == "0"


def test_a_missing_trailing_newline_is_forgiven_and_a_link_to_the_answer_is_not(tmp_path: Path) -> None:
    task = TASKS / "held-out/log-level-01"
    answer = (task / "tests/expected/log_level").read_text().strip()
    assert grade(task, tmp_path / "bare", f"printf {answer} > /workspace/log_level") == "1"
    link = f"rm /workspace/log_level; ln -s {tmp_path}/link/tests/expected/log_level /workspace/log_level"
    assert grade(task, tmp_path / "link", link) == "0"


def test_a_note_that_also_stays_in_the_inbox_or_lies_in_two_folders_scores_nothing(tmp_path: Path) -> None:
    task = TASKS / "held-out/note-01"
    assert (task / "tests/expected/today/note.txt").exists()
    assert grade(task, tmp_path / "copy", "cp /workspace/inbox/note.txt /workspace/today/") == "0"
    both = "cp /workspace/inbox/note.txt /workspace/trash/; mv /workspace/inbox/note.txt /workspace/today/"
    assert grade(task, tmp_path / "both", both) == "0"


def test_train_and_held_out_share_no_instruction_and_no_cue() -> None:
    def instructions(split: str) -> set[str]:
        return {path.read_text() for path in TASKS.glob(f"{split}/*/instruction.md")}

    assert instructions("train")
    assert instructions("held-out")
    assert not instructions("train") & instructions("held-out")
    for family in FAMILIES.values():
        for halves in (*family.cues.values(), family.openings, family.requests, family.names):
            assert not set(halves[0]) & set(halves[1])


def test_no_instruction_names_its_choice_unless_it_names_them_all() -> None:
    for family in FAMILIES.values():
        for split in ("train", "held-out"):
            for chore in make_tasks.chores(family, split):
                words = set(re.findall(r"\w+", chore.instruction))
                named = {choice for choice in family.choices if choice in words}
                assert chore.choice not in named or named == set(family.choices)
