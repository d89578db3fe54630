"""The tables of the README and of the docs are those of ``benchmarks/results``."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

_spec = importlib.util.spec_from_file_location(
    "readme_tables", ROOT / "scripts" / "readme_tables.py"
)
assert _spec is not None
assert _spec.loader is not None
readme_tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(readme_tables)


@pytest.mark.parametrize("page", readme_tables.PAGES)
def test_pages_are_what_the_results_say(page):
    text = (ROOT / page).read_text()
    assert readme_tables.filled(text, page) == text, "run: python scripts/readme_tables.py"


def rows_below(name: str, page: str = "README.md") -> list[dict[str, str]]:
    text = (ROOT / page).read_text()
    block = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- /table -->", text, re.DOTALL)
    assert block is not None, f"{page} has no table {name}"
    lines = [line.strip("| ").split(" | ") for line in block[1].splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=False)) for line in lines[2:]]


def test_the_readme_has_its_tables():
    for name in ("moe-gpu", "moe-gpu-one", "moe-cpu", "attention-pre", "stress"):
        assert rows_below(name), name
    assert rows_below("moe-gpu-two", "docs/performance.md")
    assert rows_below("power", "docs/performance.md") or not list(RESULTS.glob("power_*.json"))


@pytest.mark.parametrize(
    ("page", "table"), [("README.md", "moe-gpu"), ("docs/performance.md", "moe-gpu-two")]
)
def test_gpu_rows_agree_with_the_file_number_by_number(page, table):
    """Read back from the page, without the script."""
    text = (ROOT / page).read_text()
    pattern = rf"table: {table} -->.*?benchmarks/results/(moe_h200x\d\.json)"
    name = re.search(pattern, text, re.DOTALL)
    assert name is not None
    found = json.loads((RESULTS / name[1]).read_text())
    rows = found["rows"]
    timed = [row for row in rows if row["total_us"] is not None]
    shown = rows_below(table, page)
    assert len(shown) == len(timed) > 0
    for cells, row in zip(shown, timed, strict=True):
        assert (cells["model"], cells["routing"]) == (row["model"], row["routing"])
        assert cells["tokens per rank"] == str(row["tokens"])
        for column, key in (
            ("this layer, µs", "total_us"),
            ("fused peer, µs", "peer_us"),
            ("unfused, µs", "unfused_us"),
        ):
            if row.get(key) is None:
                earlier = [
                    of[key]
                    for of in found.get("earlier", [])
                    if all(of[k] == row[k] for k in ("model", "ranks", "tokens", "routing"))
                    and of.get(key) is not None
                    and key == "unfused_us"
                ]
                want = f"({earlier[0]:.0f})" if earlier else "–"
                assert cells[column] == want, (column, cells)
            else:
                assert abs(float(cells[column]) - row[key]) <= 0.5, (column, cells)
        if row.get("peer_us"):
            ratio = float(cells["faster by"].rstrip("×"))
            assert abs(ratio - row["peer_us"] / row["total_us"]) <= 0.005, cells


def test_cpu_and_stress_rows_agree_too():
    rows = json.loads((RESULTS / "moe_cpu.json").read_text())["rows"]
    times = {
        ("this layer" if name == "megamoe" else name): of["times"]["median_us"] / 1e3
        for row in rows
        for name, of in row["contenders"].items()
        if of["times"]
    }
    shown = {cells["contender"]: float(cells["median, ms"]) for cells in rows_below("moe-cpu")}
    assert shown.keys() == times.keys()
    for name, value in times.items():
        assert shown[name] == pytest.approx(value, abs=0.05), name
    for cells in rows_below("stress"):
        run, soak = cells["run"].removesuffix(", soak"), cells["run"].endswith(", soak")
        found = json.loads((RESULTS / f"stress_{run.replace(', ', '_')}.json").read_text())
        if soak:
            (one,) = (s for s in found["soaks"] if cells["what"].startswith(f"{s['calls']} calls"))
            assert cells["same bits"] == str(one["calls"] - one["wrong"])
            assert f", {one['seconds']:.0f} s" in cells["what"]
        else:
            same = sum(row["bitwise_equal"] for row in found["rows"])
            assert (cells["what"], cells["same bits"]) == (f"{len(found['rows'])} cases", str(same))


def test_an_unknown_table_is_refused():
    text = "<!-- table: none -->\n<!-- /table -->"
    with pytest.raises(SystemExit, match="no table 'none'"):
        readme_tables.filled(text, "README.md")
