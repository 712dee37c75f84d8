"""`evener rollouts show` tells all that a verifier saw, and how far a score can be trusted."""

import pytest

from evener.cli import output
from evener.cli.scores import print_scores

CHANGES = {"added": {"count": 1, "names": ["new"]}, "changed": {"count": 0, "names": []}, "removed": {"count": 0, "names": []}}
GRADING = {
    "exit_code": 3,
    "timed_out": False,
    "seconds": 1.5,
    "stdout": "said [this]",
    "stderr": "wrong",
    "findings": [
        {"kind": "hook_kept_away", "detail": "conftest.py: pytest runs it", "tampering": False},
        {"kind": "ended_early", "detail": "a test runner ended without a report", "tampering": True},
    ],
    "tampered": True,
    "claimed": {"text": "1"},
    "changes": CHANGES,
    "diff": "+added",
    "reports": {"ctrf.json": '{"results": 1}'},
    "tests": [{"runner": "pytest", "passed": 2, "failed": 1, "failures": ["test_it"]}],
    "candidate": {"calls": 1, "first": [{"command": "sh x.sh", "exit_code": 7, "timed_out": False, "seconds": 0.25}]},
    "artifacts": {"/logs/artifacts": {"count": 1, "names": ["log"]}},
}
SHOWN = {
    "exit code": "3",
    "tests took": "1.5",
    "TAMPERED": "the score is 0 whatever the tests said; claimed: {'text': '1'}",
    "finding": "hook_kept_away: conftest.py: pytest runs it",
    "tampering": "ended_early: a test runner ended without a report",
    "pytest": "2 passed, 1 failed test_it",
    "candidate": "sh x.sh: exit code 7, 0.25 s",
    "added": "1: new",
    "/logs/artifacts": "1: log",
}


def printed(capsys: pytest.CaptureFixture[str], evidence: dict) -> list[str]:
    score = {"attempt_id": "r.1", "scores": {"reward": 0.0}, "cause": None, "detail": "", "seconds": 2.0}
    print_scores([{**score, "evidence": evidence}])
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "width", 200)


def test_all_of_the_evidence_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, {"tier": "in_process", "sandbox": "bubblewrap", "isolated": True, **GRADING})
    assert "tier in_process (bubblewrap)" in lines
    assert {f"{name} {value}" for name, value in SHOWN.items()} <= set(lines)
    assert not [line for line in lines if line.startswith("changed")]
    assert {"said [this]", "wrong", "+added", '{"results": 1}'} <= set(lines)
    assert any(line.startswith("report ctrf.json") for line in lines)


def test_each_step_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"name": "one", "tier": "in_process", "scores": {"reward": 1.0}, **GRADING}, {"name": "two", "tier": "in_process"}]
    lines = printed(capsys, {"tier": "in_process", "sandbox": "process", "isolated": False, "steps": steps})
    assert "tier in_process (process; NOTHING kept the candidate from tests and reward)" in lines
    assert any(line.startswith("step two") for line in lines)
    assert "scores none: an earlier step fell short, or this one could not be graded" in lines
    assert {f"{name} {value}" for name, value in SHOWN.items()} <= set(lines)
