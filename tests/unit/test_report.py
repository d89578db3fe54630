"""Reports: complete, self-contained, and the numbers that people see are those of the JSON."""

from __future__ import annotations

import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from launcher.bench_power import _counts
from launcher.power import summary
from launcher.report import LEDGERS, build_report, kernel_resources, write_report
from launcher.report_html import shown
from megamoe.errors import BackendUnavailable, SpecError
from megamoe.spec import MODELS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = ("moe_cpu.json", "moe_h200x2.json", "moe_h200x4.json", "attention_pre_h200.json")


class Page(HTMLParser):
    """Cells with a figure, embedded JSON, and whatever could fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.cells: dict[str, str] = {}
        self.outside: list[str] = []
        self.headings: list[str] = []
        self.open: list[str] = []
        self.data = ""
        self._cell: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.outside += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag in ("link", "img", "iframe", "object", "embed", "base"):
            self.outside.append(tag)
        if tag not in ("meta", "br", "link", "img", "rect", "path", "polyline"):
            self.open.append(tag)
        self._cell = named.get("data-figure") if tag == "td" else None
        if self._cell is not None:
            assert self._cell not in self.cells, f"two cells are {self._cell}"
            self.cells[self._cell] = ""

    def handle_endtag(self, tag):
        if tag in ("rect", "path", "polyline"):
            return
        assert self.open.pop() == tag, f"</{tag}> closes another element"
        self._cell = None

    def handle_data(self, data):
        if self._cell is not None:
            self.cells[self._cell] += data
        if self.open and self.open[-1] == "script":
            self.data += data
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)


def figures_of(report) -> dict[str, dict]:
    """Every figure by the path that its cell has."""
    found = {}
    for part, figures in report["header"].items():
        found |= {f"header.{part}.{i}": f for i, f in enumerate(figures)}
    for i, row in enumerate(report["rows"]):
        sections = {"times": row["times"], "overlap": row["overlap"]}
        sections |= {f"ledgers.{name}": figures for name, figures in row["ledgers"].items()}
        for name, figures in sections.items():
            found |= {f"rows.{i}.{name}.{j}": f for j, f in enumerate(figures)}
    return found


TRACE = {
    "call_us": 100.0, "units": 2, "additions": 640, "wait_us": {"feed: l1_full": 30.0},
    "math_busy": 0.75, "wave_tail_us": 3.5, "rows_remote": 11, "overlap": 0.9, "exposed_us": 12.0,
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_result_file_makes_a_report(name, tmp_path):
    found = json.loads((RESULTS / name).read_text())
    kind = "attention-pre" if name.startswith("attention") else "moe"
    report = build_report(found, kind=kind, traces=[TRACE])
    paths = write_report(tmp_path, report, timeline="<svg><title>a &lt; b</title></svg>")
    assert [path.name for path in paths] == ["report.json", "report.html"]
    text = paths[1].read_text()
    page = Page(text)
    assert page.open == []
    assert page.outside == []
    assert not re.search(r"https?://|@import|url\(", text.split("<script")[0])

    # What is shown is what the JSON says, which is what the report holds.
    stored = json.loads(paths[0].read_text())
    assert json.loads(page.data) == stored == json.loads(json.dumps(report))
    figures = figures_of(stored)
    assert page.cells.keys() == figures.keys()
    for path, figure in figures.items():
        assert (figure["value"] is None) == bool(figure["reason"]), figure
        want = f"absent: {figure['reason']}" if figure["value"] is None else shown(figure["value"])
        assert page.cells[path] == want, path

    assert len(stored["rows"]) == len(found["rows"])
    for row in stored["rows"]:
        assert tuple(row["ledgers"]) == LEDGERS
        assert all(row["ledgers"].values())
    assert list(stored["header"]) == ["environment", "semantics", "timing", "resources", "stress"]
    assert {*LEDGERS, "environment", "overlap"} <= set(page.headings)


def test_figures_come_from_the_row_and_the_trace():
    row = {
        "model": "deepseek-v3", "ranks": 4, "tokens": 512, "routing": "uniform",
        "total_us": 1000.0, "hbm_gbs": 2350.0, "nvlink_gbs": 67.0, "host_us": 21.0,
        "fraction_of_floor": 0.6, "floor_us": 600.0, "sm_mhz": None, "throttle": ["sw_power_cap"],
        "reasons": {"sm_mhz": "NVML is asleep"},
    }  # fmt: skip
    report = build_report({"meta": {"gpu": "NVIDIA H200"}, "rows": [row]}, traces=[TRACE])
    ledgers = {
        name: {f["name"]: f for f in figures}
        for name, figures in report["rows"][0]["ledgers"].items()
    }
    assert ledgers["scheduling"]["host time per call"]["value"] == 21.0
    assert ledgers["scheduling"]["wait, feed: l1_full"]["value"] == 0.15  # 30 of 2 × 100 µs
    assert ledgers["scheduling"]["additions to words in L2"]["value"] == 640
    assert ledgers["HBM"]["share of the read ceiling"]["value"] == 0.5
    assert ledgers["HBM"]["weight bytes per token of a rank"]["value"] == round(
        2350e9 * 1e-3 / 512, 1
    )
    assert ledgers["HBM"]["L2 hit rate"]["value"] is None
    assert ledgers["interconnect"]["share of the link ceiling"]["value"] == 0.2
    assert ledgers["interconnect"]["wave tail"]["value"] == 3.5
    assert ledgers["power"]["SM clock under sustained load"]["reason"] == "NVML is asleep"
    assert ledgers["power"]["clocks held back by"]["value"] == "sw_power_cap"
    overlap = {f["name"]: f["value"] for f in report["rows"][0]["overlap"]}
    assert overlap["overlap, measured"] == 0.9
    assert overlap["published bound"] == 2 * MODELS["deepseek-v3"].inter
    # Without a trace the same places say so.
    bare = build_report({"meta": {}, "rows": [row]})
    assert all(
        "no trace" in f["reason"]
        for f in bare["rows"][0]["ledgers"]["scheduling"]
        if f["name"] in ("math busy", "waits of the roles", "additions to words in L2")
    )


def test_markup_in_a_name_stays_text(tmp_path):
    row = {"model": "</script><b>x", "tokens": 1, "total_us": 1.0, "reasons": {}}
    paths = write_report(
        tmp_path, build_report({"meta": {}, "rows": [row]}), chrome={"traceEvents": []}
    )
    page = Page(paths[1].read_text())
    assert page.open == []
    assert json.loads(page.data)["source"]["rows"][0]["model"] == "</script><b>x"
    assert json.loads(gzip.decompress(paths[2].read_bytes())) == {"traceEvents": []}


def test_a_power_run_is_summed_up_and_drawn(tmp_path):
    def rank(us: float, watts: float) -> dict:
        series = [
            [0.0, watts, 1.5e9, 50.0, ["sw_power_cap"]],
            [0.1, watts + 10, 1.7e9, 52.0, []],
        ]
        return {
            "variant": "phased", "same_bits": True, "burst_us": us - 100, "us": us, "calls": 20,
            "joules": 40.0, "series": series,
        }  # fmt: skip

    row = summary([rank(1000.0, 690.0), rank(1200.0, 650.0)], {"model": "m", "ranks": 2}, 64, "")
    assert (row["sustained_us"], row["burst_us"], row["watts"]) == (1200.0, 1100.0, 695.0)
    assert (row["sm_mhz"], row["celsius"], row["throttle"]) == (1600.0, 51.0, {"sw_power_cap": 0.5})
    assert row["joules_per_token"] == 80.0 / (20 * 64 * 2)
    assert row["reasons"] == {}
    blind = rank(1000.0, 0.0) | {"series": [], "joules": None, "variant": "overlapped"}
    row_blind = summary([blind], {"model": "m", "ranks": 1}, 64, "NVML: not found")
    absent = ("joules_per_token", "watts", "sm_mhz", "celsius", "throttle")
    assert row_blind["reasons"] == dict.fromkeys(absent, "NVML: not found")
    report = build_report({"meta": {}, "rows": []}, power=[row, row_blind])
    page = write_report(tmp_path, report)[1].read_text()
    assert page.count("<polyline") == 2  # watts and clock of the one that has them
    assert "sw_power_cap 0.5" in page


def test_resources_of_a_kernel_or_the_reason():
    try:
        from cuda.bindings import nvrtc  # noqa: F401
    except ImportError:
        found = kernel_resources(MODELS["qwen3-30b"])
        assert "not installed" in found["reason"]
        return
    except BackendUnavailable:
        return
    found = kernel_resources(MODELS["qwen3-30b"])
    if "reason" in found:
        assert found["reason"]
    else:
        assert found["spills"] == 0
        assert found["threads"] == 384


def test_bench_power_on_cpu_ranks_wants_a_size():
    assert _counts(None, "cuda:0") == [8192]
    assert _counts([16], "cpu") == [16]
    with pytest.raises(SpecError, match="--tokens 16"):
        _counts(None, "cpu")
