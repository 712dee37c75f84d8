"""Write the task directories of the first run, in the Harbor task format.

Invariant: tasks/ is exactly what this script makes, one task for each cue of chores.py; `--check` compares them byte
for byte. The format is Harbor's, with one convention: environment/workspace/ holds the files of /workspace at the
start, and the Dockerfile copies them there, so a sandbox without Docker can copy the same folder.

Every task has the same test.sh. It compares files of the workspace with tests/expected/ and looks that the paths in
tests/absent.txt are gone; it runs nothing, and follows no link, because a link could point at the answer.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from chores import FAMILIES, Chore, Family, Split, compose, halves

HERE = Path(__file__).parent
SEED = 7

TASK_TOML = """schema_version = "1.4"

[metadata]
category = "{family}"
difficulty = "easy"

[agent]
timeout_sec = 120.0

[verifier]
tier = "out_of_process"
timeout_sec = 30.0

[environment]
cpus = 1
memory_mb = 512
storage_mb = 64
"""

DOCKERFILE = """FROM debian:bookworm-slim
WORKDIR /workspace
COPY workspace/ /workspace/
"""

TEST_SH = """#!/bin/sh
# Reward 1 if each file under /tests/expected is in /workspace with the same text (trailing newlines do not count) and
# no path of /tests/absent.txt is there, else 0. Nothing of the workspace is run; links are refused.
reward=1
cd /tests/expected || exit 1
for wanted in * */*; do
    [ -f "$wanted" ] || continue
    found=/workspace/$wanted
    if [ ! -f "$found" ] || [ "$(realpath "$found")" != "$found" ]; then
        reward=0
    elif [ "$(head -c 4096 "$found")" != "$(cat "$wanted")" ]; then
        reward=0
    fi
done
while read -r gone; do
    if [ -e "/workspace/$gone" ] || [ -L "/workspace/$gone" ]; then reward=0; fi
done < /tests/absent.txt
mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
"""


def chores(family: Family, split: Split) -> Iterator[Chore]:
    """One chore for each cue of a split; openings, requests and names go round in a fixed random order."""
    rng = random.Random(f"{SEED} {family.name} {split}")
    half, _ = halves(split)
    seen: set[str] = set()
    for choice in family.choices:
        for cue in family.cues[choice][half]:
            while True:
                opening, request = rng.choice(family.openings[half]), rng.choice(family.requests[half])
                chore = compose(family, choice, cue, opening, request, rng.choice(family.names[half]))
                # Only where the cue is in a file may two tasks share an instruction: then it does not tell the answer.
                if family.cue_in_file or chore.instruction not in seen:
                    break
            seen.add(chore.instruction)
            yield chore


def solution(chore: Chore) -> str:
    """A script that does the chore."""
    work = {
        "log-level": f"echo {chore.choice} > /workspace/log_level",
        "note": f"mv /workspace/inbox/note.txt /workspace/{chore.choice}/",
        "backup": f"sed -i 's/^every = day$/every = {chore.choice}/' /workspace/backup.conf",
        "ticket": f"echo {chore.choice} > /workspace/team.txt",
    }
    return f"#!/bin/sh\n{work[chore.family]}\n"


def task_files(chore: Chore) -> dict[str, str]:
    """The files of a task directory, by path."""
    files = {
        "task.toml": TASK_TOML.format(family=chore.family),
        "instruction.md": chore.instruction + "\n",
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": TEST_SH,
        "tests/absent.txt": "".join(f"{path}\n" for path in chore.absent),
        "solution/solve.sh": solution(chore),
    }
    files |= {f"environment/workspace/{path}": text for path, text in chore.files.items()}
    return files | {f"tests/expected/{path}": text for path, text in chore.expected.items()}


def write_tasks(out: Path) -> None:
    """Write both splits below `out`."""
    for split in ("train", "held-out"):
        for family in FAMILIES.values():
            for number, chore in enumerate(chores(family, split), 1):
                for path, text in task_files(chore).items():
                    target = out / split / f"{family.name}-{number:02d}" / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(text)
                    if path.endswith(".sh"):
                        target.chmod(0o755)


def read_tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def reward(task: Path, solve: bool) -> str:
    """What the task's own test says in a sandbox, with or without its solution run first."""
    with tempfile.TemporaryDirectory() as folder:
        box = Path(folder)
        shutil.copytree(task / "environment/workspace", box / "workspace")
        (box / "logs").mkdir()
        argv = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--dev", "/dev"]
        for name in ("bin", "lib", "lib64"):
            argv += ["--symlink", f"usr/{name}", f"/{name}"]
        argv += ["--bind", f"{box}/workspace", "/workspace", "--bind", f"{box}/logs", "/logs"]
        argv += ["--ro-bind", str(task / "tests"), "/tests", "--ro-bind", str(task / "solution"), "/solution"]
        script = "sh /solution/solve.sh && sh /tests/test.sh" if solve else "sh /tests/test.sh"
        subprocess.run([*argv, "sh", "-c", script], check=True, timeout=30)
        return (box / "logs/verifier/reward.txt").read_text().strip()


def check() -> list[str]:
    """What is wrong with the committed tasks; needs bubblewrap."""
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        if read_tree(Path(folder)) != read_tree(HERE / "tasks"):
            faults.append(f"{HERE / 'tasks'} is not what make_tasks.py makes: delete the folder and run make_tasks.py")
    for task in sorted(HERE.glob("tasks/*/*")):
        for solve, right in ((True, "1"), (False, "0")):
            if (given := reward(task, solve)) != right:
                faults.append(f"{task}: reward {given} {'with' if solve else 'without'} its solution, not {right}")
    return faults


def main() -> None:
    """Write the tasks, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="compare, and run every test and solution")
    if not parser.parse_args().check:
        write_tasks(HERE / "tasks")
        return
    if faults := check():
        sys.exit("\n".join(faults))
    print(f"tasks: checked={len(list(HERE.glob('tasks/*/*')))}")


if __name__ == "__main__":
    main()
