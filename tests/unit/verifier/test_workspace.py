import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.tasks import TaskToml
from evener_verifier import hooks, workspace
from evener_verifier.contents import Contents


def contents(files, links=()):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            content = text.encode()
            info.size, info.mode = len(content), 0o755
            archive.addfile(info, io.BytesIO(content))
        for name, target in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return Contents(buffer.getvalue())


def prepared(pristine, snapshot, links=(), **toml):
    graded = workspace.prepare(contents(pristine), contents(snapshot, links), TaskToml.model_validate(toml))
    left = Contents(graded.tar)
    return {name: left.read(name).decode() for name, _ in left.files()}, [each.kind for each in graded.findings]


def test_protected_files_are_as_they_were():
    pristine = {"tests/test_a.py": "a", "tests/data/x": "x", "src/lib_test.go": "go", "main.py": "m"}
    changed = {"tests/test_a.py": "pass", "src/lib_test.go": "go", "main.py": "mine", "tests/test_mine.py": "mine"}
    files, kinds = prepared(pristine, changed)
    assert files == pristine | {"main.py": "mine", "tests/test_mine.py": "mine"}
    assert kinds == ["protected_restored", "protected_restored"]


def test_a_folder_or_link_in_the_place_of_a_protected_file_gives_way():
    pristine = {"tests/test_a.py": "a"}
    assert prepared(pristine, {"tests/test_a.py/inner": "x"})[0] == pristine
    assert prepared(pristine, {"mine/test_a.py": "pass"}, [("tests", "mine")])[0] == pristine | {"mine/test_a.py": "pass"}


def test_a_task_says_what_is_protected():
    pristine, changed = {"tests/test_a.py": "a", "golden/x": "1"}, {"tests/test_a.py": "b", "golden/x": "2"}
    assert prepared(pristine, changed, verifier={"protect": []}) == (changed, [])
    assert prepared(pristine, changed, verifier={"protect": ["golden/*"]})[0] == changed | {"golden/x": "1"}


def test_hooks_are_kept_away_in_process_and_left_out_of_process():
    made = {"conftest.py": "c", "a/b/evil.pth": "p", ".git/hooks/pre-commit": "h", "pytest.py": "s", "solution.py": "ok"}
    assert prepared({}, made, verifier={"tier": "in_process"}) == ({"solution.py": "ok"}, ["hook_kept_away"] * 4)
    assert prepared({}, made, verifier={"tier": "out_of_process"}) == (made, [])


def test_a_hook_of_the_tasks_own_stays_as_it_was():
    assert prepared({"sitecustomize.py": "own"}, {"sitecustomize.py": "own"}) == ({"sitecustomize.py": "own"}, [])
    assert prepared({"setup.cfg": "[x]"}, {"setup.cfg": "[tool:pytest]\naddopts = -p evil"})[0] == {"setup.cfg": "[x]"}


@pytest.mark.parametrize(
    ("name", "content", "kept_away"),
    [
        ("pyproject.toml", "[tool.pytest.ini_options]", True),
        ("pyproject.toml", "tool.pytest.ini_options.addopts = 1", True),
        ("pyproject.toml", "[project]\nname = 'x'", False),
        ("pyproject.toml", "not toml", True),
        ("tox.ini", "[pytest]", True),
        ("tox.ini", "[tox]", False),
        ("deep/er/pytest.ini", "", True),
        ("src/pytest_like.py", "", False),
        ("docs/unittest.md", "", False),
        ("unittest/mock.py", "", True),
        (".git/objects/ab", "", False),
        ("sub/.git/config", "", True),
    ],
)
def test_what_is_a_hook(name, content, kept_away):
    assert (hooks.reason(name, content.encode) is not None) is kept_away


def test_a_separate_grader_finds_the_artifacts_only():
    pristine = {"given": "1", "out/old": "old"}
    made = {"given": "2", "extra": "x", "out/new": "new"}
    toml = {"verifier": {"environment_mode": "separate"}, "artifacts": ["/workspace/out", {"source": "missing"}]}
    assert prepared(pristine, made, **toml) == ({"given": "1", "out/new": "new"}, ["artifact_missing"])
    toml["artifacts"] = [{"source": ".", "exclude": ["old", "n*w"]}]
    assert prepared(pristine, {**made, "out/old": "new", "a/news/b": "2"}, **toml)[0] == pristine | {
        "given": "2",
        "extra": "x",
        "a/news/b": "2",
    }


def test_what_of_a_folder_outside_is_kept():
    def kept(**toml):
        tar = contents({"out/a": "1", "out/conftest.py": "c", "b": "2"}).tar
        graded = workspace.prepare_outside("/data", tar, TaskToml.model_validate({"artifacts": ["/data/out"], **toml}))
        return sorted(name for name, _ in Contents(graded.tar).files()), [each.kind for each in graded.findings]

    assert kept(verifier={"tier": "out_of_process"}) == (["b", "out/a", "out/conftest.py"], [])
    assert kept() == (["b", "out/a"], ["hook_kept_away"])
    assert kept(verifier={"environment_mode": "separate"}) == (["out/a"], ["hook_kept_away"])
    missing = {"artifacts": ["/data/none", "/elsewhere/x"], "verifier": {"environment_mode": "separate"}}
    assert kept(**missing) == ([], ["hook_kept_away", "artifact_missing"])


def test_in_an_image_all_but_the_artifacts_is_the_images(tmp_path):
    """As in Harbor: nothing of the task's environment is there, and an artifact takes the place of what the image has of it."""
    (tmp_path / "workspace/out").mkdir(parents=True)
    for name in ("judge.py", "out/old"):
        (tmp_path / "workspace" / name).write_text(name)
    toml = TaskToml.model_validate({"artifacts": ["out"], "verifier": {"environment": {"docker_image": "judge"}}})
    pristine = contents({"given": "1", "tests/test_a.py": "1", "out/tests/test_b.py": "1"})
    left = contents({"given": "2", "out/new": "new", "out/tests/test_b.py": "2"})
    taken = Contents(workspace.prepare(pristine, left, toml).tar)
    assert {name: taken.read(name) for name, _ in taken.files()} == {"out/new": b"new", "out/tests/test_b.py": b"1"}
    assert [name for name, _ in Contents(workspace.baked(tmp_path, "/workspace", toml)).files()] == ["judge.py"]
    assert not Contents(workspace.baked(tmp_path, "/data", toml)).entries


def test_nothing_can_be_executed_by_name():
    tar = workspace.without_execution(contents({"run.sh": "echo", "b": "b"}).tar)
    assert {entry.member.mode for _, entry in Contents(tar).files()} == {0o644}


NAMES = st.sampled_from(["tests/test_a.py", "tests", "a", "a/b", "conftest.py", "x.pth", "tests/test_a.py/b"])


@settings(max_examples=40)
@given(pristine=st.dictionaries(NAMES, st.text(max_size=3)), made=st.dictionaries(NAMES, st.text(max_size=3)))
def test_whatever_was_made_of_it_what_was_protected_is_there(pristine, made):
    def possible(files):
        return {name: text for name, text in files.items() if not any(other.startswith(name + "/") for other in files)}

    pristine, made = possible(pristine), possible(made)
    files, _ = prepared(pristine, made, verifier={"tier": "in_process"})
    for name, text in pristine.items():
        if name.startswith("tests/") or name == "conftest.py":
            assert files[name] == text
    assert not {name for name in files if hooks.reason(name, bytes) and files[name] != pristine.get(name)}
    assert possible(files) == files
