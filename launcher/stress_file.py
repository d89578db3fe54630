"""The result file of ``megamoe stress``: cases and soaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.console import make_folder_for
from launcher.results import read_json, write_whole
from launcher.stress_cases import StressOptions
from megamoe.errors import SpecError

__all__ = ["read_results", "save_cases", "write_results"]


def read_results(path: Path) -> dict[str, Any]:
    """An earlier result: cases keep its soaks, soaks its cases."""
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise SpecError(f"--output {path} holds no results: name another file, or remove it")
    return found


def write_results(path: Path, result: dict[str, Any]) -> None:
    """A line per case, which are many."""
    make_folder_for(path)
    rows = ",\n".join("  " + json.dumps(row, default=str) for row in result.get("rows", []))
    rest = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1, default=str)
    body = f' "rows": [\n{rows}\n ]' if rows else ' "rows": []'
    comma = ",\n" if rest != "{}" else "\n"
    write_whole(path, rest.removesuffix("}").rstrip("\n") + comma + body + "\n}\n")


def save_cases(
    options: StressOptions,
    meta: dict[str, Any],
    rows: list[dict[str, Any]],
    seconds: float,
    *,
    ended: bool,
) -> dict[str, Any]:
    """Sums cases up, and writes them where asked to."""
    events = [r["backpressure_events"] for r in rows]
    pressed = None if None in events else sum(n > 0 for n in events)
    summary = {
        "ended": ended,
        "cases": len(rows),
        "wrong": sum(not r["ok"] for r in rows),
        "bitwise_equal": sum(r["bitwise_equal"] for r in rows),
        "with_backpressure": pressed,
        "with_reused_slots": sum(r["reuses_l1"] + r["reuses_l2"] > 0 for r in rows),
        "max_rel_err": max(r["max_rel_err"] for r in rows),
        "seconds": round(seconds, 1),
    }
    if options.output is not None:
        found = {"meta": meta, "summary": summary, "rows": rows}
        write_results(options.output, {**read_results(options.output), **found})
    return summary
