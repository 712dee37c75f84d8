"""The whole loop with the real agent: what DESIGN calls invariants, on the rows that a real run leaves in the ledger."""

import json
import signal
import sqlite3
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from evener.archive import extract
from evener.blobs import Blobs
from evener.cli.progress import pass1_rows
from tests.e2e.place import Place, run_file, some_tasks

pytestmark = pytest.mark.e2e

TRAINED = "rollouts join groups on groups.id = rollouts.group_id and groups.state = 'trained'"


@dataclass
class Cut:
    """A small run that Ctrl-C stopped after three rollouts, and what was left then."""

    place: Place
    seconds: float
    stderr: str
    leftovers: list[str]
    sandboxes: list[Path]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    place = Place(tmp_path_factory.mktemp("loop"))
    child = place.start("run", str(run_file(place.folder)))
    try:
        wait_for_rollouts(place, child)
        child.send_signal(signal.SIGINT)
        asked = time.monotonic()
        child.wait(timeout=15)
        seconds = time.monotonic() - asked
        _, err = child.communicate()
    finally:
        child.kill()
    return Cut(place, seconds, err, place.leftovers(), list((place.folder / "data" / "sandboxes").glob("*")))


@pytest.fixture(scope="module")
def resumed(cut: Cut) -> tuple[Place, dict, str]:
    """The run that was stopped, run again to its end, and what that said: every test of a whole run is one of a resumed run."""
    done = cut.place.evener("run", str(cut.place.folder / "run.toml"), "--json", timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return cut.place, json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def finished(resumed: tuple[Place, dict, str]) -> tuple[Place, dict]:
    place, run, _ = resumed
    return place, run


def rows(place: Place, query: str) -> list[dict]:
    connection = sqlite3.connect(place.folder / "data" / "ledger.db")
    connection.row_factory = sqlite3.Row
    return [dict(row) for row in connection.execute(query)]


def test_ctrl_c_stops_everything(cut):
    assert cut.seconds < 5, cut.stderr[-3000:]
    assert "the same command resumes it" in cut.stderr
    assert cut.leftovers == []
    assert cut.sandboxes == []


def test_the_same_command_resumes(resumed):
    _, run, stderr = resumed
    assert "resuming run small" in stderr
    assert (run["state"], run["step"], run["rollouts"]["outcomes"]["infra_error"]) == ("done", 2, 0)


def test_complete(finished):
    place, run = finished
    assert run["state"] == "done"
    assert run["step"] == run["steps"] == 2
    assert run["version"] == 3
    assert run["rollouts"]["outcomes"]["infra_error"] == 0
    states = rows(place, "select state, outcome, count(*) as n from rollouts group by 1, 2")
    assert sum(row["n"] for row in states) == run["rollouts"]["done"]
    assert all(row["outcome"] is not None for row in states), states


def test_the_agent_is_the_unmodified_one_in_a_sandbox(finished):
    place, run = finished
    assert run["harnesses"] == ["pi"]
    versions = rows(place, "select distinct harness_version, sandbox from attempts where cause is not 'service_stopped'")
    assert [row["harness_version"].split(".")[0] for row in versions] == ["1"]


def test_evaluated_before_and_after(finished):
    place, run = finished
    held_out = len(list(some_tasks(place.folder).iterdir()))
    assert held_out >= 8
    assert [(row["version"], row["n"]) for row in pass1_rows(run, "eval")] == [(1, held_out), (3, held_out)]


def test_whole_groups_and_bounded_staleness(finished):
    place, _ = finished
    steps = rows(place, "select * from steps order by step")
    assert len(steps) == 2
    trained = rows(place, f"select count(*) as n from {TRAINED} group by groups.id")
    assert len(trained) == 4
    assert {row["n"] for row in trained} == {4}


def test_exact(finished):
    """Re-scoring a trained row in float32 with each token's recorded version gives the stored log-probabilities."""
    import torch

    place, run = finished
    trained = rows(place, f"select rollouts.id as rollout_id from {TRAINED}")
    answers = place.ask(*(f"/v1/rollouts/{row['rollout_id']}/sequences" for row in trained))
    sequences = [sequence for answer in answers for sequence in answer["sequences"]]
    assert len(sequences) >= 16
    models = {v: load_version(place, run["policy"], v) for v in {v for s in sequences for v in s["versions"] if v}}
    checked = 0
    for sequence in sequences:
        ids, mask, versions = (np.array(sequence[name]) for name in ("ids", "mask", "versions"))
        assert len(ids) == len(mask) == len(versions) == len(sequence["logprobs"])
        stored = np.array(sequence["logprobs"])
        assert np.isfinite(stored).all()
        assert (stored <= 0).all()
        for version in set(versions[mask == 1]):
            with torch.no_grad():
                logits = models[version](torch.tensor(ids)[None]).logits[0].float()
            scored = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0].numpy()
            chosen = (mask[1:] == 1) & (versions[1:] == version)
            assert np.abs(scored[chosen] - stored[1:][chosen]).max() < 1e-3
            checked += int(chosen.sum())
    assert checked > 200


