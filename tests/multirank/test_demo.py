"""``megamoe demo``: what a newcomer runs first, and that it notices a wrong result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from launcher.cli import app
from megamoe.layer import MoELayer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(240)


@pytest.mark.multirank
def test_two_ranks():
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "demo", "--backend", "cpu", "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["ok"]
    assert len(found["ranks"]) == 2
    tokens = [r["tokens"] for r in found["ranks"]]
    assert tokens[0] != tokens[1], "unequal ranks are part of the demonstration"
    sent = sum(r["routes_sent"] for r in found["ranks"])
    assert sent == sum(r["routes_received"] for r in found["ranks"]) == sum(tokens) * 4
    for rank in found["ranks"]:
        assert rank["smallest_rings"]["high_water_l1"] == 1
        assert rank["smallest_rings"]["backpressure_events"] > 0
        assert rank["recommended_rings"]["high_water_l1"] > 1
    checks = found["checks"]
    assert set(checks) == {"oracle", "hugging_face", "smallest_rings"}
    assert checks["oracle"]["rel_err"] <= checks["oracle"]["allowed"]
    # FP8 against unquantised weights: a zero would mean that nothing was compared.
    assert 0.01 < checks["hugging_face"]["rel_err"] <= checks["hugging_face"]["allowed"]


def test_a_wrong_value_is_an_exit_code_of_1(monkeypatch, tmp_path):
    run = MoELayer.run

    def spoiled(self: MoELayer, *inputs: torch.Tensor) -> torch.Tensor:
        y = run(self, *inputs)
        y[3, 100] += 20.0 * y[3].float().pow(2).mean().sqrt()
        return y

    monkeypatch.setattr(MoELayer, "run", spoiled)
    arguments = ["demo", "--ranks", "1", "--tokens", "6", "--workdir", str(tmp_path / "w")]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 1, found.output
    assert "WRONG" in found.stdout
    assert "(3, 100)" in found.stderr
    assert (tmp_path / "w" / "config.json").exists()


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    mine = tmp_path / "config.json"
    mine.write_text('{"mine": 1}')
    arguments = ["demo", "--ranks", "1", "--tokens", "6", "--workdir", str(tmp_path)]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2, found.output
    assert "holds files that are not the demo's" in found.stderr
    assert mine.read_text() == '{"mine": 1}'
    assert list(tmp_path.iterdir()) == [mine]


def test_its_own_folder_may_be_written_again(tmp_path):
    arguments = ["demo", "--ranks", "1", "--tokens", "6", "--workdir", str(tmp_path / "w")]
    for _ in range(2):
        found = CliRunner().invoke(app, arguments)
        assert found.exit_code == 0, found.output


def test_bad_token_counts_are_refused():
    found = CliRunner().invoke(app, ["demo", "--ranks", "1", "--tokens", "many"])
    assert found.exit_code == 2
    assert "error: tokens 'many'" in found.stderr
