"""The CUDA layer against the MoE modules of the installed transformers, from checkpoint to output.

Two ranks that share the GPU read their own experts of a checkpoint, and bring unequal parts of the
batch; transformers loads the same files in FP32 and runs its block on all of it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launcher.synthetic import FAMILIES, write_checkpoint
from megamoe.checkpoint import Checkpoint
from megamoe.weights import iter_local_experts
from tests.compare import assert_bitwise, assert_matches_unquantised
from tests.gpu.moe_runs import BIG, MINIMUM, gpu, opened
from tests.groups import run_group
from tests.hf_blocks import BLOCKS, LAYER, hf_block, hidden_states

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

SIZES = {"hidden": 256, "inter": 128, "num_experts": 8, "topk": 3}
SPLIT = (31, 17)


def layer_output(checkpoint, x, weight_dtype, config):
    """[T, H] of two ranks, and the layer's spec."""
    spec = checkpoint.moe_spec(LAYER, weight_dtype)
    # FP32 logits on both sides, as in tests/unit/test_hf_parity.py.
    ids, weight = checkpoint.router(LAYER)(x.float())
    parts = [t.split(SPLIT) for t in (x, ids, weight)]

    def body(rendezvous):
        rank = rendezvous.rank
        with opened(spec, replace(config, num_ranks=2, timeout_s=10), rendezvous) as layer:
            layer.load_weights(iter_local_experts(checkpoint, LAYER, rank, 2, weight_dtype))
            return layer.run(*(gpu(part[rank]) for part in parts)).cpu()

    return torch.cat(run_group(2, body)), spec


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_agree(family, tmp_path):
    if family not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    folders = {
        q: write_checkpoint(tmp_path / q, family, q, seed=4, **SIZES, **BLOCKS[family][1])
        for q in ("bf16", "fp8")
    }
    x = hidden_states(SIZES["hidden"], sum(SPLIT))
    block = hf_block(folders["bf16"], family).cuda()
    with torch.no_grad():
        want = block(x.float().cuda()[None])[0].cpu()
    checkpoint = Checkpoint.open(folders["bf16"])
    y, spec = layer_output(checkpoint, x, "bf16", BIG)
    assert_matches_unquantised(y, want, spec, f"{family} bf16")
    y8, spec = layer_output(checkpoint, x, "fp8", BIG)
    found = assert_matches_unquantised(y8, want, spec, f"{family} fp8")
    assert found.norm > 0.01  # it really ran in FP8
    stored, _ = layer_output(Checkpoint.open(folders["fp8"]), x, None, MINIMUM)
    assert_bitwise(stored, y8, f"{family}: stored FP8, smallest rings, against FP8 made at load")


def test_required_families_are_there():
    """A skip above never leaves nothing."""
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    assert {"deepseek_v3", "qwen3_moe", "mixtral"} <= set(known)
