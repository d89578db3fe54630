"""``bench moe`` on GPUs, as far as it can be tested without one: byte model, schema, reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launcher import bench_moe, gpu_rows
from launcher.estimates import load
from launcher.moe_rows import BenchOptions
from launcher.ranks import Group
from launcher.timing import times
from launcher.workloads import parse_routing
from megamoe import tuning
from megamoe.backends.base import device_name
from megamoe.spec import MODELS, MoESpec

SPEC = MoESpec(hidden=1024, inter=512, num_experts=4, topk=2)


def test_the_floor_of_a_batch_by_hand():
    """Two ranks of two experts. Rank 1 is the busier one in every respect."""
    counts = torch.tensor([[5, 0, 7, 1], [0, 2, 4, 0]])
    found = gpu_rows.floor_of(SPEC, counts)
    assert found.flops == 6 * 12 * 1024 * 512  # 7 + 1 + 4 rows
    # Both of rank 1's experts are active, and both of rank 0's.
    assert found.weight_bytes == pytest.approx(2 * 3 * 1024 * 512, rel=1e-3)
    # 8 rows came to rank 1 as e4m3 with 8 scales and left as BF16; 2 went the other way.
    assert found.link_bytes == 8 * 2 * 1024 + 2 * (1024 + 8 * 4)
    slowest = max(found.flops / 1250e12, found.weight_bytes / 4.70e12, found.link_bytes / 335e9)
    assert found.us == pytest.approx(slowest * 1e6)


def test_bytes_are_those_of_the_estimates():
    """The mean of uniform routing, when it happens to be exact."""
    counts = torch.full((2, 4), 6)  # 12 tokens of 2 routes on each rank
    found, mean = gpu_rows.floor_of(SPEC, counts), load(SPEC, 2, 12)
    assert found.link_bytes == mean.link_bytes
    assert found.flops == mean.flops
    assert found.weight_bytes == pytest.approx(mean.weight_bytes, rel=1e-6)


def test_an_expert_without_rows_is_not_read():
    one = gpu_rows.floor_of(SPEC, torch.tensor([[3, 0, 0, 0]]))
    both = gpu_rows.floor_of(SPEC, torch.tensor([[2, 1, 0, 0]]))
    assert both.weight_bytes == 2 * one.weight_bytes
    assert one.link_bytes == 0


def options(sustain: float = 0.0) -> BenchOptions:
    return BenchOptions(
        model="m",
        spec=SPEC,
        cases=[("8", "uniform")],
        against=["peer"],
        block_m=0,
        ring_blocks=0,
        workers=0,
        sustain=sustain,
        rounds=1,
        calls=1,
        turn_s=1.0,
        sample=1,
        seed=1,
        backend="cuda",
    )


def test_our_layer_is_opened_with_what_tune_found(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path))
    monkeypatch.setenv("MEGAMOE_TUNED", "1")
    group, mine = Group(0, 1, "cpu"), replace(options(), backend="cpu")
    untuned, is_tuned = gpu_rows._config(group, mine, [8])
    assert (is_tuned, untuned.wave_blocks, untuned.max_tokens) == (False, 0, 128)
    chosen = replace(untuned.resolved(SPEC), wave_blocks=1, l2_lag_blocks=2)
    tuning.save(SPEC, untuned, device_name("cpu"), chosen, {})
    found, is_tuned = gpu_rows._config(group, mine, [8])
    assert (is_tuned, found.wave_blocks, found.l2_lag_blocks) == (True, 1, 2)
    asked, is_tuned = gpu_rows._config(group, replace(mine, block_m=64), [8])
    assert (is_tuned, asked.block_m, asked.wave_blocks) == (False, 64, 0)


def test_every_null_has_the_reason_of_its_contender():
    batch = gpu_rows.GpuBatch(SPEC, [8, 8], *([torch.empty(0)] * 6))
    floor = gpu_rows.floor_of(SPEC, torch.tensor([[5, 0, 7, 1], [0, 2, 4, 0]]))
    row = gpu_rows._figures(batch, 19, {}, floor)
    row |= {"peer": None, "sustained_us": None, "sm_mhz": None, "host_us": None}
    why = {"megamoe": "wrong: so much", "peer": "not installed", "unfused": "not asked for"}
    reasons = gpu_rows._reasons(row, why, options())
    assert {k for k, v in row.items() if v is None} <= reasons.keys()
    assert reasons["total_us"] == reasons["host_us"] == reasons["tflops"] == "wrong: so much"
    assert reasons["peer_us"] == reasons["peer"] == reasons["speedup"] == "not installed"
    assert reasons["gemms_us"] == "not asked for"


def test_what_was_not_sustained_says_so():
    row = {"sustained_us": None, "joules_per_token": None, "throttle": None}
    assert set(gpu_rows._reasons(row, {}, options()).values()) == {"--sustain 0: no sustained run"}
    asked = gpu_rows._reasons(row, {}, options(sustain=1.0))
    assert set(asked.values()) == {"NVML does not answer"}


def test_figures_follow_from_times():
    batch = gpu_rows.GpuBatch(SPEC, [8, 8], *([torch.empty(0)] * 6))
    floor = gpu_rows.Floor(us=50.0, flops=0.0, weight_bytes=4e8, link_bytes=2e7)
    measured = {"megamoe": times([1e-4, 1e-4, 3e-4], [0.0] * 3), "peer": times([2e-4], [0.0])}
    row = gpu_rows._figures(batch, 32, measured, floor)
    assert (row["total_us"], row["p99_us"], row["peer_us"]) == (100.0, 300.0, 200.0)
    assert (row["speedup"], row["fraction_of_floor"]) == (2.0, 0.5)
    assert (row["hbm_gbs"], row["nvlink_gbs"]) == (4000.0, 200.0)
    assert row["tflops"] == round(6 * 32 * 1024 * 512 / 1e-4 / 1e12 / 2, 1)


def test_the_required_suite_has_the_published_cases():
    cases = [(m, t, r) for m, some in bench_moe.SUITES["required"] for t, r in some]
    assert len(cases) == len(set(cases)) == 22
    for model, tokens, routing in cases:
        assert model in MODELS
        assert tokens.isdigit()
        parse_routing(routing)
    assert ("deepseek-v3", "4096", "all_to_one") in cases
    assert ("v4-flash", "128", "zipf") in cases
