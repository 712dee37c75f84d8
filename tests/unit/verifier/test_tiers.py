import asyncio
import os
import time

import pytest

from evener.errors import InfraError
from evener.sandbox.bubblewrap import BubblewrapSandbox
from evener.sandbox.process import ProcessSandbox
from evener_verifier import verifier
from tests.unit.verifier.orders import order

OUT = b'[verifier]\ntier = "out_of_process"\n'
REWARD = b" && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
PASSES = b"echo 1 > /logs/verifier/reward.txt"


async def test_a_candidate_is_run_elsewhere(score):
    script = b"""
echo 3 4 | candidate sh add.sh; echo "code $?"
candidate sh -c 'echo err >&2; exit 7' < /dev/null; echo "code $?"
candidate -- nowhere; echo "code $?"
candidate sh -c 'ls -A "$HOME"; echo made > made'; candidate cat made
cat /workspace/made
echo 1 > /logs/verifier/reward.txt
"""
    scored = await score(script, {"add.sh": b"read a b; echo $((a + b))"}, toml=OUT)
    said = scored.evidence["stdout"].splitlines()
    assert said == ["7", "code 0", "code 7", "code 127", "made"]
    assert "err\n" in scored.evidence["stderr"]
    assert "made: No such file" in scored.evidence["stderr"]
    calls = scored.evidence["candidate"]
    assert (calls["calls"], calls["first"][0]["command"], calls["first"][1]["exit_code"]) == (5, "sh add.sh", 7)
    assert (scored.evidence["tier"], scored.scores, scored.evidence["tampered"]) == ("out_of_process", {"reward": 1.0}, False)


async def test_a_candidate_has_limits(score):
    script = b"""
candidate --timeout 0.5 sleep 60; echo "code $?"
candidate --timeout=-1 true; echo "code $?"; candidate --timeout x true; echo "code $?"; candidate; echo "code $?"
candidate sh -c 'head -c 3000000 /dev/zero' | wc -c
candidate sh -c 'kill -9 $$'; echo "code $?"
echo 1 > /logs/verifier/reward.txt
"""
    scored = await score(script, {}, toml=OUT)
    said = scored.evidence["stdout"].splitlines()
    assert said[:4] == ["code 124", "code 125", "code 125", "code 125"]
    assert 256 << 10 < int(said[4]) < (256 << 10) + 100
    assert said[5] == "code 137"
    assert scored.scores == {"reward": 1.0}


async def test_input_is_passed_on_as_it_is(score):
    script = b"""
head -c 1000000 /dev/urandom > /tmp/in.$$
candidate sha256sum < /tmp/in.$$ > /tmp/out.$$
sha256sum < /tmp/in.$$ | cmp - /tmp/out.$$"""
    assert (await score(script + REWARD, {}, toml=OUT)).scores == {"reward": 1.0}


async def test_a_caller_that_leaves_ends_the_command(score):
    started = time.monotonic()
    scored = await score(b"timeout 1 candidate sleep 60; echo $?; " + PASSES, {}, toml=OUT)
    assert scored.evidence["stdout"] == "124\n"
    assert scored.scores == {"reward": 1.0}
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)  # a plain process isolates nothing
async def test_a_candidate_reaches_neither_tests_nor_rewards(score):
    script = b"""
candidate sh -c 'ls /tests; cat /tests/expected; echo 1 > /logs/verifier/reward.txt; candidate true; ls -d /run/* /opt/*'
ls /logs/verifier
/workspace/x.sh
"""
    scored = await score(script, {"x.sh": b"#!/bin/sh\necho ran"}, toml=OUT)
    assert scored.evidence["stdout"] == ""
    assert "Permission denied" in scored.evidence["stderr"]
    assert (scored.scores, scored.cause) == ({}, "reward_missing")


async def test_a_grader_imports_nothing_of_the_workspace(score):
    script = b"python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || exit 0; python3 -c 'import evil'; " + PASSES
    scored = await score(script, {"evil.py": b"print('ran')"}, toml=OUT)
    if scored.cause:
        pytest.skip("no python3 of 3.11 or later in the sandbox")
    assert scored.evidence["stdout"] == ""
    assert "ModuleNotFoundError" in scored.evidence["stderr"]


