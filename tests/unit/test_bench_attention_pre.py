"""What the attention-pre benchmark works out before it measures anything."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from launcher import bench_attention, bench_attention_pre
from launcher.attention_contender import contender_rows
from launcher.attention_rows import MAX_ERROR, Timing, batch_of, floor_us
from launcher.bench_attention_pre import Bench, Options, empty_frame, measure, with_splits
from launcher.cli import app
from megamoe.attention_pre.check import check_instructions
from megamoe.attention_pre.encode import encode, instruction_format
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.stages import partition
from megamoe.errors import BackendUnavailable, MegaMoeError
from megamoe.spec import ATTENTION_MODELS
from tests.attention import SMALL
from tests.commands import refused

GLM = ATTENTION_MODELS["glm-5.2"]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "attention_pre_h200.json"


@pytest.mark.parametrize(("rows", "requests"), [(1, 1), (8, 1), (16, 2), (128, 16)])
def test_batches_have_the_rows_asked_for(rows, requests):
    batch = batch_of(rows, 2048)
    assert (batch.rows, len(batch.requests)) == (rows, requests)


def test_the_floor_counts_weights_keys_and_inputs_once():
    tensors = {
        "w_a": torch.zeros(1000, dtype=torch.uint8),
        "w_a_scales": torch.zeros(10),
        "q_norm": torch.zeros(100),
    }
    batch = batch_of(16, 8192)
    expected = 1000 + 40 + 2 * 8192 * 132 + 2 * 16 * GLM.hidden * 2
    assert floor_us(tensors, batch, GLM) == pytest.approx(expected / 4.7e6)


def test_the_empty_frame_has_a_record_per_worker_and_nothing_to_do():
    encoded = encode(Planner(attention_pre_graph(SMALL), 5, queue="dynamic").plan(batch_of(4, 90)))
    frame = empty_frame(encoded)
    fmt = instruction_format()
    assert frame.instructions.shape == (5, 1, fmt.words)
    assert not frame.dynamic
    assert check_instructions(frame.instructions, frame.num_events) == []
    for record in frame.instructions[:, 0]:
        assert fmt.opcode_name(fmt.get(record, "opcode")) == "no_op"
        assert set(fmt.get_all(record, "wait_event")) == {fmt.no_counter}
        assert set(fmt.get_all(record, "signal_event")) == {fmt.no_counter}


def test_splits_change_only_the_stages_named():
    graph = partition(attention_pre_graph(GLM))
    batch = batch_of(16, 8192)
    tiles = with_splits(graph, batch, 132, "D1=1")
    assert tiles is not None
    assert tiles.of("D1").split_k == 1
    assert tiles.of("B0").split_k == 6
    assert with_splits(graph, batch, 132, "") is None


def test_default_costs_order_the_queues_as_the_device_did():
    """Round robin 33.5 µs, list 37.7, dynamic 45.5 on one kernel (docs/attention_pre.md)."""
    plan = Planner(attention_pre_graph(GLM), 132).plan(batch_of(16, 8192))
    estimates = plan.estimates_us
    assert plan.queues.kind == "round_robin"
    assert estimates["round_robin"] < estimates["list"] < estimates["dynamic"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "llama"], "--model llama"),
        (["--queue", "random"], "--queue random"),
        (["--tokens", "0"], "greater than or equal to 1"),
        (["--input-pages", "4"], "must be 2 or 3"),
    ],
)
def test_the_command_refuses(arguments, words):
    result = CliRunner().invoke(app, ["bench", "attention-pre", *arguments])
    assert result.exit_code != 0
    assert words in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the command would run")
def test_the_command_says_that_it_needs_a_gpu():
    result = CliRunner().invoke(app, ["bench", "attention-pre"])
    assert result.exit_code == 2
    assert "needs a Hopper GPU" in result.output


@pytest.mark.parametrize("command", ["attention-pre", "cmp"])
@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--tokens", "20"], "--tokens 20: requests bring 8 tokens each: give 1 to 8, or a "),
        (["--tokens", "16", "--tokens", "9"], "a multiple of it, like 8 or 16"),
        (["--kv", "7"], "--kv 7: the 8 new tokens of each request are among its keys"),
        (["--tokens", "4", "--kv", "3"], "--kv 3: the 4 new tokens"),
    ],
    ids=str,
)
def test_rows_that_no_batch_has_are_refused_and_not_rounded(command, options, what):
    refused("bench", command, *options, what=what)


def test_batches_have_the_rows_that_were_asked_for():
    assert [batch_of(n, 64).rows for n in (1, 5, 8, 16, 64)] == [1, 5, 8, 16, 64]
    assert batch_of(24, 64).requests == ((8, 64),) * 3


@pytest.mark.skipif(find_spec("deep_gemm") is not None, reason="here it is installed")
def test_the_contender_says_what_is_missing():
    with pytest.raises(BackendUnavailable, match="deep_gemm"):
        contender_rows([16], [8192])


def test_the_table_shows_rows_prefixes_and_host_times(capsys):
    row = {"variant": "megakernel", "m": 16, "kv": 8192, "l2": "cold", "us": 38.3, "p99_us": 38.5}
    host = {f"{n}_ms": 1.0 for n in ("plan", "plan_next_length", "plan_known", "encode", "bind")}
    bench_attention._show(
        {
            "rows": [row | {"floor_us": 15.8, "fraction_of_floor": 0.413}],
            "prefixes": [row | {"variant": "megakernel_prefix", "stages": "A0", "us": 5.4}],
            "host": [{"m": 16, "kv": 8192, "rebind_ms": 0.125} | host],
        }
    )
    shown = capsys.readouterr().out
    for word in ("38.3", "0.41", "A0", "5.4", "0.125"):
        assert word in shown


def test_published_rows_are_complete_and_say_what_the_gpu_did():
    """Every shape of M x KV, cold and warm; a row without a time says why."""
    rows = json.loads(RESULTS.read_text())["rows"]
    for variant in ("megakernel", "peer_serial"):
        have = {(r["m"], r["kv"], r["l2"]) for r in rows if r["variant"] == variant}
        assert have == set(product((1, 16, 64, 128), (2048, 8192, 65536), ("cold", "warm")))
    for row in rows:
        if row["variant"] not in ("megakernel", "megakernel_empty", "peer_serial"):
            continue
        if row["us"] is None:
            assert row["reason"]
            continue
        assert row["sm_mhz"] > 0
        assert row["watts"] > 0
        # Only the longest shapes draw so much that the power cap sets in during the readings.
        capped = row["m"] >= 64 and row["kv"] == 65536
        assert set(row["throttle"]) <= ({"sw_power_cap"} if capped else set())
        assert row["us"] <= row["p99_us"]
        if row["variant"] == "megakernel":
            assert row["max_rel_err"] < MAX_ERROR
            assert row["fraction_of_floor"] == pytest.approx(row["floor_us"] / row["us"], abs=1e-3)


class FakePlan:
    """Stands for a plan on a device."""

    def __init__(self, kernel, encoded, tensors=None, **options):
        self.encoded = encoded

    def launch(self, stream=None):
        """Nothing to do."""

    run = check = launch

    def rebind(self, tensors):
        """Nothing to do."""

    def stamps(self):
        shape = (*self.encoded.instructions.shape[:2], 7)
        return 1 + np.arange(np.prod(shape), dtype=np.int64).reshape(shape)


class FakeBench(Bench):
    """Plans for real, and measures nothing."""

    def __init__(self, spec, longest, copies):
        self.seen, self.worst = [], 0.01

    def kernel(self, planner, **options):
        self.seen.append(options)
        return

    def bind(self, kernel, encoded, batch, copies, **options):
        self.tensors = [{"w_a": torch.zeros(4)}] * copies
        return [FakePlan(kernel, encoded) for _ in range(copies)]

    def error(self, batch):
        return self.worst


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(bench_attention_pre, "Bench", FakeBench)
    monkeypatch.setattr(bench_attention_pre, "BoundPlan", FakePlan)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    timing = Timing(38.0, 39.0, 1980.0, 300.0, [])
    monkeypatch.setattr(bench_attention_pre, "time_graph", lambda launches, replays: timing)


def test_a_measurement_writes_every_row_as_it_comes(no_device, tmp_path):
    output, trace = tmp_path / "rows.json", tmp_path / "run.json"
    options = Options(rows=(1, 16), kv=(2048,), workers=132, prefixes=True, trace=trace, copies=2)
    found = measure(options, output, quiet=True)
    written = json.loads(output.read_text())
    assert {k: written[k] for k in ("rows", "prefixes", "host")} == found.results()
    assert written["meta"]["input_pages"] == 3
    kinds = [(r["variant"], r["m"], r["l2"]) for r in written["rows"]]
    for m in (1, 16):
        for l2 in ("cold", "warm"):
            assert ("megakernel", m, l2) in kinds
        assert ("megakernel_empty", m, "warm") in kinds
        assert ("megakernel_traced", m, "cold") in kinds
    stages = [r["stages"] for r in written["prefixes"] if r["m"] == 16]
    assert stages == list(bench_attention_pre.PREFIXES)
    assert [(r["m"], r["kv"]) for r in written["host"]] == [(1, 2048), (16, 2048)]
    assert written["host"][0]["plan_known_ms"] < written["host"][0]["plan_ms"]
    names = {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
    assert "qkv_a main loop" in names
    assert trace.with_suffix(".svg").read_text().startswith("<svg")
    assert found.bench.seen[0] == {"slots": 3, "input_pages": 3}


def test_wrong_scores_are_not_timed(no_device, tmp_path, monkeypatch):
    output = tmp_path / "rows.json"
    monkeypatch.setattr(FakeBench, "error", lambda self, batch: math.nan)
    with pytest.raises(MegaMoeError, match="relative error of the scores nan"):
        measure(Options(workers=132, copies=1), output, quiet=True)
    assert not output.exists()
