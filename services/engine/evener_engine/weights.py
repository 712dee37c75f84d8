"""A set of weights is used whole or not at all: every tensor is named, shaped and finite before anyone sees the object.

The scheduler loads the first set at start; the server loads each published one before it asks for the swap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

MODEL_TYPES = ("qwen3", "llama")
# Scalings whose table does not depend on the length of the request.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class PolicyError(ValueError):
    """A policy folder this engine cannot serve, or weights that do not fit the policy it serves."""


@dataclass(frozen=True)
class Architecture:
    """The numbers of a Qwen3 or Llama decoder, read from a policy folder's `config.json`."""

    config: Any
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    qk_norm: bool
    tied: bool
    context: int

    @classmethod
    def read(cls, folder: Path) -> Architecture:
        """Read `folder`; PolicyError names the first setting this engine does not implement."""
        try:
            config = cast("Any", AutoConfig.from_pretrained(folder))
        except (OSError, ValueError) as error:
            raise PolicyError(f"cannot read the policy's configuration in {folder}: {error}") from error
        rope = str((config.rope_parameters or {}).get("rope_type", "default")) if _known(config) else ""
        refusals = {
            f"model_type {config.model_type!r} (known: {', '.join(MODEL_TYPES)})": not _known(config),
            "attention_bias": getattr(config, "attention_bias", False),
            "mlp_bias": getattr(config, "mlp_bias", False),
            "sliding-window attention": getattr(config, "use_sliding_window", False),
            f"activation {getattr(config, 'hidden_act', None)!r} (known: silu)": _known(config) and config.hidden_act != "silu",
            f"rope type {rope!r} (known: {', '.join(ROPE_TYPES)})": _known(config) and rope not in ROPE_TYPES,
        }
        refused = [what for what, present in refusals.items() if present]
        if refused:
            raise PolicyError(f"the CPU engine does not implement {'; '.join(refused)} ({folder / 'config.json'})")
        return cls(
            config=config,
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            epsilon=config.rms_norm_eps,
            qk_norm=config.model_type == "qwen3",
            tied=bool(config.tie_word_embeddings),
            context=config.max_position_embeddings,
        )

    def rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sign-folded sine tables `[length, head_dim]`: `x*cos + roll(x, head_dim/2)*sin` rotates x."""
        rope = self.config.rope_parameters
        if rope["rope_type"] == "default":
            inverse, scale = rope["rope_theta"] ** -(torch.arange(0, self.head_dim, 2).float() / self.head_dim), 1.0
        else:
            inverse, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config, torch.device("cpu"))
        angles = torch.arange(length).float()[:, None] * inverse
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the policy by its name in transformers."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (q, self.hidden),
            "self_attn.k_proj.weight": (kv, self.hidden),
            "self_attn.v_proj.weight": (kv, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, q),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        shapes = {f"model.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()}
        shapes["model.embed_tokens.weight"] = (self.vocab, self.hidden)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


def _known(config: Any) -> bool:
    return config.model_type in MODEL_TYPES


@dataclass(frozen=True)
class Layer:
    """One decoder layer, float32, with the projections that share an input stacked."""

    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """One policy version's weights, float32."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


def load_weights(path: Path, arch: Architecture) -> Weights:
    """Weights from a safetensors file, or from all those of a folder.

    PolicyError: nothing there, unreadable, a tensor missing, unexpected, misshapen or not finite.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise PolicyError(f"{path} holds no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise PolicyError(f"cannot read weights from {file}: {error}") from error
    _validate(tensors, arch, path)
    tensors = {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
    embed = tensors["model.embed_tokens.weight"]
    layers = tuple(_layer(tensors, i, arch) for i in range(arch.layers))
    head = embed if arch.tied else tensors["lm_head.weight"]
    return Weights(embed, layers, tensors["model.norm.weight"], head)


def _validate(tensors: dict[str, Tensor], arch: Architecture, path: Path) -> None:
    if arch.tied and (head := tensors.pop("lm_head.weight", None)) is not None:
        embed = tensors.get("model.embed_tokens.weight")
        if embed is None or not torch.equal(head, embed):
            raise PolicyError(f"{path}: the policy ties lm_head to embed_tokens, but the file's two tensors differ")
    shapes = arch.shapes()
    for what, names in (("lacks", shapes.keys() - tensors.keys()), ("has unexpected", tensors.keys() - shapes.keys())):
        if names:
            raise PolicyError(f"{path} {what} {len(names)} tensors: {', '.join(sorted(names)[:3])}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise PolicyError(f"{path}: {name} has shape {tuple(tensor.shape)}, the policy needs {shapes[name]}")
        if not tensor.is_floating_point() or not math.isfinite(tensor.float().abs().sum().item()):
            raise PolicyError(f"{path}: {name} holds values that are not finite numbers")


def _layer(tensors: dict[str, Tensor], index: int, arch: Architecture) -> Layer:
    def get(name: str) -> Tensor:
        return tensors[f"model.layers.{index}.{name}.weight"]

    norm = None
    if arch.qk_norm:
        norms = (get("self_attn.q_norm").expand(arch.heads, -1), get("self_attn.k_norm").expand(arch.kv_heads, -1))
        norm = torch.cat(norms)
    return Layer(
        input_norm=get("input_layernorm"),
        qkv=torch.cat([get(f"self_attn.{name}_proj") for name in "qkv"]),
        qk_norm=norm,
        out=get("self_attn.o_proj"),
        post_norm=get("post_attention_layernorm"),
        gate_up=torch.cat((get("mlp.gate_proj"), get("mlp.up_proj"))),
        down=get("mlp.down_proj"),
    )
