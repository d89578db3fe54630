"""Every kernel variant compiles to a cubin on this machine, without spills, within its budget."""

from __future__ import annotations

from ctypes import sizeof
from dataclasses import replace

import pytest

from megamoe.backends.cuda_build import check_params, compile_moe
from megamoe.backends.cuda_halves import HalvesParams, compile_probe
from megamoe.backends.cuda_placing import ChunksParams
from megamoe.spec import MODELS, MoESpec

pytest.importorskip("cuda.bindings.nvrtc")

# K loops unrolled over the stages, not unrolled, BF16; blocks with tails, where shared memory is
# fullest, and BF16.
VARIANTS = {
    "fp8": (MODELS["deepseek-v3"], 0),
    "fp8-short-k": (MODELS["qwen3-30b"], 0),
    "bf16": (replace(MODELS["qwen3-30b"], weight_dtype="bf16"), 0),
    "fp8-tails": (MODELS["deepseek-v3"], 16),
    "fp8-tails-flash": (MODELS["v4-flash"], 16),  # what a search tries
    "bf16-tails": (replace(MODELS["deepseek-v3"], weight_dtype="bf16"), 16),
}
THREADS, SHARED_BYTES = 384, 232448
# 65536 registers of an SM for 384 threads: what a CTA may have at launch.
LAUNCH_REGISTERS = 65536 // THREADS // 8 * 8


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", VARIANTS)
def test_compiles_within_budget(name, capsys):
    spec, tail_rows = VARIANTS[name]
    cubin = compile_moe(spec, tail_rows=tail_rows)
    shared = cubin.constant("megamoe_moe_shared_bytes")
    resources = cubin.resources()
    with capsys.disabled():
        for r in resources.values():
            print(
                f"\n{name:12s} {r.kernel:14s} registers {r.registers:3d} shared {shared:6d} "
                f"stack {r.stack} spills {r.spill_stores}+{r.spill_loads} bytes",
                end="",
            )
    assert set(resources) == {"megamoe_moe"}
    assert cubin.constant("megamoe_moe_threads") == THREADS
    assert cubin.constant("megamoe_moe_most_streams") == 2
    check_params(cubin)
    assert shared <= SHARED_BYTES, f"{shared} bytes of shared memory, a CTA has {SHARED_BYTES}"
    assert not cubin.warnings(), cubin.warnings()
    for r in resources.values():
        assert r.registers <= LAUNCH_REGISTERS, r
        assert r.spill_stores == r.spill_loads == 0, r
        # A frame brings dead stores of every array into it: 2 % of a call (docs/performance.md).
        assert r.stack == 0, r


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["traced", "phased"])
def test_builds_for_measurements_compile(name, monkeypatch, capsys):
    """A few spilled words of the roles that only wait are let pass; serialised wgmmas are not."""
    if name == "phased":
        monkeypatch.setenv("MEGAMOE_DEFINES", "MEGAMOE_PHASED=1")
    cubin = compile_moe(MODELS["qwen3-30b"], trace=name == "traced")
    kernel = cubin.resources()["megamoe_moe"]
    with capsys.disabled():
        print(f"\n{name}: spills {kernel.spill_stores}+{kernel.spill_loads} bytes", end="")
    assert cubin.constant("megamoe_moe_shared_bytes") <= SHARED_BYTES
    assert not cubin.warnings(), cubin.warnings()
    assert kernel.registers <= LAUNCH_REGISTERS
    assert kernel.spill_stores <= 128, kernel


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("hidden", "inter"),
    [(1280, 768), (1024, 512)],  # five Linear 2 tiles; as many blocks of K as stages
    ids=["odd", "short"],
)
def test_shapes_that_have_one_stream_of_tickets(hidden, inter):
    cubin = compile_moe(MoESpec(hidden=hidden, inter=inter, num_experts=4, topk=2))
    assert cubin.constant("megamoe_moe_most_streams") == 1


def test_the_probes_of_halves_compile_and_agree_on_their_parameters():
    cubin = compile_probe()
    for kernel in cubin.resources().values():
        assert kernel.spill_stores == 0, kernel
    assert set(cubin.resources()) == {"megamoe_halves", "megamoe_chunks"}
    assert cubin.constant("megamoe_halves_param_bytes") == sizeof(HalvesParams)
    assert cubin.constant("megamoe_chunks_param_bytes") == sizeof(ChunksParams)