async def test_a_path_of_the_tasks_own_comes_after_ours(score):
    toml = OUT + b"env = {PATH = '/usr/bin:/bin:/mine'}\n"
    scored = await score(b"candidate true && echo $PATH; " + PASSES, {}, toml=toml)
    assert scored.evidence["stdout"].strip().endswith("/usr/bin:/bin:/mine")
    assert scored.evidence["candidate"]["calls"] == 1


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)  # a plain process could write to it
async def test_what_graders_need_is_theirs_alone_and_stays_as_it_is(blobs, kind, tmp_path):
    """A prepared root: its programs come first, nothing can change it, and the candidate's sandbox has none of it."""
    program = tmp_path / "root/bin/judge"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 0.5\n")
    program.chmod(0o755)
    test = b"touch /opt/grader/x; candidate ls /opt/grader; judge > /logs/verifier/reward.txt"
    wanted = order(blobs, kind, test, toml=OUT)
    scored = await verifier.score(wanted, blobs, tmp_path / "sandboxes", root=tmp_path / "root")
    assert scored.scores == {"reward": 0.5}
    assert "Read-only file system" in scored.evidence["stderr"]
    assert "No such file or directory" in scored.evidence["stderr"]


async def test_a_fault_of_the_second_sandbox_is_ours(blobs, kind, tmp_path, monkeypatch):
    sandbox = BubblewrapSandbox if kind == "bubblewrap" else ProcessSandbox
    upload, uploads = sandbox.upload, []

    async def fails(self, tar, path, *, over=False):
        uploads.append(path)
        if len(uploads) > 1:
            raise InfraError("sandbox_failed", "no room")
        await upload(self, tar, path, over=over)

    monkeypatch.setattr(sandbox, "upload", fails)
    wanted = order(blobs, kind, b"candidate true; " + PASSES + b"; sleep 60", {}, toml=OUT)
    scored = await asyncio.wait_for(verifier.score(wanted, blobs, tmp_path / "s"), 30)
    assert (scored.scores, scored.cause, scored.detail) == ({}, "sandbox_failed", "no room")
    assert not list((tmp_path / "s").iterdir())


async def test_verify_counts_by_its_exit_code(score):
    command = "[ $LEVEL = 2 ] && [ -f /workspace/done ] && grep -q secret /tests/expected"
    toml = f"verify = '{command}'\n[verifier]\nenv = {{LEVEL = '2'}}\n".encode()
    assert (await score(b"", toml=toml)).scores == {"reward": 1.0}
    assert (await score(b"", {}, toml=toml)).scores == {"reward": 0.0}
    slow = await score(b"", toml=b'verify = "sleep 60"\n[verifier]\ntimeout_sec = 0.3\n')
    assert (slow.scores, slow.evidence["timed_out"]) == ({"reward": 0.0}, True)
    ours = b"verify = 'candidate sh -c \"exit 3\"; test $? = 3'\n" + OUT
    assert (await score(b"", {}, toml=ours)).scores == {"reward": 1.0}


async def test_a_task_says_what_slowness_scores(score):
    slow = PASSES + b"; sleep 60"
    scored = await score(slow, toml=b"[verifier]\ntimeout_sec = 0.5\ntimeout_reward = 0.25\n")
    assert (scored.scores, scored.cause) == ({"reward": 0.25}, None)
    unsaid = await score(slow, toml=b"[verifier]\ntimeout_sec = 0.5\n")
    assert (unsaid.scores, unsaid.cause) == ({}, "reward_missing")


async def test_an_untouched_workspace_must_not_pass(score):
    toml = b"[verifier]\nbaseline = true\n"
    assert (await score(PASSES, toml=toml)).cause == "baseline_passes"
    asks = b"[ -f /workspace/done ]" + REWARD
    assert (await score(asks, toml=toml)).scores == {"reward": 1.0}
    assert (await score(asks, {}, toml=toml)).scores == {"reward": 0.0}


