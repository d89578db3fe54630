"""Fills the tables of README.md and docs/ from ``benchmarks/results``.

    python scripts/readme_tables.py            # writes what changed
    python scripts/readme_tables.py --check    # exit code 1 if something would change

A table stands between ``<!-- table: NAME -->`` and ``<!-- /table -->``; names are those of TABLES.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/performance.md", "docs/attention_pre.md", "docs/cmp.md")
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)

Found = dict[str, Any]


def load(name: str) -> Found | None:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def cell(value: float | None, form: str = ".0f", unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    columns = list(columns)
    left = [":--" if i == 0 else "--:" for i in range(len(columns))]
    return ["| " + " | ".join(line) + " |" for line in ([*columns], left, *map(list, rows))]


def source(found: Found, *names: str) -> str:
    """The line below a table: what it was measured on, and where its numbers are."""
    meta = found["meta"]
    where = f"{meta['num_gpus']} × {meta['gpu']}" if meta.get("gpu") else meta.get("cpu", "")
    said = [where, *(f"{k} {meta[k]}" for k in ("driver", "torch") if meta.get(k))]
    said += [str(meta["date"])[:10]]
    files = ", ".join(f"[{n}](BENCHMARKS/{n})" for n in names)
    return f"*{'; '.join(said)}. From {files}.*"


def of_commits(rows: list[Found]) -> str:
    """Which rows, by their place in the table, are of which revision."""
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows, 1):
        places.setdefault(row["commit"], []).append(place)
    said = [
        f"{min(of)} to {max(of)} are of {commit}"
        if of == list(range(min(of), max(of) + 1))
        else f"{', '.join(map(str, of))} are of {commit}"
        for commit, of in places.items()
    ]
    return f"Rows {', '.join(said)}"


def same_inputs(row: Found) -> tuple[Any, ...]:
    return tuple(str(row.get(key)) for key in ("model", "ranks", "tokens", "routing"))


def gpu_rows(name: str) -> list[str]:
    """A file's rows that have a time."""
    found = load(name)
    rows = [row for row in (found or {}).get("rows", []) if row.get("total_us")]
    if found is None or not rows:
        return ["*Not measured yet.*"]
    earlier = {same_inputs(row): row for row in found.get("earlier", [])}
    body, bracketed, gemms = [], False, all(row.get("gemms_us") for row in rows)
    pipeline = bool(earlier) or any(row.get("unfused_us") for row in rows)
    for row in rows:
        peer, ours = row.get("peer_us"), row["total_us"]
        unfused = cell(row.get("unfused_us"))
        before = earlier.get(same_inputs(row), {}).get("unfused_us")
        if unfused == "–" and before is not None:
            unfused, bracketed = f"({before:.0f})", True
        energy = row.get("joules_per_token")
        body.append(
            [
                row["model"],
                str(row["tokens"]),
                row["routing"],
                cell(ours),
                cell(row.get("fraction_of_floor"), ".2f"),
                cell(peer),
                cell(peer / ours if peer else None, ".2f", "×"),
                *([unfused] if pipeline else []),
                *([cell(row["gemms_us"])] if gemms else []),
                cell(row.get("sustained_us")),
                cell(None if energy is None else 1e3 * energy, ".2f"),
            ]
        )
    columns = (
        *("model", "tokens per rank", "routing", "this layer, µs", "of the floor"),
        *("fused peer, µs", "faster by"),
        *(["unfused, µs"] if pipeline else []),
        *(["its GEMMs, µs"] if gemms else []),
        *("sustained, µs", "mJ per token"),
    )
    missing = len(found["rows"]) - len(rows)
    lines = [*table(columns, body), "", source(found, name)]
    commits = {row.get("commit", found["meta"]["commit"]) for row in rows}
    if len(commits) > 1:
        lines.append(f"*{of_commits(rows)}.*")
    if bracketed:
        lines.append("*In brackets: of an earlier run, see the file's notes.*")
    if missing:
        lines.append(f"*{missing} more rows are in the file without a time, each with a reason.*")
    return lines


