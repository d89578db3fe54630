"""Model families: what a checkpoint calls the tensors of an MoE layer, and which layers are MoE.

Names that are understood, P being the layer's MoE prefix (``model.layers.N.mlp``):

    P.gate.weight, P.gate.e_score_correction_bias       router
    P.experts.E.{gate,up,down}_proj.weight              one tensor per projection of an expert
    P.experts.E.{w1,w3,w2}.weight                       the same (Mixtral, DeepSeek-V4)
    P.experts.gate_up_proj, P.experts.down_proj         fused over experts [E, 2I, H] and [E, H, I]
    P.shared_experts.{gate,up,down}_proj.weight         shared experts, side by side
    ….weight_scale_inv (fused: …_scale_inv)             FP32 [rows/128, columns/128] of e4m3 weights
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from megamoe.errors import CheckpointError
from megamoe.router import (
    Router,
    deepseek_v4_router,
    mixtral_router,
    qwen_router,
    sigmoid_router,
)

__all__ = ["FAMILIES", "Config", "Family", "Names", "family_of"]

Config = dict[str, Any]


@dataclass(frozen=True)
class Names:
    """How tensors of a layer are called: ``prefix`` with its number, and what follows it."""

    prefix: str
    gate: str
    up: str
    down: str
    bias: str

    @classmethod
    def proj(cls, prefix: str) -> Names:
        """The spelling of most families."""
        return cls(prefix, "gate_proj", "up_proj", "down_proj", "gate.e_score_correction_bias")

    @classmethod
    def w123(cls, prefix: str) -> Names:
        """The spelling of Mixtral and DeepSeek-V4."""
        return cls(prefix, "w1", "w3", "w2", "gate.bias")


@dataclass(frozen=True)
class Family:
    """What one ``model_type`` calls things.

    Attributes:
        names: spellings in use; a layer has the first whose router it finds.
        router: builds the router from configuration, weight and bias.
        layers: which layers are MoE.
        inter: configuration field of I.
        bias: the router has a correction bias.
    """

    names: tuple[Names, ...]
    router: Callable[[Config, Tensor, Tensor | None], Router]
    layers: Callable[[Config], list[int]]
    inter: str = "moe_intermediate_size"
    bias: bool = True


def _layers_after_dense(config: Config) -> list[int]:
    count = config["num_hidden_layers"]
    if types := config.get("mlp_layer_types"):
        return [n for n, kind in enumerate(types[:count]) if kind != "dense"]
    first, step = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    return [n for n in range(first, count) if n % step == 0]


def _layers_qwen(config: Config) -> list[int]:
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    count = config["num_hidden_layers"]
    return [n for n in range(count) if n not in dense and (n + 1) % step == 0]


def _layers_all(config: Config) -> list[int]:
    return list(range(config["num_hidden_layers"]))


_MLP: Final = Names.proj("model.layers.{}.mlp")
_DEEPSEEK: Final = Family((_MLP,), sigmoid_router, _layers_after_dense)

FAMILIES: Final[dict[str, Family]] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "qwen3_moe": Family((_MLP,), qwen_router, _layers_qwen, bias=False),
    "mixtral": Family(
        names=(Names.w123("model.layers.{}.block_sparse_moe"), _MLP),
        router=mixtral_router,
        layers=_layers_all,
        inter="intermediate_size",
        bias=False,
    ),
    "deepseek_v4": Family(
        names=(Names.w123("layers.{}.ffn"), Names.w123("model.layers.{}.ffn"), _MLP),
        router=deepseek_v4_router,
        layers=_layers_all,
    ),
}
"""Families by ``model_type``."""

_GATED_SHARED: Final = (
    "its shared expert is scaled by a learned gate per token (shared_expert_gate), which this "
    "layer cannot represent"
)
_REJECTED: Final = {
    "qwen2_moe": _GATED_SHARED,
    "qwen3_next": _GATED_SHARED,
    "gpt_oss": "its experts have biases and MXFP4 weights",
}


def family_of(config: Config, path: Path) -> Family:
    """The family of a ``config.json``; ``path`` is the folder, for messages.

    Raises:
        CheckpointError: an unknown or unsupported ``model_type``, or another activation than silu.
    """
    kind = config.get("model_type")
    if kind in _REJECTED:
        raise CheckpointError(f"{path} is a {kind} checkpoint: {_REJECTED[kind]}")
    if kind not in FAMILIES:
        raise CheckpointError(
            f"{path}/config.json has model_type {kind!r}; known are {', '.join(sorted(FAMILIES))}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{path} has hidden_act {config['hidden_act']!r}; only silu is known")
    return FAMILIES[kind]