async def test_ranges_and_named_scores(score):
    toml = b"[verifier]\nranges = {reward = [0, 10]}\n"
    script = b"""echo '{"reward": 5, "style": 1}' > /logs/verifier/reward.json"""
    assert (await score(script, toml=toml)).scores == {"reward": 0.5, "style": 1.0}


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)  # the table is read before there is a sandbox
@pytest.mark.parametrize(
    "table",
    [
        b'[verifier]\nuser = "postgres"\n',
        b'[verifier]\ntier = "elsewhere"\n',
        b"[verifier]\nranges = {reward = [1, 0]}\n",
        b"[verifier]\ntimeout_reward = 2\n",
        b'[verifier.environment]\ndocker_image = "../x"\n',
        b"artifacts = ['/etc/x']\n",
        b"[[verifier.collect]]\ncommand = 'true'\n",
        b'[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n',
        b'verify = ""\n',
    ],
)
async def test_what_cannot_be_done_is_the_authors_to_mend(score, table):
    scored = await score(PASSES, toml=table)
    assert (scored.scores, scored.cause) == ({}, "task_setup")
    assert "task.toml: " in scored.detail


async def test_protected_files_and_hooks_are_reported(score):
    script = b"cat /workspace/tests/test_a.py; ls /workspace; echo 0 > /logs/verifier/reward.txt"
    made = {"tests/test_a.py": b"pass", "conftest.py": b"evil"}
    scored = await score(script, made, pristine={"tests/test_a.py": b"real"})
    assert scored.evidence["stdout"] == "realtests\n"
    assert [each["kind"] for each in scored.evidence["findings"]] == ["protected_restored", "hook_kept_away"]
    assert not scored.evidence["tampered"]
    assert scored.evidence["tier"] == "in_process"
    assert "-real" in scored.evidence["diff"]


async def test_a_separate_grader_finds_only_artifacts(score):
    toml = b"artifacts = ['/workspace/out']\n[verifier]\nenvironment_mode = 'separate'\n"
    scored = await score(b"cat /workspace/* /workspace/out/*; " + PASSES, {"given": b"2", "out/a": b"mine"}, toml=toml)
    assert scored.evidence["stdout"] == "1mine"


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)  # a plain process has no such places
async def test_artifacts_outside_of_the_workspace_are_where_the_agent_left_them(score):
    toml = b"artifacts = ['/data/out', {source = '/logs/artifacts', exclude = ['*.tmp']}]\n"
    outside = {"/data": {"out/a": b"mine ", "b": b"other "}, "/logs/artifacts": {"log": b"said ", "x.tmp": b"t "}}
    script = b"cat /data/out/a /data/b /logs/artifacts/*; " + PASSES
    shared = await score(script, {}, toml=toml, outside=outside)
    assert shared.evidence["stdout"] == "mine other said t "
    assert shared.evidence["artifacts"]["/data"] == {"count": 2, "names": ["out/a", "b"]}
    separate = await score(script, {}, toml=toml + b"[verifier]\nenvironment_mode = 'separate'\n", outside=outside)
    assert separate.evidence["stdout"] == "mine said "
    ran = await score(b"candidate cat /data/out/a; " + PASSES, {}, toml=toml + OUT, outside=outside)
    assert ran.evidence["stdout"] == "mine "
    baseline = await score(b"[ -f /data/b ]" + REWARD, {}, toml=toml + b"[verifier]\nbaseline = true\n", outside=outside)
    assert baseline.scores == {"reward": 1.0}


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
async def test_what_harbor_collects_unasked_is_there_with_a_separate_environment(score):
    toml = b"[verifier]\nenvironment_mode = 'separate'\n"
    scored = await score(b"cat /logs/artifacts/log; " + PASSES, {}, toml=toml, outside={"/logs/artifacts": {"log": b"said"}})
    assert (scored.evidence["stdout"], scored.evidence["findings"]) == ("said", [])