def moe_cpu() -> list[str]:
    found = load("moe_cpu.json")
    if found is None:
        return ["*Not measured yet.*"]
    body = []
    for row in found["rows"]:
        for name, of_one in row["contenders"].items():
            times = of_one["times"]
            if not times:
                continue
            mine = row["contenders"]["megamoe"]["times"]["median_us"]
            body.append(
                [
                    "this layer" if name == "megamoe" else name,
                    row["model"],
                    f"{row['ranks']} × {row['tokens']}",
                    row["routing"],
                    cell(times["median_us"] / 1e3, ".1f"),
                    "" if name == "megamoe" else cell(times["median_us"] / mine, ".1f", "×"),
                ]
            )
    columns = (
        "contender",
        "layer",
        "ranks × tokens",
        "routing",
        "median, ms",
        "this layer faster by",
    )
    return [*table(columns, body), "", source(found, "moe_cpu.json")]


VARIANTS = {
    "megakernel": "the megakernel",
    "branches": "eleven kernels in a graph, branches",
    "branches_pdl": "branches with PDL",
    "graph_rewrite": "graph rewritten",
    "manual_streams": "streams by hand",
    "single_stream": "one stream",
    "single_stream_pdl": "one stream with PDL",
    "peer_serial": "public kernels, one after the other",
}


def attention_pre() -> list[str]:
    """All variants of the case that has been measured in all of them: 16 tokens, 2 requests."""
    found = load("attention_pre_h200.json")
    times: dict[tuple[str, str], Found] = {}
    for row in (found or {}).get("rows", []):
        if row.get("us") is None or (row["m"], row["requests"], row["kv"]) != (16, 2, 8192):
            continue
        key = (row["variant"], row["l2"])
        if key not in times or row["us"] < times[key]["us"]:
            times[key] = row
    ours = times.get(("megakernel", "cold"))
    if found is None or ours is None:
        return ["*Not measured yet.*"]
    body = []
    for variant, name in VARIANTS.items():
        cold, warm = (times.get((variant, l2), {}).get("us") for l2 in ("cold", "warm"))
        if cold is not None:
            slower = "" if variant == "megakernel" else cell(cold / ours["us"], ".2f", "×")
            body.append([name, cell(cold, ".1f"), cell(warm, ".1f"), slower])
    columns = (
        "16 tokens of 2 requests, 8192 of context",
        "L2 cold, µs",
        "warm, µs",
        "of the first",
    )
    floor = f"*Floor: {ours['floor_us']:.1f} µs.*"
    return [*table(columns, body), "", floor, source(found, "attention_pre_h200.json")]


ATTENTION = "attention_pre_h200.json"


def cold_rows(name: str) -> dict[tuple[str, int, int], Found]:
    """Rows with cold L2 by variant, token rows and keys."""
    rows = (load(name) or {}).get("rows", [])
    return {
        (r["variant"], r["m"], r["kv"]): r
        for r in rows
        if r["l2"] == "cold" and r["us"] is not None
    }


def cmp_source() -> str:
    meta = dict((load(ATTENTION) or {})["meta"]["cmp"])
    return source({"meta": {"num_gpus": 1, **meta}}, ATTENTION)


def cmp_modes() -> list[str]:
    """The kinds of graph at 16 tokens, 8192 keys."""
    rows = cold_rows(ATTENTION)
    body = []
    for variant, name in {**VARIANTS, "megakernel_beside_cmp": "megakernel"}.items():
        found = rows.get((variant, 16, 8192))
        if found and variant not in ("megakernel", "peer_serial"):
            times = (cell(found.get(k), ".1f") for k in ("us", "apart_us", "graph_us", "span_us"))
            body.append([name, *times])
    if empty := rows.get(("empty_graph", 16, 8192)):
        body.append(["a graph of one empty kernel", "–", "–", cell(empty["us"], ".1f"), "–"])
    columns = ("M = 16, 8192 keys, cold", "µs", "kept apart", "one graph", "span")
    return [*table(columns, body), "", cmp_source()]


