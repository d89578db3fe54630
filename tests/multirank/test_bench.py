"""``megamoe bench moe``: checked before timed, absent figures with a reason, honest memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from launcher.contenders import HfExperts, OurLayer

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "moe_cpu.json"
SMALL = ["--model", "qwen3-30b", "--experts", "8", "--rounds", "1", "--calls", "2"]
FIGURES = [
    *("stage_us", "total_us", "p99_us", "peer", "peer_us", "unfused_us", "gemms_us", "floor_us"),
    *("fraction_of_floor", "tflops", "hbm_gbs", "nvlink_gbs", "joules_per_token", "sm_mhz"),
    *("throttle", "max_rel_err"),
]
pytestmark = pytest.mark.timeout(240)


def check_row(row: dict) -> None:
    for figure in ("model", "ranks", "tokens", "routing", "max_over_mean", "ring_tokens", *FIGURES):
        assert figure in row
        if row[figure] is None:
            assert row["reasons"].get(figure), f"{figure} is null without a reason"


@pytest.mark.multirank
def test_two_ranks_beside_hugging_face(tmp_path):
    out = tmp_path / "moe.json"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    more = ["--ranks", "2", "--tokens", "6,2", "--against", "hf_eager", "--against"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "launcher.bench_moe",
            *SMALL,
            *more,
            "hf_grouped_mm",
            "--output",
            str(out),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["meta"]["commit"] is None or len(found["meta"]["commit"]) == 40
    (row,) = found["rows"]
    check_row(row)
    assert row["tokens"] == [6, 2]
    assert set(row["contenders"]) == {"megamoe", "hf_eager", "hf_grouped_mm"}
    for name, one in row["contenders"].items():
        assert one["check"]["ok"], name
        assert one["check"]["tokens"] == 6  # 4 of rank 0's tokens, both of rank 1's
        assert one["times"]["calls"] == 2
    # BF16 activations against FP8 ones: a zero would mean that nothing was compared.
    assert row["contenders"]["hf_eager"]["check"]["rel_err"] > 1e-3
    fastest = min(
        (one["times"]["median_us"], name)
        for name, one in row["contenders"].items()
        if name != "megamoe"
    )
    assert (round(fastest[0], 1), fastest[1]) == (row["peer_us"], row["peer"])
    assert row["speedup"] == pytest.approx(row["peer_us"] / row["total_us"], rel=1e-3)
    memory = row["memory"]
    expert = 3 * 2048 * 768
    assert memory["weight_bytes_per_rank"] == 4 * (expert + expert // 128**2 * 4)
    assert memory["growth_pss"] > 2 * memory["weight_bytes_per_rank"]


def test_a_wrong_contender_gets_no_time(monkeypatch):
    call = OurLayer.call

    def spoiled(self: OurLayer):
        y = call(self)
        y[0] *= 2
        return y

    monkeypatch.setattr(OurLayer, "call", spoiled)
    more = ["--ranks", "1", "--tokens", "3", "--against", "none", "--json"]
    found = CliRunner().invoke(app, ["bench", "moe", *SMALL, *more])
    assert found.exit_code == 1, found.output
    (row,) = json.loads(found.stdout)["rows"]
    check_row(row)
    assert row["total_us"] is None
    assert row["contenders"]["megamoe"]["times"] is None
    assert row["reasons"]["megamoe"].startswith("wrong: ")


def test_what_a_contender_cannot_run_has_a_reason(monkeypatch):
    monkeypatch.setattr(HfExperts, "call", lambda self: pytest.fail("must not run"))
    more = ["--ranks", "1", "--tokens", "3", "--routing", "uniform+masked:1", "--json"]
    found = CliRunner().invoke(app, ["bench", "moe", *SMALL, *more, "--against", "hf_eager"])
    assert found.exit_code == 0, found.output
    (row,) = json.loads(found.stdout)["rows"]
    assert row["contenders"]["hf_eager"]["times"] is None
    assert "masked" in row["reasons"]["hf_eager"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "gpt-2"], "--model gpt-2"),
        (["--against", "vllm"], "--against vllm"),
        (["--tokens", "1,2,3"], "3 counts for 1 ranks"),
        (["--routing", "fair"], "'fair' is not one base"),
    ],
)
def test_what_is_wrong_is_said(more, message):
    found = CliRunner().invoke(app, ["bench", "moe", "--experts", "8", "--ranks", "1", *more])
    assert found.exit_code == 2, found.output
    assert message in found.stderr


def test_published_figures_have_the_schema():
    found = json.loads(RESULTS.read_text())
    for key in ("commit", "date", "cpu", "cores", "torch", "command"):
        assert found["meta"][key]
    assert found["rows"]
    for row in found["rows"]:
        check_row(row)
        assert row["ok"]