@pytest.mark.parametrize("kind", ["process"], indirect=True)
async def test_artifacts_outside_of_the_workspace_need_bubblewrap(score):
    scored = await score(PASSES, {}, toml=b"artifacts = ['/data/out']\n")
    assert (scored.scores, scored.cause) == ({}, "task_setup")


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
async def test_a_grader_is_root_where_its_verifier_is_not(score):
    scored = await score(b"id -u; touch /etc/x; " + PASSES, toml=b"[verifier]\nuser = 'root'\n")
    if os.geteuid() == 0:
        assert (scored.scores, scored.cause) == ({}, "task_setup")
        assert "give it a user of its own" in scored.detail
    else:
        assert (scored.evidence["stdout"], scored.scores) == ("0\n", {"reward": 1.0})
        assert "Read-only file system" in scored.evidence["stderr"]


async def test_where_nothing_isolates_a_score_says_so(score, kind):
    scored = await score(PASSES)
    assert (scored.evidence["sandbox"], scored.evidence["isolated"]) == (kind, kind == "bubblewrap")


UNIT = b"""
import sys, unittest
sys.path.insert(0, "/workspace")
import solution
class It(unittest.TestCase):
    def test_it(self):
        self.assertEqual(solution.value, 1)
unittest.main()
"""
SCRIPT = b"""
import sys
sys.path.insert(0, "/workspace")
import solution
sys.exit(solution.value != 1)
"""


@pytest.fixture
async def unit_tested(score):
    """Scores a ``solution.py`` by unittest, in process."""

    async def run(solution, script=UNIT):
        test = b"LOGS=/logs/verifier python3 /tests/test_it.py"
        scored = await score(test + REWARD, {"solution.py": solution}, tests={"tests/test_it.py": script})
        if "python3: not found" in scored.evidence["stderr"] or "python3: command not found" in scored.evidence["stderr"]:
            pytest.skip("no python3 in the sandbox")
        return scored

    return run


async def test_unittest_is_guarded(unit_tested):
    honest = await unit_tested(b"value = 1")
    assert (honest.scores, honest.evidence["findings"]) == ({"reward": 1.0}, [])
    assert honest.evidence["tests"] == [{"runner": "unittest", "passed": 1, "failed": 0, "failures": []}]
    wrong = await unit_tested(b"value = 2")
    assert (wrong.scores, wrong.evidence["findings"], wrong.evidence["tests"][0]["failed"]) == ({"reward": 0.0}, [], 1)


@pytest.mark.parametrize(
    ("solution", "seen"),
    [
        (b"import os; os._exit(0)", "ended_early"),
        (b"import unittest; value = 2; unittest.TestCase.assertEqual = lambda *each: None", "canary"),
        (b"import os; value = 2; open(os.environ['LOGS'] + '/reward.json', 'w').write('{\"reward\": 1}')", "reward_written"),
        (b"import os; value = 2; os.mkdir(os.environ['LOGS'] + '/reward.txt')", "reward_written"),
        (b"import os; value = 2; os.chmod(os.environ['LOGS'], 0o555)", "reward_closed"),
    ],
)
async def test_tampering_is_a_zero_that_says_why(unit_tested, solution, seen):
    forged = await unit_tested(solution)
    assert (forged.scores, forged.cause) == ({"reward": 0.0}, None)
    assert forged.evidence["tampered"]
    assert [each["kind"] for each in forged.evidence["findings"] if each["tampering"]] == [seen]


async def test_a_script_of_the_tests_is_seen_to_its_end(unit_tested):
    honest = await unit_tested(b"import atexit; value = 1; atexit.register(print, 'bye')", SCRIPT)
    assert (honest.scores, honest.evidence["findings"]) == ({"reward": 1.0}, [])
    wrong = await unit_tested(b"value = 2", SCRIPT)
    assert (wrong.scores, wrong.evidence["findings"]) == ({"reward": 0.0}, [])
    for evil in (b"import os; os._exit(0)", b"import atexit, os; value = 2; atexit.register(os._exit, 0)"):
        forged = await unit_tested(evil, SCRIPT)
        assert (forged.scores, [each["kind"] for each in forged.evidence["findings"]]) == ({"reward": 0.0}, ["ended_early"])
