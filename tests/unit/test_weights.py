"""Expert weights: validation, sharding, conversion, and the memory that loading takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from megamoe.checkpoint import Checkpoint
from megamoe.errors import InputError, SpecError
from megamoe.reference.quant import dequantize_128x128, quantize_128x128
from megamoe.spec import MoESpec
from megamoe.weights import (
    check_expert,
    iter_local_experts,
    local_expert_ids,
    random_expert,
    random_experts,
)

SPEC = MoESpec(hidden=256, inter=128, num_experts=8, topk=2, num_shared=1)
BF16 = replace(SPEC, weight_dtype="bf16")


def _same(a, b):
    for name in ("w1", "w1_scale", "w2", "w2_scale"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name


@pytest.mark.parametrize("spec", [SPEC, BF16], ids=["fp8", "bf16"])
def test_random_experts_do_not_depend_on_the_number_of_ranks(spec):
    alone = list(random_experts(spec, 0, 1, seed=5))
    assert [e.index for e in alone] == list(range(9))
    for num_ranks in (2, 4):
        for rank in range(num_ranks):
            mine = list(random_experts(spec, rank, num_ranks, seed=5))
            local = 8 // num_ranks
            assert [e.index for e in mine] == list(range(local + 1))
            for e in mine:
                check_expert(spec, e, num_ranks)
                _same(e, alone[8 if e.index == local else rank * local + e.index])
    assert not torch.equal(alone[0].w1.float(), alone[1].w1.float())
    assert not torch.equal(alone[0].w1.float(), random_expert(spec, 0, 0, seed=6).w1.float())


def test_random_blocks_differ_in_scale():
    spec = replace(SPEC, hidden=1024, inter=512)
    scale = random_expert(spec, 0, 0, seed=1).w1_scale
    assert 3 < float(scale.max() / scale.min()) < 16


def test_local_expert_ids():
    assert local_expert_ids(SPEC, 3, 4) == range(6, 8)
    with pytest.raises(SpecError, match=r"rank = 4: must be in 0\.\.3"):
        local_expert_ids(SPEC, 4, 4)
    with pytest.raises(SpecError, match="not divisible by num_ranks = 3"):
        local_expert_ids(SPEC, 0, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"index": 5},
            r"index 5: must be an int; this rank has local experts 0\.\.4 \(4 routed, 1 shared\)",
        ),
        ({"w1": torch.zeros(256, 256)}, r"expert 1: w1 is torch.float32 \(256, 256\); want"),
        ({"w2": torch.zeros(128, 256, dtype=torch.float8_e4m3fn)}, r"w2 is .* \(128, 256\); want"),
        ({"w1_scale": None}, "w1_scale is missing"),
        ({"index": 0.5}, r"index 0\.5: must be an int"),
        ({"w1": [1, 2]}, "expert 1: w1 is a list: must be a torch.Tensor"),
        (
            {"w1": torch.zeros(256, 256).to_sparse()},
            "w1 is torch.sparse_coo: must be torch.strided",
        ),
        ({"w1": torch.zeros(256, 256, device="meta")}, "w1 is on meta"),
        ({"w2_scale": torch._neg_view(torch.ones(2, 1))}, "w2_scale is a lazily negated view"),
        ({"w2_scale": torch.ones(1, 2)}, r"w2_scale is torch.float32 \(1, 2\); want .* \(2, 1\)"),
    ],
)
def test_wrong_experts_are_named(change, message):
    good = random_expert(SPEC, 1, 1, seed=1)
    check_expert(SPEC, good, 2)
    with pytest.raises(InputError, match=message):
        check_expert(SPEC, replace(good, **change), 2)


def test_bf16_experts_have_no_scales():
    expert = random_expert(BF16, 1, 1, seed=1)
    assert expert.nbytes == 3 * 256 * 128 * 2
    with pytest.raises(InputError, match="w1_scale is given for BF16"):
        check_expert(BF16, replace(expert, w1_scale=torch.ones(2, 2)), 2)


# ---------------------------------------------------------------- from a checkpoint

_HIDDEN, _INTER, _EXPERTS = 1280, 640, 16
_CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": _HIDDEN,
    "moe_intermediate_size": _INTER,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}
_PREFIX = "model.layers.0.mlp"


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A BF16 layer of 79 MB, in names per expert and fused, one folder each."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(_EXPERTS, 2 * _INTER, _HIDDEN, generator=generator).bfloat16()
    down = torch.randn(_EXPERTS, _HIDDEN, _INTER, generator=generator).bfloat16()
    router = {f"{_PREFIX}.gate.weight": torch.zeros(_EXPERTS, _HIDDEN).bfloat16()}
    fused = {f"{_PREFIX}.experts.gate_up_proj": gate_up, f"{_PREFIX}.experts.down_proj": down}
    single = {}
    for e in range(_EXPERTS):
        gate, up = gate_up[e].chunk(2)
        for name, w in (("gate", gate), ("up", up), ("down", down[e])):
            single[f"{_PREFIX}.experts.{e}.{name}_proj.weight"] = w.contiguous()
    folders = {}
    for name, tensors in (("single", single), ("fused", fused)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(_CONFIG))
        save_file(router | tensors, folder / "model.safetensors")
        folders[name] = folder
    return folders


@pytest.mark.parametrize("layout", ["single", "fused"])
def test_bf16_weights_are_quantised_at_load(big, layout):
    checkpoint = Checkpoint.open(big[layout])
    kept = list(iter_local_experts(checkpoint, 0, 3, 8))
    made = list(iter_local_experts(checkpoint, 0, 3, 8, "fp8"))
    spec = checkpoint.moe_spec(0, "fp8")
    assert [e.index for e in made] == [0, 1]
    for bf16, fp8 in zip(kept, made, strict=True):
        check_expert(spec, fp8, 8)
        for w, q, scale in ((bf16.w1, fp8.w1, fp8.w1_scale), (bf16.w2, fp8.w2, fp8.w2_scale)):
            want, want_scale = quantize_128x128(w)  # in one piece; the loader works in chunks
            assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
            assert torch.equal(scale, want_scale)


def test_fp8_weights_become_bf16_if_asked(tmp_path):
    expert = random_expert(replace(SPEC, num_shared=0), 0, 0, seed=3)
    tensors = {f"{_PREFIX}.gate.weight": torch.zeros(1, 256)}
    gate, up = expert.w1.chunk(2)
    gate_scale, up_scale = expert.w1_scale.chunk(2)
    for name, w, scale in (
        ("gate", gate, gate_scale),
        ("up", up, up_scale),
        ("down", expert.w2, expert.w2_scale),
    ):
        stem = f"{_PREFIX}.experts.0.{name}_proj.weight"
        tensors |= {stem: w.contiguous(), f"{stem}_scale_inv": scale.contiguous()}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 1}
    config = _CONFIG | sizes | {"num_experts_per_tok": 1, "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    (kept,) = iter_local_experts(checkpoint, 0, 0, 1)
    _same(kept, expert)
    (made,) = iter_local_experts(checkpoint, 0, 0, 1, "bf16")
    assert torch.equal(made.w1, dequantize_128x128(expert.w1, expert.w1_scale).bfloat16())
    assert torch.equal(made.w2, dequantize_128x128(expert.w2, expert.w2_scale).bfloat16())


_MEASURE = """
import json
import sys
import torch
torch.set_num_threads(1)
from megamoe.checkpoint import Checkpoint
from megamoe.weights import iter_local_experts

