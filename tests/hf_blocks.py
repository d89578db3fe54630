"""MoE blocks of the installed transformers, loaded from checkpoints that it or we have written."""

from __future__ import annotations

from pathlib import Path

import torch

# Sizes that a family cannot have otherwise: V4's shared expert is always one.
BLOCKS = {
    "deepseek_v3": ("DeepseekV3MoE", {"num_shared": 2}),
    "deepseek_v32": ("DeepseekV32MoE", {"num_shared": 1}),
    "glm_moe_dsa": ("GlmMoeDsaMoE", {"num_shared": 1}),
    "glm4_moe": ("Glm4MoeMoE", {"num_shared": 1}),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", {}),
    "mixtral": ("MixtralSparseMoeBlock", {}),
    "deepseek_v4": ("DeepseekV4SparseMoeBlock", {}),
}
"""By family: the class of its block, and sizes of the checkpoint."""

LAYER = 1


def hf_block(folder: Path, family: str) -> torch.nn.Module:
    """transformers' MoE block of the layer, in FP32, plain eager experts."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    block = model.model.layers[LAYER].mlp
    assert type(block).__name__ == BLOCKS[family][0]
    return block.eval()


def hidden_states(hidden: int = 384, tokens: int = 48) -> torch.Tensor:
    """BF16 [tokens, hidden]."""
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(9)).bfloat16()
