"""A grader's own image is its whole system, tests included; the candidate sees nothing of it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from evener.blobs import Blobs
from evener.sandbox.probe import bubblewrap_missing
from evener_verifier import verifier
from tests.unit.verifier.orders import order

TOML = b"artifacts = ['out']\n[verifier]\n%s[verifier.environment]\ndocker_image = 'example.org/judge:1'\n"
OUT_OF_PROCESS = TOML % b"tier = 'out_of_process'\n"
BUNDLED = b"echo 0 > /logs/verifier/reward.txt"
PYTHON = Path("/usr/bin/python3").resolve()


def add_program(root: Path, source: Path, name: str) -> None:
    """Copy a program and the libraries that it is linked with."""
    (root / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(source, root / "bin" / name)
    said = subprocess.run(["ldd", source], capture_output=True, text=True, check=True).stdout
    for library in (Path(word) for word in said.split() if word.startswith("/")):
        (root / library.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library.relative_to("/"))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with one image of few programs."""
    root = tmp_path / "images/example.org/judge:1"
    for name in ("sh", "cat", "ls", "id", "setpriv", "touch"):
        source = shutil.which(name)
        assert source, name
        add_program(root, Path(source).resolve(), name)
    for path, text in {
        "etc/judge.conf": "0.5\n",
        "etc/passwd": "mallory:x:0:0::/:/bin/sh\n",
        "opt/judge/data": "judged\n",
        "logs/old": "old\n",
        "workspace/baked": "baked\n",
        "tests/test.sh": "cat /etc/judge.conf > /logs/verifier/reward.txt\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "var").mkdir()
    (root / "var/link").symlink_to("/opt/judge")
    (root / "link").symlink_to("opt/judge")
    return tmp_path / "images"


@pytest.fixture
async def score(tmp_path, images):
    if missing := await bubblewrap_missing():
        pytest.skip(f"bubblewrap does not work here: {missing}")
    blobs = Blobs(tmp_path / "blobs")

    async def run(script=None, *, toml=TOML % b"", kind="bubblewrap", images=images):
        if script is not None:
            (images / "example.org/judge:1/tests/test.sh").write_text(script)
        wanted = order(blobs, kind, BUNDLED, {"given": b"2", "out/a": b"mine\n"}, toml=toml)
        scored = await verifier.score(wanted, blobs, tmp_path / "sandboxes", images=images)
        assert not list((tmp_path / "sandboxes").glob("*")), "a sandbox was left behind"
        return scored

    return run


async def test_the_image_is_the_graders_system_and_has_its_tests(score):
    scored = await score()
    assert (scored.scores, scored.cause) == ({"reward": 0.5}, None)
    said = "cat /opt/judge/data /link/data /var/link/data; ls /workspace /logs; cat /workspace/out/a; id -un\n"
    scored = await score(
        f"{said}ls /usr/bin; touch /opt/judge/x /etc/x; cat /tests/expected; echo 1 > /logs/verifier/reward.txt\n"
    )
    assert scored.scores == {"reward": 1.0}
    said = scored.evidence["stdout"].split()
    assert said[:3] == ["judged"] * 3
    assert said[3:] == ["/logs:", "artifacts", "old", "verifier", "/workspace:", "baked", "out", "mine", "agent"]
    errors = scored.evidence["stderr"]
    assert errors.count("Read-only file system") == 2
    assert "/tests/expected: No such file" in errors


async def test_the_candidate_sees_nothing_of_the_image(score, images):
    if not PYTHON.exists():
        pytest.skip("no python3 in /usr/bin")
    root = images / "example.org/judge:1"
    add_program(root, PYTHON, "python3")
    library = Path(f"/usr/lib/{PYTHON.name}")
    large = shutil.ignore_patterns("__pycache__", "test*", "dist-packages", "lib2to3", "ensurepip", "pydoc*", "*.a", "config-*")
    shutil.copytree(library, root / library.relative_to("/"), ignore=large)
    script = "candidate sh -c 'cat /etc/judge.conf out/a; ls /usr/bin/env'; cat /etc/judge.conf > /logs/verifier/reward.txt\n"
    scored = await score(script, toml=OUT_OF_PROCESS)
    assert scored.evidence["stdout"].split() == ["mine", "/usr/bin/env"]
    assert "/etc/judge.conf: No such file" in scored.evidence["stderr"]
    assert (scored.scores, scored.evidence["tier"]) == ({"reward": 0.5}, "out_of_process")


async def test_an_image_that_is_not_there_is_a_fault_of_ours(score, images):
    shutil.rmtree(images / "example.org")
    scored = await score()
    assert (scored.scores, scored.cause) == ({}, "sandbox_failed")
    assert scored.detail.startswith(f"{images}/example.org/judge:1: the grader's image is not there")
    unset = await score(images=None)
    assert (unset.cause, unset.detail.split()[0]) == ("sandbox_failed", "EVENER_GRADER_IMAGES")


async def test_an_image_in_which_no_grader_can_run_is_the_authors_to_mend(score, images):
    weak = await score(kind="process")
    assert (weak.cause, "bubblewrap" in weak.detail) == ("task_setup", True)
    without_python = await score(toml=OUT_OF_PROCESS)
    assert (without_python.cause, "has no python3" in without_python.detail) == ("task_setup", True)
    (images / "example.org/judge:1/tests/test.sh").unlink()
    without_tests = await score()
    assert (without_tests.cause, "has no /tests/test.sh" in without_tests.detail) == ("task_setup", True)
    assert (await score(toml=b"verify = 'true'\n" + TOML % b"")).scores == {"reward": 1.0}
