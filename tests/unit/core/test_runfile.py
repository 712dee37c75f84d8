from pathlib import Path

import pytest

from evener.errors import InputError
from evener.runfile import read

GOOD = """
name = "first"
policy = "./policy"
tasks = "./tasks/train"
[[harness]]
name = "pi"
[rollouts]
group_size = 8
[train]
steps = 3
learning_rate = 5e-3
[eval]
tasks = "./tasks/held-out"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "policy").mkdir()
    run = read(write(tmp_path, GOOD))
    assert run.kind == "train"
    assert run.tasks == tmp_path / "tasks/train"
    assert run.eval is not None
    assert run.eval.tasks == tmp_path / "tasks/held-out"
    assert run.policy == str(tmp_path / "policy")


def test_a_hub_id_stays_one(tmp_path):
    assert read(write(tmp_path, GOOD.replace("./policy", "Qwen/Qwen3-0.6B"))).policy == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("group_size = 8", "grup_size = 8"), "rollouts.grup_size: unknown key; did you mean 'group_size'?"),
        (("[train]", "[trian]"), "trian: unknown key; did you mean 'train'?"),
        (('name = "pi"', 'name = "pi"\nprofil = "x"'), "harness.0.profil: unknown key; did you mean 'profile'?"),
        (("steps = 3", "zzzz = 3"), "train.zzzz: unknown key; known keys: steps"),
        (("steps = 3", "steps = 0"), "train.steps: Input should be greater than or equal to 1"),
        (("group_size = 8", 'group_size = "many"'), "rollouts.group_size: Input should be a valid integer"),
        (('name = "first"', 'name = "../x"'), "name: String should match pattern"),
        (('[[harness]]\nname = "pi"\n', ""), "harness: Field required"),
        (("[train]", "[train"), "Expected ']'"),
    ],
)
def test_errors_name_file_and_key(tmp_path, change: tuple[str, str], says: str):
    path = write(tmp_path, GOOD.replace(*change))
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_missing_file(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read(tmp_path / "absent.toml")


def test_prompts_are_rendered_unless_the_file_says_otherwise(tmp_path):
    assert read(write(tmp_path, GOOD)).rollouts.prompt == "render"
    path = write(tmp_path, GOOD.replace("group_size = 8", 'prompt = "token_in"\nthinking = "strip"'))
    assert (read(path).rollouts.prompt, read(path).rollouts.thinking) == ("token_in", "strip")
    with pytest.raises(InputError, match=r"rollouts.prompt: Input should be 'render' or 'token_in'"):
        read(write(tmp_path, GOOD.replace("group_size = 8", 'prompt = "tokens"')))