def cmp_edge() -> list[str]:
    """One edge: spans of one run without and with PDL, by where the consumer waits."""
    rows = cold_rows(ATTENTION)
    sizes = sorted({m for variant, m, _ in rows if variant.startswith("edge ")})
    body = []
    for field, label in (("span_us", "one run, span"), ("us", "in a row of runs")):
        for wait, name in (
            ("entry", "entry"),
            ("prologue", "prologue first"),
            ("late", "weights before it"),
        ):
            line = [f"{label}: {name}"]
            for m in sizes:
                off, on = (rows[f"edge A0->B0p {wait}{pdl}", m, 512] for pdl in ("", " pdl"))
                line.append(f"{off[field]:.2f} → {on[field]:.2f}")
            body.append(line)
    return [*table(("M", *map(str, sizes)), body), "", cmp_source()]


def cmp_counter() -> list[str]:
    """The edge whose consumer has nothing to do before its wait."""
    rows = cold_rows(ATTENTION)
    sizes = sorted({m for variant, m, _ in rows if variant.startswith("counter ")})
    body = []
    for field, label in (("us", "in a row of runs"), ("span_us", "one run, span")):
        off, on = (
            [rows[f"counter O->RMSNorm {pdl}", m, 512][field] for m in sizes]
            for pdl in ("off", "pdl")
        )
        body.append([label, *(f"{a:.2f} → {b:.2f}" for a, b in zip(off, on, strict=True))])
    return [*table(("M", *map(str, sizes)), body), "", cmp_source()]


def cmp_stages() -> list[str]:
    """Stages joining one by one, and each alone; the megakernel's beside them."""
    rows = cold_rows(ATTENTION)
    names = ("A0", "C0", "B1", "B0", "D0", "D1", "D2", "E1")

    def so_far(form: str) -> list[float | None]:
        found = (rows.get((form.format(" ".join(names[: i + 1])), 16, 8192)) for i in range(8))
        return [f and f["us"] for f in found]

    graph, alone = so_far("branches_pdl prefix {}"), []
    for name in names:
        found = rows.get((f"branches_pdl alone {name}", 16, 8192))
        alone.append(found and found["us"])
    added = [
        None if now is None or before is None else now - before
        for now, before in zip(graph, [0.0, *graph], strict=False)
    ]
    lines = (("graph so far", graph), ("added", added), ("alone", alone))
    body = [[label, *(cell(v, ".1f") for v in values)] for label, values in lines]
    columns = ("", "A0", *(f"+{name}" for name in names[1:]))
    return [*table(columns, body), "", cmp_source()]


def cmp_shapes() -> list[str]:
    """Both engines in one process, by shape."""
    rows = cold_rows(ATTENTION)
    body = []
    for m, kv in sorted({(m, kv) for variant, m, kv in rows if variant == "branches_pdl"}):
        ours, other = rows["branches_pdl", m, kv], rows.get(("megakernel_beside_cmp", m, kv))
        times = (ours["us"], None if other is None else other["us"])
        body.append([str(m), f"{kv:,}", *(cell(t, ".1f") for t in times)])
    return [*table(("M", "keys", "CMP, µs", "megakernel, µs"), body), "", cmp_source()]