def test_verify_scores_a_trained_rollout_again(finished):
    place, _ = finished
    (rollout, *_) = rows(place, f"select rollouts.id as id from {TRAINED} order by rollouts.id")
    found = place.json("rollouts", "verify", rollout["id"])
    assert found["holds"], found
    assert found["largest_difference"] < 1e-3
    assert found["not_scored"] == 0


def load_version(place: Place, policy: str, version: int):
    import torch
    from transformers import AutoModelForCausalLM

    digest = rows(place, f"select weights from policies where policy = '{policy}' and version = {version}")[0]["weights"]
    folder = place.folder / f"version-{version}"
    extract(Blobs(place.folder / "data" / "blobs").get("weights", digest), folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_once(finished):
    """No sampled token is trained in two rows of a rollout."""
    place, _ = finished
    rollouts = rows(place, f"select rollouts.id as rollout_id from {TRAINED}")
    found = [(f"/v1/rollouts/{row['rollout_id']}", f"/v1/rollouts/{row['rollout_id']}/sequences") for row in rollouts]
    answers = place.ask(*(path for pair in found for path in pair))
    for document, training in zip(answers[::2], answers[1::2], strict=True):
        assert 0 < sum(sum(s["mask"]) for s in training["sequences"]) <= document["sampled_tokens"]


def test_show_and_sql(finished):
    place, _ = finished
    shown = place.evener("rollouts", "show", "latest", "--trace")
    assert shown.returncode == 0, shown.stderr
    assert "token:mask:logprob" in shown.stdout
    matrix = place.json("sql", "select * from harness_matrix")
    assert {row["harness"] for row in matrix} == {"pi"}
    refused = place.evener("sql", "delete from runs")
    assert refused.returncode == 2
    assert "readonly" in refused.stderr


def test_nothing_is_left(finished):
    place, _ = finished
    assert place.leftovers() == []
    assert list((place.folder / "data" / "sandboxes").glob("*")) == []
    assert not (place.folder / "data" / "stack.json").exists()


def test_no_secret_is_in_logs_or_ledger(finished):
    place, _ = finished
    for path in [*(place.folder / "data" / "logs").iterdir(), place.folder / "data" / "ledger.db"]:
        assert b"sk-evener-" not in path.read_bytes(), path


def test_again_says_that_it_is_done(finished):
    place, run = finished
    again = place.evener("run", str(place.folder / "run.toml"), "--json", timeout=120)
    assert again.returncode == 0, again.stderr
    assert "is done; --new starts another" in again.stderr
    assert json.loads(again.stdout)["rollouts"] == run["rollouts"]


def wait_for_rollouts(place: Place, child: subprocess.Popen[str], count: int = 3) -> None:
    ledger = place.folder / "data" / "ledger.db"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert child.poll() is None, child.communicate()[1][-3000:]
        if ledger.exists():
            try:
                if rows(place, "select count(*) as n from rollouts where outcome is not null")[0]["n"] >= count:
                    return
            except sqlite3.OperationalError:
                pass
        time.sleep(0.1)
    pytest.fail("no rollout ended within two minutes")
