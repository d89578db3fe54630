"""Stamps become spans that add up, and stages become rows."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from launcher.attention_trace import STAMPS, chrome_trace, stage_table, timeline_svg

NAMES = {1: "A0", 2: "B0"}


@pytest.fixture
def run():
    """Two CTAs: a body without a main loop, one with, and padding."""
    stamps = np.zeros((2, 2, len(STAMPS)), np.int64)
    stamps[0, 0] = [1000, 1500, 1600, 0, 0, 4000, 5000]
    stamps[1, 0] = [1100, 5200, 5300, 6000, 7000, 7500, 8000]
    return stamps, np.array([[1, 0], [2, 0]], np.uint32)


def test_spans_follow_each_other(run):
    spans = [e for e in chrome_trace(*run, NAMES)["traceEvents"] if e["ph"] == "X"]
    found = {e["name"]: (e["ts"], e["dur"]) for e in spans}
    assert found["B0 prefetch"] == (pytest.approx(0.1), pytest.approx(4.1))
    assert found["B0 main loop"] == (pytest.approx(5.0), pytest.approx(1.0))
    assert found["B0 publish"] == (pytest.approx(6.5), pytest.approx(0.5))
    assert found["A0 finish"] == (pytest.approx(0.6), pytest.approx(2.4)), "from its beginning"
    assert "A0 main loop" not in found
    assert {(e["pid"], e["args"]["place"]) for e in spans} == {(0, 0), (1, 0)}, "no padding"


def test_rows_have_first_median_and_last(run):
    rows = {row["stage"]: row for row in stage_table(*run, NAMES)}
    assert rows["A0"]["tasks"] == 1
    assert rows["A0"]["stored"] == [3.0, 3.0, 3.0]
    assert rows["A0"]["loaded"] is None
    assert rows["B0"]["published"] == [7.0, 7.0, 7.0]


def test_the_picture_has_two_spans_per_task(run):
    root = ElementTree.fromstring(timeline_svg(*run, NAMES))
    spans = [r for r in root.iter() if r.tag.endswith("rect") and "x" in r.attrib]
    widths = sorted(float(r.attrib["width"]) for r in spans)
    per_us = 1000 / 7.0
    assert widths == pytest.approx([us * per_us for us in (0.5, 2.8, 3.5, 4.1)], abs=0.06)