def stress() -> list[str]:
    """A line per matrix of cases, and one per soak: calls in a row with whatever may go wrong."""
    body, sources = [], []
    for path in sorted(RESULTS.glob("stress_*.json")):
        found = json.loads(path.read_text())
        rows, run = found["rows"], path.stem.removeprefix("stress_").replace("_", ", ")
        soaks = found.get("soaks", [])
        if rows or soaks:
            sources.append(source(found, path.name))
        if rows:
            counted = any(row.get("backpressure_events") is not None for row in rows)
            pressed = sum(bool(row.get("backpressure_events")) for row in rows)
            errors = [row["max_rel_err"] for row in rows if row.get("max_rel_err") is not None]
            ranks = ", ".join(map(str, sorted({row["ranks"] for row in rows})))
            same = sum(bool(row["bitwise_equal"]) for row in rows)
            line = [run, ranks, f"{len(rows)} cases", str(same), str(pressed) if counted else "–"]
            body.append([*line, cell(max(errors, default=None), ".1e")])
        for soak in soaks:
            what = f"{soak['calls']} calls, {soak['graph_replays']} of them graph replays"
            what += f", {soak['late_ranks']} late ranks, {soak['seconds']:.0f} s"
            if "reused" in soak:
                what += f"; slots used again in {soak['reused']} calls"
            line = [f"{run}, soak", str(soak["ranks"]), what, str(soak["calls"] - soak["wrong"])]
            waits = soak.get("backpressure", {})
            known = waits.get("events") is not None
            pressed = f"{waits['events']} waits in {waits['of_calls']} calls" if known else "–"
            body.append([*line, pressed, cell(soak["max_rel_err"], ".1e")])
    if not sources:
        return ["*Not measured yet.*"]
    columns = ("run", "ranks", "what", "same bits", "with back-pressure", "largest error")
    return [*table(columns, body), "", *(f"{line}  " for line in sources)]


def power() -> list[str]:
    for name in ("power_h200x2.json", "power_h200x1.json"):
        found = load(name)
        if found is None:
            continue
        body = []
        for row in found["rows"]:
            held = row.get("throttle") or {}
            energy = row.get("joules_per_token")
            body.append(
                [
                    row["variant"],
                    str(row["tokens"]),
                    cell(row["burst_us"]),
                    cell(row["sustained_us"]),
                    cell(row.get("watts")),
                    cell(row.get("sm_mhz")),
                    cell(None if energy is None else energy * 1e3, ".3f"),
                    ", ".join(f"{k} {v:.0%}" for k, v in held.items()) or "–",
                ]
            )
        columns = (
            *("build", "tokens per rank", "burst, µs", "sustained, µs", "W", "SM MHz"),
            *("mJ per token", "clocks held back by, share of time"),
        )
        return [*table(columns, body), "", source(found, name)]
    return ["*Not measured yet.*"]


TABLES: dict[str, Callable[[], list[str]]] = {
    "moe-gpu": partial(gpu_rows, "moe_h200x4.json"),
    "moe-gpu-two": partial(gpu_rows, "moe_h200x2.json"),
    "moe-gpu-one": partial(gpu_rows, "moe_h200x1.json"),
    "moe-cpu": moe_cpu,
    "attention-pre": attention_pre,
    "cmp-modes": cmp_modes,
    "cmp-edge": cmp_edge,
    "cmp-counter": cmp_counter,
    "cmp-stages": cmp_stages,
    "cmp-shapes": cmp_shapes,
    "stress": stress,
    "power": power,
}


def filled(text: str, page: str) -> str:
    """The page with every table as the results have it now."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise SystemExit(f"{page}: no table {name!r}; there are {', '.join(TABLES)}")
        up = "../" * page.count("/")
        lines = "\n".join(TABLES[name]()).replace("(BENCHMARKS/", f"({up}benchmarks/results/")
        return f"{match[1]}{lines}\n{match[3]}"

    return MARKED.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = []
    for page in PAGES:
        path = ROOT / page
        before = path.read_text()
        after = filled(before, page)
        if after != before:
            stale.append(page)
            if not options.check:
                path.write_text(after)
    for page in stale:
        print(f"{page}: {'is not what the results say' if options.check else 'filled'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
