"""Reward 1 if HumanEval's own check holds of what the candidate answers; the candidate is never in this process.

The check is run twice. First over the reference: that gives the calls that it makes. The candidate gets their arguments, all
at once, in its own sandbox, and sends back plain values. Then the check runs over those answers. Both times its random numbers
are the same.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, "/tests")
from answer import Unknown, decode, encode

TESTS = Path("/tests")
REWARD = Path("/logs/verifier/reward.txt")
TIME_S = 30
"""For all calls of one candidate together; HumanEval gives its whole check 3 s of a machine that does nothing else."""


class Wrong(Exception):
    """What the candidate did wrong before the check could judge its answers."""


def calls_of_the_check(function: str) -> list[str]:
    """The arguments of each call that the check makes, encoded; the reference answers it."""
    names = namespace()
    reference = names[function]
    calls: list[str] = []

    def record(*arguments: Any, **named: Any) -> Any:
        calls.append(json.dumps([encode(arguments), encode(named)]))
        return reference(*arguments, **named)

    run_check(names, record)
    return calls


def answers_of_the_candidate(function: str, calls: list[str]) -> list[Any]:
    """What the candidate answers to each call. Raises Wrong."""
    program = (TESTS / "answer.py").read_text()
    run = subprocess.run(
        ["candidate", "--timeout", str(TIME_S), "python3", "-I", "-c", program, function],
        input="\n".join(calls).encode(),
        capture_output=True,
        check=False,
    )
    sys.stderr.write(run.stderr.decode(errors="replace"))
    if run.returncode == 124:
        raise Wrong(f"it took more than {TIME_S} s")
    if run.returncode != 0:
        raise Wrong(f"it ended with {run.returncode}")
    lines = run.stdout.splitlines()
    if len(lines) != len(calls):
        raise Wrong(f"{len(lines)} answers to {len(calls)} calls")
    try:
        return [decode(json.loads(line)) for line in lines]
    except (ValueError, TypeError, Unknown, RecursionError) as error:
        raise Wrong(f"an answer is no plain value: {type(error).__name__}") from None


def judge(calls: list[str], answers: list[Any]) -> None:
    """Run the check over the answers. Raises what the check raises, or Wrong where a wrong answer led it to another call."""
    left = list(zip(calls, answers, strict=True))

    def replay(*arguments: Any, **named: Any) -> Any:
        call, answer = left.pop(0) if left else ("", None)
        if call != json.dumps([encode(arguments), encode(named)]):
            raise Wrong("a wrong answer led to another call")
        return answer

    run_check(namespace(), replay)


def namespace() -> dict[str, Any]:
    """What the problem's files define: the reference, its helpers, and the check."""
    names: dict[str, Any] = {"__name__": "problem"}
    for file in ("reference.py", "check.py"):
        exec(compile((TESTS / file).read_text(), file, "exec"), names)
    return names


def run_check(names: dict[str, Any], candidate: Callable[..., Any]) -> None:
    """HumanEval's check, with the same random numbers each time."""
    random.seed(0)
    names["check"](candidate)


def main() -> None:
    """Grade; a fault of the reference or of this program leaves no reward, and is the task's."""
    function = (TESTS / "function").read_text().strip()
    calls = calls_of_the_check(function)
    try:
        judge(calls, answers_of_the_candidate(function, calls))
    except Exception as error:  # noqa: BLE001 - whatever a check makes of wrong answers
        REWARD.write_text("0\n")
        print(f"{type(error).__name__}: {error!s:.300}".encode("ascii", "backslashreplace").decode())
    else:
        REWARD.write_text("1\n")


if __name__ == "__main__":
    main()
