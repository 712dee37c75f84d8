"""`make test-chaos`: 200 rollouts, 20 of them with pi, while every kind of process is killed in turn and connections fail.

``KILLS``, ``SEED`` and ``STEPS`` (of 20 rollouts each, 10 unless told) are read from the environment; more than 6 kills a step
get more steps. Prints ``test-chaos: kills= rollouts= lost= duplicated= trained_twice= ...``, writes .out/test-chaos.json, and
ends with 0 where nothing is lost, left, or counted twice.
"""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from evener import runfile
from evener.api import ApiClient
from evener.cli.submit import prepare, submit
from evener.errors import InfraError
from evener_orchestrator.schedule import pick_harness
from tests.chaos.account import account, processes_left, until_at_rest
from tests.chaos.havoc import Havoc, Stuck, say
from tests.chaos.stack import Chaos, running_chaos
from tests.chaos.stores import running_stores
from tests.conftest import TEST_POLICY
from tests.e2e.place import EXAMPLE, ROOT
from tests.e2e.processes import TOKEN

GROUP_SIZE, GROUPS_PER_STEP, STEPS = 5, 4, 10
KILLS_A_STEP = 6
"""At most: a rollout that is hit three times ends as a fault of ours, and more kills want more rollouts to fall among."""

PI = 10
"""Every so many groups, one is pi's."""

SHOWN = (
    *("kills", "rollouts", "lost", "duplicated", "trained_twice"),
    *("infra_errors", "attempts", "cuts", "exits", "seconds", "seed"),
)
RUN_S = 900.0
"""Longest that the run takes once nobody is killed any more."""


def main() -> int:
    """One run; the exit code is the verdict."""
    kills, seed = int(os.environ.get("KILLS") or 10), int(os.environ.get("SEED") or random.randrange(10**6))
    steps = max(int(os.environ.get("STEPS") or STEPS), -(-kills // KILLS_A_STEP))
    print(f"test-chaos: KILLS={kills} SEED={seed} STEPS={steps}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evener-chaos-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        folder.chmod(0o755)
        with running_stores() as stores, running_chaos(folder, stores) as chaos:
            say("everything is ready")
            asyncio.run(begin(chaos, folder, steps, seed))
            havoc = Havoc(chaos, seed=seed, kills=kills, rollouts=steps * GROUPS_PER_STEP * GROUP_SIZE)
            havoc.wreak()
            say("nobody is killed any more")
            state = until_over(chaos, havoc)
            say(f"the run is {state['state']}")
            left = until_at_rest(chaos)
            report = {"kills": havoc.kills, "cuts": havoc.cuts, "exits": havoc.exits, **account(chaos)}
            chaos.stack.stop()
        report |= {"left": left, "state": state["state"], "processes": processes_left(folder)}
    return verdict(report | {"seconds": round(time.monotonic() - started), "seed": seed})


def verdict(report: dict[str, Any]) -> int:
    """Print and write the report; 0 where all is well."""
    print("test-chaos: " + " ".join(f"{name}={report[name]}" for name in SHOWN))
    out = ROOT / ".out"
    out.mkdir(exist_ok=True)
    (out / "test-chaos.json").write_text(json.dumps(report, indent=2) + "\n")
    wrong = {name: report[name] for name in ("lost", "duplicated", "trained_twice", "left", "processes") if report[name]}
    wrong |= {name: differs for name, differs in report["sums"].items() if differs}
    if report["state"] != "done":
        wrong["state"] = report["state"]
    if report["infra_errors"] * 20 > report["rollouts"]:
        wrong["infra_errors"] = report["infra_errors"]
    if wrong:
        print(f"test-chaos: WRONG: {json.dumps(wrong)}")
    return 1 if wrong else 0


async def begin(chaos: Chaos, folder: Path, steps: int, seed: int) -> None:
    """Submit the run."""
    submission = prepare(runfile.read(run_file(folder, steps, seed)), {"quick", "pi"})
    async with ApiClient(chaos.stack.env["EVENER_URL"], TOKEN) as api:
        await submit(api, submission, new=False)


def until_over(chaos: Chaos, havoc: Havoc) -> dict[str, Any]:
    """Wait for the run's end. Raises Stuck."""
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline:
        state = chaos.run()
        if state.get("state", "running") not in ("running", "paused"):
            return state
        havoc.revive()
        time.sleep(1.0)
    raise Stuck(f"the run is not over {RUN_S:g} s after the last kill")


def run_file(folder: Path, steps: int, seed: int) -> Path:
    """A run of 4 groups a step, of which a tenth are pi's, over four tasks."""
    for number in range(4):
        a_task(folder / "tasks" / f"answer-{number}")
    path = folder / "run.toml"
    path.write_text(
        f'''name = "{TEST_POLICY}"
policy = "{EXAMPLE / "tiny-policy"}"
tasks = "{folder / "tasks"}"
[[harness]]
name = "quick"
weight = {PI - 1}
[[harness]]
name = "pi"
weight = 1
[rollouts]
group_size = {GROUP_SIZE}
concurrent = 12
[budget]
calls = 20
sampled_tokens = 600
wall_s = 240
[train]
steps = {steps}
groups_per_step = {GROUPS_PER_STEP}
learning_rate = 1e-5
max_staleness = 3
seed = {a_seed(seed, steps * GROUPS_PER_STEP)}
'''
    )
    return path


def a_seed(first: int, groups: int) -> int:
    """A seed of a run whose first ``groups`` groups have a tenth of pi's."""
    harnesses = [runfile.Harness(name="quick", weight=PI - 1), runfile.Harness(name="pi", weight=1)]
    for seed in count(first):
        names = [pick_harness(number, seed=seed, harnesses=harnesses).name for number in range(groups)]
        if names.count("pi") == groups // PI:
            return seed
    raise AssertionError("unreachable: the loop ends with a seed")


def a_task(folder: Path) -> None:
    """A task whose reward is the number that the agent wrote into a file."""
    (folder / "environment" / "workspace").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "solution").mkdir()
    (folder / "task.toml").write_text('schema_version = "1.4"\n[verifier]\ntimeout_sec = 60.0\n')
    (folder / "instruction.md").write_text(f"Write a number between 0 and 1 to the file answer. ({folder.name})\n")
    (folder / "environment" / "Dockerfile").write_text(
        "FROM debian:bookworm-slim\nWORKDIR /workspace\nCOPY workspace/ /workspace/\n"
    )
    (folder / "environment" / "workspace" / "answer").write_text("0.5\n")
    (folder / "tests" / "test.sh").write_text(
        "#!/bin/sh\nmkdir -p /logs/verifier\ncat /workspace/answer > /logs/verifier/reward.txt\n"
    )
    (folder / "solution" / "solve.sh").write_text("#!/bin/sh\necho 1 > answer\n")


def terminate(*_: object) -> None:
    """A stop ends what was started, as every other end does."""
    sys.exit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, terminate)
    try:
        sys.exit(main())
    except (Stuck, InfraError, pytest.skip.Exception, pytest.fail.Exception) as error:
        print(f"test-chaos: WRONG: {error}")
        sys.exit(1)