def status(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(key))

found = []
for dtype in ("fp8", "bf16"):
    for folder in sys.argv[1:]:
        checkpoint = Checkpoint.open(folder)
        warm = next(iter_local_experts(checkpoint, 0, 0, 16, dtype))  # allocator, library pages
        del warm
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # resets the high-water mark
        before = status("VmRSS")
        held = list(iter_local_experts(checkpoint, 0, 1, 2, dtype))
        found.append((dtype, folder, status("VmHWM") - before, sum(e.nbytes for e in held)))
        del held
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_loading_takes_no_second_copy(big):
    """Peak growth: this rank's experts, one projection of the file, FP32 temporaries of a chunk."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *map(str, big.values())],
        capture_output=True,
        text=True,
        check=True,
        # Freed blocks go back to the system at once, so that the heap's history is not measured.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    found = json.loads(done.stdout)
    assert len(found) == 4
    for dtype, folder, peak, held in found:
        mapped = 2 * _INTER * _HIDDEN * 2
        temporaries = 6 * 128 * _HIDDEN * 4 if dtype == "fp8" else 0
        allowed = held * 1.05 + mapped + temporaries + (4 << 20)
        sizes = f"{folder} {dtype}: peak {peak >> 10} KiB, held {held >> 10}, {allowed=}"
        assert peak < allowed, sizes
        assert peak > held * 0.9, sizes  # the measurement sees what is held
        assert allowed < held * 2, sizes  # and would see a second copy
