"""``megamoe bench cmp`` without a GPU: what it refuses, its graphs, and how rows are merged."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from launcher.attention_rows import batch_of
from launcher.attention_trace import chrome_trace, timeline_svg
from launcher.cli import app
from launcher.cmp_rows import merge_rows
from launcher.cmp_studies import counter_graph
from launcher.cmp_trace import records
from launcher.tune_cmp import changes, describe
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.stages import partition
from megamoe.attention_pre.tiling import TileConfig, Tiling
from megamoe.cmp.dag import data_edges
from megamoe.cmp.kernels import standalone_kernels
from megamoe.cmp.tuning import TUNING, Tuning


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--what", "all"], "--what all"), (["--model", "llama"], "--model llama")],
)
def test_refuses(arguments, words):
    result = CliRunner().invoke(app, ["bench", "cmp", *arguments])
    assert result.exit_code != 0
    assert words in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the command would run")
def test_says_that_it_needs_a_gpu():
    result = CliRunner().invoke(app, ["bench", "cmp"])
    assert result.exit_code != 0
    assert "Hopper" in result.output


def test_the_counter_example_is_a_projection_and_a_norm():
    tiles = TileConfig("counter", 16, {"O": Tiling(split_k=2), "N": Tiling()})
    graph = partition(counter_graph(16384, 6144))
    parts = standalone_kernels(Planner(graph, 132, tiles=tiles).plan(batch_of(16, 512)))
    assert [k.name for k in parts] == ["Op", "Of", "N"]
    assert data_edges(parts) == ((0, 1), (1, 2))


def test_new_rows_replace_those_of_the_same_shape_alone(tmp_path):
    path = tmp_path / "results.json"
    old = {"variant": "branches", "m": 16, "kv": 8192, "l2": "cold", "us": 1.0}
    others = [{**old, "variant": "megakernel"}, {**old, "m": 64}, {**old, "l2": "warm"}]
    path.write_text(json.dumps({"meta": {"gpu": "one"}, "rows": [old, *others]}))
    merge_rows(path, [{**old, "us": 2.0}], {"commit": "x"})
    held = json.loads(path.read_text())
    assert held["rows"] == [*others, {**old, "us": 2.0}]
    assert held["meta"] == {"gpu": "one", "cmp": {"commit": "x"}}


def test_a_change_of_the_tuner_changes_one_thing():
    found = dict(changes(TUNING, "branches_pdl"))
    assert len(found) > 30
    for what, setting in found.items():
        differ = [n for n in setting if setting[n] != TUNING.get(n)]
        assert differ == [what.split()[0]], what
    assert not any("trigger" in what for what in dict(changes(TUNING, "branches")))


def test_a_setting_is_told_as_python_reads_it():
    assert eval(describe(TUNING), {"Tuning": Tuning}) == TUNING


def test_a_run_is_drawn():
    """Two kernels, the second of which waits for the first; one notes nothing of its wait."""
    stamps = {
        "A0": np.array([[1000, 0, 0, 0, 0, 3000, 5]], np.int64),
        "B0p": np.array(
            [[2000, 3500, 0, 4000, 5000, 6000, 1], [2100, 3600, 0, 4100, 5500, 7000, 131]], np.int64
        ),
    }
    made = records(stamps)
    assert made[0].shape == (1, 3, 7)
    picture = timeline_svg(*made)
    assert "A0 (1)" in picture
    assert "B0p (2)" in picture
    assert picture.count('fill="#9ecae1"') == 2  # only B0p's CTAs wait
    assert picture.count('fill="#e6730a"') == 3
    spans = [e for e in chrome_trace(*made)["traceEvents"] if e.get("ph") == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(6.0)
