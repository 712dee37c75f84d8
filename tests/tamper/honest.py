"""Solutions of different shapes that are right, and one that is not: each is to get what it deserves in both tiers."""

from pathlib import Path

from tests.tamper.workspace import MAIN, RIGHT, WRONG, Attempt


def _link(folder: Path) -> None:
    (folder / "solution.py").symlink_to("lib/real.py")


_OWN_TESTS = {
    "conftest.py": "import pytest\n\n\n@pytest.fixture\ndef numbers():\n    return [1, 2]\n",
    "tests/test_mine.py": "from solution import total\n\n\ndef test_mine(numbers):\n    assert total(numbers) == 3\n",
    "pyproject.toml": '[project]\nname = "mine"\nversion = "1"\n[tool.pytest.ini_options]\naddopts = "-q"\n',
}
_RECURSIVE = "\n\ndef total(numbers):\n    return numbers[0] + total(numbers[1:]) if numbers else 0\n" + MAIN
_PACKAGE = {
    "adder/__init__.py": "from adder.core import Adder\n",
    "adder/core.py": (
        "class Adder:\n    def __init__(self):\n        self.value = 0\n\n"
        "    def add(self, number):\n        self.value += number\n        return self\n"
    ),
    "solution.py": (
        "from adder import Adder\n\n\ndef total(numbers):\n    adder = Adder()\n    for number in numbers:\n"
        "        adder.add(number)\n    return adder.value\n" + MAIN
    ),
}
_SHELL = {
    "add.sh": '#!/bin/sh\nsum=0\nfor each in "$@"; do sum=$((sum + each)); done\necho $sum\n',
    "solution.py": (
        "import os\nimport subprocess\n\nHERE = os.path.dirname(os.path.realpath(__file__))\n\n\ndef total(numbers):\n"
        '    command = ["sh", os.path.join(HERE, "add.sh"), *map(str, numbers)]\n'
        "    return int(subprocess.run(command, capture_output=True, check=True).stdout)\n" + MAIN
    ),
}
_THREADS = (
    "from concurrent.futures import ThreadPoolExecutor\n\n\ndef total(numbers):\n"
    "    parts = [numbers[start::3] for start in range(3)]\n    with ThreadPoolExecutor(3) as pool:\n"
    "        return sum(pool.map(sum, parts))\n" + MAIN
)
_NOISY = (
    'import atexit\nimport sys\nimport time\n\nprint("loading", file=sys.stderr)\n'
    'atexit.register(lambda: print("bye", file=sys.stderr))\n\n\ndef total(numbers):\n    time.sleep(0.2)\n'
    "    return sum(numbers)\n" + MAIN
)

SOLUTIONS = [
    (Attempt("one file", "a function", {"solution.py": RIGHT}), 1.0),
    (
        Attempt("own tests", "its own tests, conftest.py and pytest settings beside it", {"solution.py": RIGHT, **_OWN_TESTS}),
        1.0,
    ),
    (Attempt("package", "a class in a package", _PACKAGE), 1.0),
    (Attempt("recursive", "by recursion", {"solution.py": _RECURSIVE}), 1.0),
    (Attempt("shell", "a shell script, run as a child", _SHELL), 1.0),
    (Attempt("threads", "a pool of threads", {"solution.py": _THREADS}), 1.0),
    (Attempt("noisy", "slow, talkative, with an exit handler", {"solution.py": _NOISY}), 1.0),
    (Attempt("link", "solution.py is a link to a file beside it", {"lib/real.py": RIGHT}, _link), 1.0),
    (Attempt("unittest", "a function, tested by unittest", {"solution.py": RIGHT}, runner="unittest"), 1.0),
    (Attempt("visible", "a function, tested by the visible tests", {"solution.py": RIGHT}, runner="visible"), 1.0),
    (Attempt("wrong", "honestly wrong", {"solution.py": WRONG}), 0.0),
    (Attempt("nothing", "no solution at all"), 0.0),
]
