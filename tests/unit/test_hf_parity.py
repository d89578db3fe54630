"""The layer against the MoE modules of the installed transformers, from checkpoint files to output.

A checkpoint is written by ``save_pretrained``; transformers loads it in FP32 and runs its own block
on the same hidden states; we load it through ``Checkpoint``, ``Router`` and ``iter_local_experts``
and run the oracle.
"""

from __future__ import annotations

import json

import pytest
import torch

from launcher.synthetic import FAMILIES, write_checkpoint
from megamoe.checkpoint import Checkpoint
from megamoe.errors import SpecError
from megamoe.reference.moe import moe_forward
from megamoe.weights import iter_local_experts
from tests.compare import assert_bitwise, assert_matches_unquantised
from tests.hf_blocks import BLOCKS, LAYER, hf_block, hidden_states

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> {"bf16": folder, "fp8": folder}, of the same weights; written once each."""
    made = {}

    def get(family):
        if family not in made:
            base = tmp_path_factory.mktemp(family)
            sizes = {"hidden": 384, "inter": 256, "num_experts": 8, "topk": 3}
            made[family] = {
                q: write_checkpoint(base / q, family, q, seed=4, **sizes, **BLOCKS[family][1])
                for q in ("bf16", "fp8")
            }
        return made[family]

    return get


def _ours(checkpoint, x, weight_dtype, num_ranks=2):
    """Every rank's experts, read as that rank would, and the whole batch through the oracle."""
    spec = checkpoint.moe_spec(LAYER, weight_dtype)
    # FP32 logits on both sides: the routers' own dtypes are compared in test_router.py.
    ids, weight = checkpoint.router(LAYER)(x.float())
    local = spec.experts_per_rank(num_ranks)
    routed = []
    for rank in range(num_ranks):
        experts = list(iter_local_experts(checkpoint, LAYER, rank, num_ranks, weight_dtype))
        routed += experts[:local]
    return spec, moe_forward(spec, x, ids, weight, routed, experts[local:])


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_agree(family, folders):
    x = hidden_states()
    block = hf_block(folders(family)["bf16"], family)
    with torch.no_grad():
        want = block(x.float()[None])[0]
    checkpoint = Checkpoint.open(folders(family)["bf16"])
    spec, y = _ours(checkpoint, x, "bf16")
    assert_matches_unquantised(y, want, spec, f"{family} bf16")
    spec, y8 = _ours(checkpoint, x, "fp8")
    found = assert_matches_unquantised(y8, want, spec, f"{family} fp8")
    assert found.norm > 0.01  # it really ran in FP8

    stored = Checkpoint.open(folders(family)["fp8"])
    assert stored.quantized
    spec, y_stored = _ours(stored, x, None)
    assert spec.weight_dtype == "fp8"
    assert_bitwise(y_stored, y8, f"{family}: stored FP8 against FP8 made at load")


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_from_checkpoints_agree(family, folders):
    """In BF16, as a BF16 model runs: gate weights keep the dtype that the file holds."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folders(family)["bf16"], dtype=torch.bfloat16
    )
    x = hidden_states()
    with torch.no_grad():
        _, want_weight, want_ids = model.model.layers[LAYER].mlp.gate(x)
    ids, weight = Checkpoint.open(folders(family)["bf16"]).router(LAYER)(x)
    assert torch.equal(ids, want_ids)
    assert torch.equal(weight, want_weight.float())


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen3_moe", "deepseek_v4"])
def test_fused_files_hold_the_same_layer(family, folders, tmp_path):
    sizes = {"hidden": 384, "inter": 256, "num_experts": 8, "topk": 3, **BLOCKS[family][1]}
    fused = write_checkpoint(tmp_path / "fused", family, seed=4, fused=True, **sizes)
    assert any("gate_up_proj" in name for name in _names(fused))
    x = hidden_states()
    _, want = _ours(Checkpoint.open(folders(family)["bf16"]), x, "bf16")
    _, y = _ours(Checkpoint.open(fused), x, "bf16")
    assert_bitwise(y, want, family)


def test_the_tolerance_finds_a_foreign_expert(folders):
    """Swapping two experts, or leaving out the shared one, is far outside the FP8 tolerance."""
    family = "deepseek_v3"
    x = hidden_states()
    checkpoint = Checkpoint.open(folders(family)["bf16"])
    with torch.no_grad():
        want = hf_block(folders(family)["bf16"], family)(x.float()[None])[0]
    spec = checkpoint.moe_spec(LAYER, "fp8")
    ids, weight = checkpoint.router(LAYER)(x.float())
    experts = list(iter_local_experts(checkpoint, LAYER, 0, 1, "fp8"))
    shared = experts[spec.num_experts :]
    swapped = [experts[1], experts[0], *experts[2 : spec.num_experts]]
    y = moe_forward(spec, x, ids, weight, swapped, shared)
    with pytest.raises(AssertionError, match="norm error"):
        assert_matches_unquantised(y, want, spec)
    y = moe_forward(spec, x, ids, weight, experts[: spec.num_experts], [shared[0], shared[0]])
    with pytest.raises(AssertionError, match="norm error"):
        assert_matches_unquantised(y, want, spec)


def _names(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return index["weight_map"]


def test_files_have_the_published_names(folders):
    names = _names(folders("deepseek_v3")["fp8"])
    stem = "model.layers.1.mlp"
    for projection in ("gate", "up", "down"):
        for where in ("experts.7", "shared_experts"):
            assert f"{stem}.{where}.{projection}_proj.weight" in names
            assert f"{stem}.{where}.{projection}_proj.weight_scale_inv" in names
    assert f"{stem}.gate.e_score_correction_bias" in names
    assert len(set(names.values())) > 1
    assert "model.layers.1.block_sparse_moe.experts.7.w3.weight" in _names(
        folders("mixtral")["bf16"]
    )


def test_unwritable_checkpoints_are_refused(tmp_path):
    with pytest.raises(SpecError, match="'llama': must be one of deepseek_v3"):
        write_checkpoint(tmp_path, "llama")
    with pytest.raises(SpecError, match="fused = True is for bf16"):
        write_checkpoint(tmp_path, "mixtral", "fp8", fused=True)
