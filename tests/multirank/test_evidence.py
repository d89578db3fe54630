"""The commands that make evidence: trace, power, report; on one CPU rank, in this process."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli import app

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SMALL = ("--ranks", "1", "--backend", "cpu", "--model", "qwen3-30b", "--experts", "8")
NARROW = ("--hidden", "512", "--inter", "256")


@pytest.fixture
def megamoe(monkeypatch):
    """Runs a command, alone whatever this process is; gives its result."""
    for name in ("RANK", "WORLD_SIZE", "MEGAMOE_TRACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(os.environ, "MEGAMOE_TRACE", "")  # so that it is restored

    def run(*words: str):
        done = CliRunner().invoke(app, [*words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done

    return run


@pytest.mark.multirank
def test_trace_moe(megamoe, tmp_path):
    trace, picture = tmp_path / "t.json.gz", tmp_path / "t.svg"
    options = ("--tokens", "20", "--ring-blocks", "2", "--block-m", "16", "--json")
    done = megamoe(
        *("trace", "moe", *SMALL, *NARROW, *options),
        *("--output", str(trace), "--svg", str(picture)),
    )
    said = json.loads(done.stdout[done.stdout.index("{") :])
    assert said["problems"] == []
    (figures,) = said["ranks"]
    assert figures["rows_local"] == 20 * 8
    assert figures["high_water"]["l1"] <= 2
    assert figures["wait_us"].get("pull: l1_empty", 0) > 0, "two blocks are too few not to wait"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(e["name"] == "rows" for e in events) == 20 * 8
    assert picture.read_text().startswith("<svg")


@pytest.mark.multirank
def test_bench_power(megamoe, tmp_path):
    output = tmp_path / "power.json"
    megamoe(
        *("bench", "power", *SMALL, *NARROW, "--tokens", "8", "--seconds", "0.05"),
        *("--rounds", "1", "--output", str(output)),
    )
    rows = json.loads(output.read_text())["rows"]
    # CPU ranks have no build that goes phase by phase, and no sensors: absent, with the reason.
    assert [row["variant"] for row in rows] == ["overlapped", "full_rings", "traced"]
    for row in rows:
        assert row["same_bits"]
        assert row["sustained_us"] > 0
        assert row["joules_per_token"] is None
        assert "without a GPU" in row["reasons"]["joules_per_token"]


@pytest.mark.multirank
def test_bench_moe_writes_a_report(megamoe, tmp_path):
    megamoe(
        *("bench", "moe", *SMALL, "--tokens", "8", "--against", "none", "--rounds", "1"),
        *("--calls", "1", "--report", str(tmp_path / "report")),
    )
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    (row,) = report["rows"]
    figures = {f["name"]: f for f in row["ledgers"]["scheduling"]}
    assert 0 < figures["math busy"]["value"] <= 1
    total = next(f for f in row["times"] if f["name"] == "call, staging included")
    assert total["value"] == report["source"]["rows"][0]["total_us"] > 0
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    assert gzip.decompress((tmp_path / "report" / "trace.json.gz").read_bytes())[:1] == b"{"


def test_report_of_a_file(megamoe, tmp_path):
    source = RESULTS / "moe_h200x4.json"
    done = megamoe("report", str(source), str(tmp_path / "r"), "--no-resources")
    assert done.stdout.count("written:") == 2
    made = json.loads((tmp_path / "r" / "report.json").read_text())
    assert made["source"]["rows"] == json.loads(source.read_text())["rows"]
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    refused = CliRunner().invoke(app, ["report", str(wrong), str(tmp_path / "r2")])
    assert refused.exit_code == 2
    assert not (tmp_path / "r2").exists()
