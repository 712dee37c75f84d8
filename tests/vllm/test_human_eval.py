"""A real model on real vLLM under the unmodified pi: five problems of HumanEval, as an evaluation by the whole stack.

What it scores is told and not judged: SmolLM2 has 135 M parameters, of four bits each. What must hold is that no rollout is
lost and that every token is captured, under the version that the learner published to vLLM.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.place import Place
from tests.vllm.process import running

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2, HUMAN_EVAL = "EVENER_TEST_SMOLLM2", "EVENER_TEST_HUMAN_EVAL"
PROBLEMS, GROUP = 5, 2
LIMIT_S = 2400

pytestmark = pytest.mark.e2e

RUN = """\
name = "human-eval"
policy = "{policy}"
tasks = "./tasks"
[[harness]]
name = "pi"
[rollouts]
group_size = {group}
concurrent = 2
temperature = 0.6
[budget]
calls = 4
sampled_tokens = 768
wall_s = 600
"""


def test_smollm2_does_five_problems_under_pi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Path(os.environ[SMOLLM2])
    problems(tmp_path / "tasks")
    (tmp_path / "run.toml").write_text(RUN.format(policy=policy, group=GROUP))
    place = Place(tmp_path)
    with running("vllm", policy, tmp_path) as engine:
        monkeypatch.setenv("EVENER_ENGINE_URLS", json.dumps([engine.url]))
        done = place.evener("run", "run.toml", "--json", timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    run = json.loads(done.stdout)
    with capsys.disabled():
        print("\nSmolLM2-135M under pi on vLLM:", json.dumps({"rollouts": run["rollouts"], "pass1": run["pass1"]}))
    assert (run["state"], run["kind"]) == ("done", "eval")
    assert run["rollouts"]["done"] == PROBLEMS * GROUP
    assert run["rollouts"]["outcomes"]["infra_error"] == 0
    with sqlite3.connect(tmp_path / "data" / "ledger.db") as ledger:
        calls = ledger.execute("select count(*) from calls").fetchone()[0]
        others = ledger.execute(
            "select count(*) from calls where level <> 'tokens' or version_dispatch <> 1 or version_completion <> 1"
        ).fetchone()[0]
    assert calls >= PROBLEMS * GROUP
    assert others == 0


def problems(folder: Path) -> None:
    """The first problems as tasks."""
    script = [
        sys.executable,
        str(ROOT / "examples" / "human-eval" / "convert.py"),
        str(folder),
        "--data",
        os.environ[HUMAN_EVAL],
    ]
    subprocess.run(script, check=True, timeout=60)
    for path in sorted(path for path in folder.iterdir() if path.is_dir())[PROBLEMS:]:
        shutil.rmtree(path)
