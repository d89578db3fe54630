"""Writes small checkpoints in the real format, for the demo and the tests.

BF16 ones come from transformers' own ``save_pretrained``. FP8 ones are the same files with every
MoE projection replaced by e4m3 and ``weight_scale_inv``, as DeepSeek, GLM and Qwen publish them
(transformers quantises on a GPU only).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import load_file, save_file

from megamoe.errors import SpecError
from megamoe.reference.quant import quantize_128x128

__all__ = ["FAMILIES", "tiny_config", "write_checkpoint"]

_ATTENTION: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LATENT: Final[dict[str, Any]] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
_INDEXER: Final[dict[str, Any]] = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 2}
_GROUPED: Final[dict[str, Any]] = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v3": {**_LATENT, **_GROUPED, "num_nextn_predict_layers": 0},
    "deepseek_v32": {**_LATENT, **_GROUPED, **_INDEXER},
    "glm_moe_dsa": {**_LATENT, **_GROUPED, **_INDEXER, "n_group": 1, "topk_group": 1},
    "glm4_moe": {**_GROUPED, "n_group": 1, "topk_group": 1},
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "mixtral": {},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 64,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_topk": 8,
        "index_head_dim": 32,
        "index_n_heads": 2,
    },
}
"""Families that can be written, with what is particular to their configurations.

Layer 0 is dense, except in Mixtral (all layers are MoE) and DeepSeek-V4 (it routes by token id).
"""


def tiny_config(
    family: str,
    *,
    hidden: int = 256,
    inter: int = 128,
    num_experts: int = 8,
    topk: int = 2,
    num_shared: int = 1,
    num_layers: int = 2,
) -> Any:
    """A transformers configuration of a family, small all over.

    Raises:
        SpecError: an unknown family.
    """
    from transformers import AutoConfig

    if family not in FAMILIES:
        raise SpecError(f"family {family!r}: must be one of {', '.join(FAMILIES)}")
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": num_layers,
        "num_experts_per_tok": topk,
    }
    if family == "qwen3_moe":
        sizes |= {"num_experts": num_experts, "moe_intermediate_size": inter}
    elif family == "mixtral":
        sizes |= {"num_local_experts": num_experts}
    elif family == "deepseek_v4":
        kinds = ["hash_moe"] + ["moe"] * (num_layers - 1)
        sizes |= {"n_routed_experts": num_experts, "mlp_layer_types": kinds}
        sizes |= {"moe_intermediate_size": inter}
        del sizes["intermediate_size"]
    else:
        sizes |= {
            "n_routed_experts": num_experts,
            "n_shared_experts": num_shared,
            "moe_intermediate_size": inter,
        }
    return AutoConfig.for_model(family, **{**_ATTENTION, **FAMILIES[family], **sizes})


def write_checkpoint(
    directory: str | Path,
    family: str,
    quantization: Literal["bf16", "fp8"] = "bf16",
    *,
    seed: int = 0,
    shard_size: str = "1MB",
    fused: bool = False,
    **sizes: int,
) -> Path:
    """Writes a checkpoint with random weights.

    Args:
        directory: made if missing.
        family: a key of FAMILIES.
        quantization: of the MoE projections.
        seed: of the weights.
        shard_size: above it, files are split and an index is written.
        fused: keep transformers' own 3-D expert tensors instead of the published names (BF16).
        **sizes: of ``tiny_config``.

    Raises:
        SpecError: an unknown family, or fused FP8.
    """
    from transformers import AutoModelForCausalLM

    if fused and quantization == "fp8":
        raise SpecError("fused = True is for bf16: published FP8 checkpoints are not fused")
    folder = Path(directory)
    config = tiny_config(family, **sizes)
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        _randomise(model)
        model.save_pretrained(folder, max_shard_size=shard_size, save_original_format=not fused)
    if quantization == "fp8":
        _quantise_files(folder)
    return folder


def _randomise(model: Any) -> None:
    """Weights of unit gain, so that outputs are of order 1 and routers have clear winners."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)


def _quantise_files(folder: Path) -> None:
    """Replaces MoE projections by e4m3 and ``weight_scale_inv``, in every file and the index."""
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text()) if index_path.exists() else {"weight_map": {}}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name in list(tensors):
            if "experts." not in name or not name.endswith(".weight"):
                continue
            weight, scale = quantize_128x128(tensors[name])
            scale_name = f"{name}_scale_inv"
            tensors[name], tensors[scale_name] = weight, scale
            index["weight_map"][scale_name] = file.name
        save_file(tensors, file, metadata={"format": "pt"})
    if index_path.exists():
        index_path.write_text(json.dumps(index, indent=2, sort_keys=True))
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    config_path.write_text(json.dumps(config, indent=2))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
