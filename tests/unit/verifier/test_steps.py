"""Each step's workspace is scored by the step's tests; what they come to is the mean or the last of those that were reached."""

import pytest

from evener.api import ScoreOrder
from evener.blobs import Blobs
from evener.ids import new_id, session_id
from evener.sandbox.probe import bubblewrap_missing
from evener.snapshots import Left, join
from evener.tasks import TaskToml
from evener_verifier import steps, verifier
from tests.tars import tar

COMMON = b"cat /workspace/score > /logs/verifier/reward.txt; . /tests/more.sh\n"
NAMED = b'echo "{\\"reward\\": 0, \\"style\\": $(cat /workspace/score)}" > /logs/verifier/reward.json\n'
FORGED = b"open('/logs/verifier/reward.txt', 'w').write('1')\nanswer = 41\n"
TESTED = b"""
import sys, unittest
sys.path.insert(0, "/workspace")
from solution import answer
class It(unittest.TestCase):
    def test_it(self):
        self.assertEqual(answer, 42)
unittest.main()
"""
IN_PROCESS = b"python3 /tests/test_it.py && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"


def toml(strategy="mean", **least):
    lines = [f'multi_step_reward_strategy = "{strategy}"', "verifier.ranges = {style = [0, 10]}"]
    for name in ("one", "two", "three"):
        lines += ["[[steps]]", f'name = "{name}"']
        lines += [f"min_reward = {least[name]}"] if name in least else []
    return "\n".join(lines).encode()


@pytest.fixture
async def score(tmp_path):
    if missing := await bubblewrap_missing():
        pytest.skip(f"bubblewrap does not work here: {missing}")
    blobs = Blobs(tmp_path / "blobs")

    async def run(said, *workspaces, tests=None, added=None):
        agent = {f"steps/{name}/instruction.md": b"Do it." for name in ("one", "two", "three")}
        agent |= {"environment/workspace/given": b"1", "steps/two/workdir/added": b"2", **(added or {})}
        files = {"tests/test.sh": COMMON, "tests/more.sh": b"true\n", **(tests or {})}
        table = TaskToml.model_validate({"steps": [{"name": name} for name in ("one", "two", "three")]})
        order = ScoreOrder(
            session_id=session_id(new_id(), 1),
            task_id="t",
            snapshot=blobs.put("snapshots", join(table, [Left(tar(files)) for files in workspaces])),
            agent_bundle=blobs.put("agent", tar({"task.toml": said, **agent})),
            grader_bundle=blobs.put("grader", tar({"task.toml": said, **files})),
            trusted=True,
            sandbox="bubblewrap",
        )
        scored = await verifier.score(order, blobs, tmp_path / "sandboxes")
        assert not list((tmp_path / "sandboxes").glob("*")), "a sandbox was left behind"
        return scored

    return run


async def test_each_step_is_scored_by_its_own_tests_over_those_of_the_task(score):
    left = {"score": b"1", "given": b"1"}, {"score": b"4", "given": b"1"}, {"score": b"0.5", "given": b"1", "added": b"2"}
    scored = await score(toml(), *left, tests={"steps/two/tests/more.sh": NAMED, "steps/three/tests/other": b""})
    assert (scored.scores, scored.cause) == ({"reward": 0.5, "style": pytest.approx(0.4 / 3)}, None)
    one, two, three = scored.evidence["steps"]
    assert [part["scores"] for part in (one, two, three)] == [{"reward": 1.0}, {"reward": 0.0, "style": 0.4}, {"reward": 0.5}]
    assert [part["name"] for part in (one, two, three)] == ["one", "two", "three"]
    removed = [part["changes"]["removed"]["names"] for part in (one, two, three)]
    assert removed == [[], ["added"], []]
    assert (scored.evidence["tier"], scored.evidence["tampered"]) == ("in_process", False)


async def test_a_step_below_its_least_reward_is_the_last(score):
    left = {"score": b"1"}, {"score": b"0.4"}, {"score": b"1"}
    scored = await score(toml(two="0.5"), *left)
    assert scored.scores == {"reward": 0.7}
    assert [part.get("scores") for part in scored.evidence["steps"]] == [{"reward": 1.0}, {"reward": 0.4}, None]
    assert (await score(toml("final", two="0.5"), *left)).scores == {"reward": 0.4}
    assert (await score(toml("final", two="0.4"), *left)).scores == {"reward": 1.0}


async def test_tampering_with_one_step_leaves_nothing(score):
    tests = {"tests/test.sh": IN_PROCESS, "tests/test_it.py": TESTED}
    good, forged = {"solution.py": b"answer = 42\n"}, {"solution.py": FORGED}
    scored = await score(toml(), good, forged, good, tests=tests)
    assert (scored.scores, scored.evidence["tampered"]) == ({"reward": 0.0}, True)
    assert [part.get("tampered") for part in scored.evidence["steps"]] == [False, True, None]


async def test_faults_name_the_step(score):
    scored = await score(toml(), {"score": b"1"}, {"score": b"no number"}, {"score": b"1"})
    assert (scored.cause, scored.detail) == ("reward_invalid", "step two: reward.txt: 'no number' is not a number")
    assert scored.evidence["steps"][0]["scores"] == {"reward": 1.0}


async def test_what_set_up_scripts_make_is_none_of_the_agents_changes(score):
    left = {"score": b"1", "given": b"1"}
    after = {**left, "added": b"2", "made": b"12", "setup.sh": b"cat given added > made"}
    scripts = {"steps/two/workdir/setup.sh": after["setup.sh"]}
    scored = await score(toml(), left, after, after | {"mine": b""}, added=scripts)
    assert (scored.scores, scored.cause) == ({"reward": 1.0}, None)
    changes = [{kind: names["names"] for kind, names in part["changes"].items()} for part in scored.evidence["steps"]]
    assert [change["added"] for change in changes] == [["score"], ["score"], ["mine", "score"]]
    assert not any(change["changed"] + change["removed"] for change in changes)


async def test_a_set_up_script_that_fails_in_what_nobody_touched_is_the_authors_fault(score):
    scripts = {"steps/two/workdir/setup.sh": b"cat nowhere"}
    scored = await score(toml(), {"score": b"1"}, {"score": b"1"}, {"score": b"1"}, added=scripts)
    assert (scored.scores, scored.cause) == ({}, "task_setup")
    assert scored.detail.startswith("steps/two/workdir/setup.sh ended with 1: cat: nowhere: ")


@pytest.mark.parametrize(
    ("least", "scores", "enough"),
    [
        (0.5, {"reward": 0.5}, True),
        (0.51, {"reward": 0.5}, False),
        ({"style": 7}, {"reward": 0.0, "style": 0.7}, True),  # in the range that the task declares, as the tests write it
        ({"style": 7}, {"reward": 1.0, "style": 0.6}, False),
        ({"reward": 0.0, "speed": 0.0}, {"reward": 1.0}, False),
        (0, {"reward": 0.0}, True),
        (None, {"reward": 0.0}, True),
    ],
)
def test_what_suffices(least, scores, enough):
    said = {"verifier": {"ranges": {"style": [0, 10]}}, "steps": [{"name": "one", "min_reward": least}]}
    (step,) = TaskToml.model_validate(said).each_step()
    assert steps.suffices(step, scores) is enough
