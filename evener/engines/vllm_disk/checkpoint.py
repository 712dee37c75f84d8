"""Weights that do not fit a policy whole are found out before any of them is loaded.

A policy's weights are the ``*.safetensors`` files of a folder, under the names of Hugging Face. Used by `transfer`, in vLLM's
environment; it needs torch and safetensors and nothing of vLLM.
"""

from collections.abc import Generator, Iterable, Iterator, KeysView
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"

Shapes = dict[str, tuple[int, ...]]


class CheckpointError(ValueError):
    """A folder whose weights cannot be loaded, and why."""


@dataclass(frozen=True)
class Layout:
    """The tensors of a policy: their names and shapes. ``tied``: its head is its embedding, and is no tensor of its own."""

    shapes: Shapes
    tied: bool

    @classmethod
    def of(cls, folder: Path, *, tied: bool) -> "Layout":
        """The layout of a policy folder. Raises CheckpointError."""
        with _opened(folder) as tensors:
            shapes = {name: tensors.shape(name) for name in tensors.names}
        if tied:
            shapes.pop(HEAD, None)
        return cls(shapes, tied)

    def check(self, folder: Path) -> None:
        """Raise CheckpointError unless ``folder`` holds these tensors, finite, and no others.

        A tied policy may be saved with its head where that equals the embedding.
        """
        with _opened(folder) as tensors:
            surplus = tensors.names - self.shapes.keys()
            if self.tied and HEAD in surplus:
                surplus.discard(HEAD)
                if EMBED in tensors.names and not torch.equal(tensors.get(HEAD), tensors.get(EMBED)):
                    raise CheckpointError(f"{folder}: the policy ties {HEAD} to {EMBED}, but the two tensors differ")
            for what, names in (("lacks", self.shapes.keys() - tensors.names), ("has unexpected", surplus)):
                if names:
                    raise CheckpointError(f"{folder} {what} {len(names)} tensors: {', '.join(sorted(names)[:3])}")
            for name, shape in self.shapes.items():
                if tensors.shape(name) != shape:
                    raise CheckpointError(f"{folder}: {name} has shape {tensors.shape(name)}, the policy needs {shape}")
            for name in self.shapes:
                if not torch.isfinite(tensors.get(name)).all():
                    raise CheckpointError(f"{folder}: {name} holds values that are not finite numbers")


def read(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of these names, one after another, so that no more than one need be in memory."""
    with _opened(folder) as tensors:
        for name in names:
            yield name, tensors.get(name)


@dataclass(frozen=True)
class _Tensors:
    """The tensors of open files."""

    file_of: dict[str, Any]

    @property
    def names(self) -> KeysView[str]:
        """All tensors, those of a layer one after another."""
        return self.file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from its file's head."""
        return tuple(self.file_of[name].get_slice(name).get_shape())

    def get(self, name: str) -> torch.Tensor:
        """A tensor, in memory of the CPU."""
        return self.file_of[name].get_tensor(name)


@contextmanager
def _opened(folder: Path) -> Generator[_Tensors]:
    """The safetensors files of a folder. Raises CheckpointError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file")
    file_of: dict[str, Any] = {}
    with ExitStack() as exits:
        for path in files:
            try:
                file: Any = exits.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot read weights from {path}: {error}") from error
            file_of |= dict.fromkeys(file.keys(), file)
        yield _Tensors(file_of)
