"""The tables of ``megamoe bench moe``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.console import human_bytes, stderr, stdout, table

__all__ = ["print_cpu", "print_gpu"]


def print_gpu(found: dict[str, Any], output: Path | None) -> None:
    """Prints the rows of GPU ranks; ``output`` is where they were written."""
    rows = found["rows"]
    shown = table(
        f"{rows[0]['ranks']} × {found['meta']['device']}, µs",
        *("model", "tokens", "routing", "max/mean", "ours", "p99", "host", "floor"),
        *("of floor", "peer", "faster by", "unfused", "GEMMs", "sustained", "MHz", "J/token"),
        *("error",),
    )

    def cell(value: Any, form: str = ".1f") -> str:
        return "—" if value is None else format(value, form)

    for r in rows:
        shown.add_row(
            *(r["model"], str(r["tokens"]), r["routing"], f"{r['max_over_mean']:.2f}"),
            *(cell(r[k]) for k in ("total_us", "p99_us", "host_us", "floor_us")),
            cell(r["fraction_of_floor"], ".2f"),
            *(cell(r["peer_us"]), cell(r["speedup"], ".2f")),
            *(cell(r[k]) for k in ("unfused_us", "gemms_us", "sustained_us")),
            *(cell(r["sm_mhz"], ".0f"), cell(r["joules_per_token"], ".2g")),
            cell(r["max_rel_err"], ".1e"),
        )
    stdout.print(shown)
    said = {f"{k}: {v}" for r in rows for k, v in r["reasons"].items()}
    for line in sorted(said):
        stderr.print(line, markup=False, soft_wrap=True)
    if output is not None:
        stdout.print(f"written: {output}", soft_wrap=True)


def print_cpu(found: dict[str, Any], output: Path | None) -> None:
    """Prints the rows of CPU ranks; ``output`` is where they were written."""
    meta, rows = found["meta"], found["rows"]
    shown = table(
        f"{rows[0]['model']} on {rows[0]['ranks']} {meta['backend']} ranks ({meta['cpu']})",
        "contender",
        "tokens",
        "routing",
        "median ms",
        "p99 ms",
        "CPU ms",
        "error",
        "allowed",
        "ours faster",
    )
    for row in rows:
        mine = row["contenders"]["megamoe"]["times"]
        for name, of_one in row["contenders"].items():
            check, times = of_one["check"], of_one["times"]
            ratio = times["median_us"] / mine["median_us"] if times and mine else None
            shown.add_row(
                name,
                str(row["tokens"]),
                row["routing"],
                f"{times['median_us'] / 1e3:.2f}" if times else "—",
                f"{times['p99_us'] / 1e3:.2f}" if times else "—",
                f"{times['cpu_us'] / 1e3:.2f}" if times else "—",
                f"{check['rel_err']:.1e}" if check else "—",
                f"{check['allowed']:.1e}" if check else "—",
                "" if name == "megamoe" else f"{ratio:.2f}×" if ratio else "—",
            )
        shown.add_section()
    stdout.print(shown)
    for row in rows:
        for name in row["contenders"]:
            if name in row["reasons"]:
                stderr.print(f"{name}: {row['reasons'][name]}", markup=False, soft_wrap=True)
        if memory := row["memory"]:
            stdout.print(
                f"memory: {human_bytes(memory['growth_pss_peak'])} over the imports at its peak, "
                f"{memory['peak_over_needed']:.3f} of weights and windows "
                f"({human_bytes(memory['weights_and_windows'])})",
                soft_wrap=True,
            )
    if output is not None:
        stdout.print(f"written: {output}", soft_wrap=True)
