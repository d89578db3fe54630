"""The PDL chain without a GPU: its kernel compiles, its arithmetic, and gaps from time stamps."""

from __future__ import annotations

import ctypes
import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from launcher.cli import app
from launcher.pdl_chain import LayerParams, compile_chain, expected, gaps, random_chain


@pytest.mark.parametrize(
    "options",
    [
        {"stamps": False},
        {"stamps": True},
        {"stamps": False, "trigger": "start"},
        {"stamps": True, "trigger": "start"},
        {"stamps": False, "trigger": "start", "wait": False},
    ],
)
def test_every_variant_compiles_without_spills(options):
    pytest.importorskip("cuda.bindings.nvrtc")
    cubin = compile_chain(**options)
    (kernel,) = cubin.resources().values()
    assert kernel.kernel == "megamoe_pdl_layer"
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, kernel
    assert kernel.registers <= 32, kernel
    assert cubin.constant("megamoe_pdl_param_bytes") == ctypes.sizeof(LayerParams)
    assert cubin.constant("megamoe_pdl_stamps") == 3


def test_the_chain_rounds_each_product_and_each_sum():
    """One element by exact arithmetic, rounded to FP32 where the kernel rounds."""
    x, weight, bias = random_chain(5, 3, seed=4)
    found = expected(x, weight, bias)
    for i in range(3):
        value = float(x[i])
        for w, b in zip(weight[:, i], bias[:, i], strict=True):
            product = np.float32(max(value, 0.0) * float(w))  # a double holds the product exactly
            value = float(np.float32(float(product) + float(b)))
        assert found[i] == value, (i, found[i], value)
    assert math.isnan(expected(np.full(1, np.nan, np.float32), weight[:, :1], bias[:, :1])[0])


def test_gaps_of_a_made_up_run():
    """Two layers of two CTAs: gap 300 ns, the second started 500 ns before the first was done."""
    run = [
        [[1000, 1100, 2000], [1032, 1100, 2100]],
        [[1600, 2400, 3000], [1700, 2432, 3200]],
    ]
    found = gaps(np.array([run, run]))
    assert found.gap_us == pytest.approx(0.3)
    assert found.gap_p99_us == pytest.approx(0.3)
    assert found.body_us == pytest.approx((1.0 + 0.8) / 2)
    assert found.early_us == pytest.approx(0.5)
    assert found.span_us == pytest.approx(2.2)
    assert found.timer_us == pytest.approx(0.032)


def test_gaps_take_the_first_reader_and_the_last_writer():
    rng = np.random.default_rng(0)
    stamps = np.zeros((3, 4, 5, 3), np.int64)
    for layer in range(4):
        stamps[:, layer] = layer * 5000 + np.cumsum(rng.integers(1, 900, (3, 5, 3)), -1)
    between = [
        min(stamps[r, k + 1, :, 1]) - max(stamps[r, k, :, 2]) for r in range(3) for k in range(3)
    ]
    found = gaps(stamps)
    assert found.gap_us == pytest.approx(np.median(between) / 1e3)
    assert found.gap_p99_us == pytest.approx(max(between) / 1e3)


def test_without_a_gpu_the_command_says_what_is_missing():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = CliRunner().invoke(app, ["bench", "pdl-chain", "--json"])
    assert found.exit_code == 2
    assert "Hopper GPU" in found.stderr
    found = CliRunner().invoke(app, ["bench", "pdl-chain", "--trigger", "late"])
    assert found.exit_code == 2
    assert "--trigger late" in found.stderr


def test_committed_results_are_right_and_complete():
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "pdl_chain_h200.json"
    found = json.loads(path.read_text())
    assert found["meta"]["gpu"]
    seen = {(r["mode"], r["trigger"]) for r in found["rows"] if r["elements"] == 16384}
    early = {("stream_pdl", "start"), ("graph_pdl", "start")}
    late = {("stream", None), ("stream_pdl", "end"), ("graph", None), ("graph_pdl", "end")}
    assert seen == early | late
    last = found["meta"]["layers"] - 1
    for row in found["rows"]:
        assert row["bitwise_equal"], row
        assert row["sm_mhz"], row
        assert row["watts"], row
        if row["mode"].startswith("graph"):
            ahead = last if row["mode"] == "graph_pdl" else 0
            assert row["edges"] == {"full": last - ahead, "programmatic": ahead}
