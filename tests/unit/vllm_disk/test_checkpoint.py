"""What vLLM's plugin accepts as weights, and that importing the plugin costs nothing where there is no vLLM."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EMBED, HEAD, DOWN = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.down_proj.weight"

pytestmark = pytest.mark.torch


def write(folder: Path, **changes: object) -> Path:
    """A policy's two files; ``changes`` by the last part of a name, None: the tensor is left out."""
    import torch
    from safetensors.torch import save_file

    tensors = {EMBED: torch.ones(6, 4), DOWN: torch.ones(4, 8)} | {
        {"embed": EMBED, "head": HEAD, "down": DOWN}.get(name, name): value for name, value in changes.items()
    }
    folder.mkdir(parents=True)
    for index, (name, tensor) in enumerate(tensors.items()):
        if tensor is not None:
            save_file({name: tensor}, folder / f"model-{index}.safetensors")
    return folder


def check(tmp_path: Path, *, tied: bool = True, **changes: object) -> None:
    from evener.engines.vllm_disk.checkpoint import Layout

    start = write(tmp_path / "start") if tied else write(tmp_path / "start", head=_ones(6, 4))
    Layout.of(start, tied=tied).check(write(tmp_path / "new", **changes))


def _ones(*shape: int):
    import torch

    return torch.ones(shape)


def test_other_values_of_the_same_layout_are_accepted(tmp_path: Path) -> None:
    check(tmp_path, down=_ones(4, 8) * 3)


def test_a_tied_head_may_be_there_where_it_is_the_embedding(tmp_path: Path) -> None:
    check(tmp_path / "equal", head=_ones(6, 4))
    with pytest.raises(ValueError, match=r"ties lm_head.weight to model.embed_tokens.weight, but the two tensors differ"):
        check(tmp_path / "other", head=_ones(6, 4) * 2)


def test_an_untied_head_is_a_tensor_as_others(tmp_path: Path) -> None:
    check(tmp_path / "there", tied=False, head=_ones(6, 4) * 2)
    with pytest.raises(ValueError, match=r"lacks 1 tensors: lm_head.weight"):
        check(tmp_path / "absent", tied=False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"down": None}, "lacks 1 tensors: model.layers.0.mlp.down_proj.weight"),
        ({"extra": "a tensor"}, "has unexpected 1 tensors: extra"),
        ({"down": "misshapen"}, r"has shape \(4, 7\), the policy needs \(4, 8\)"),
        ({"down": "not finite"}, "not finite"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    made = {"a tensor": _ones(1), "misshapen": _ones(4, 7), "not finite": _ones(4, 8) / 0}
    with pytest.raises(ValueError, match=reason):
        check(tmp_path, **{name: made.get(str(value)) for name, value in changes.items()})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    from evener.engines.vllm_disk.checkpoint import Layout

    layout = Layout.of(write(tmp_path / "start"), tied=True)
    with pytest.raises(ValueError, match=r"nowhere holds no \*.safetensors file"):
        layout.check(tmp_path / "nowhere")
    cut = write(tmp_path / "cut") / "model-1.safetensors"
    cut.write_bytes(cut.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"cannot read weights from .*model-1.safetensors"):
        layout.check(cut.parent)


def test_tensors_are_read_by_name(tmp_path: Path) -> None:
    from evener.engines.vllm_disk.checkpoint import read

    folder = write(tmp_path / "start", head=_ones(6, 4))
    assert [(name, tuple(tensor.shape)) for name, tensor in read(folder, [DOWN, EMBED])] == [(DOWN, (4, 8)), (EMBED, (6, 4))]


def test_the_plugin_is_an_entry_point_and_imports_neither_torch_nor_vllm() -> None:
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, name = entry["evener_disk"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
    script = f"import sys, {module}; print(sorted({{'torch', 'vllm', 'safetensors'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
