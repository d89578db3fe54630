"""A report as one HTML file: tables, plots as SVG, its JSON inside; nothing from elsewhere."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from launcher.estimates import H200

__all__ = ["report_html", "shown"]

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px;
  padding: 0 1rem; color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
table { border-collapse: collapse; width: 100%; margin: .3rem 0 1rem; }
td, th { text-align: left; padding: .18rem .6rem; border-bottom: 1px solid #e4e4e4;
  vertical-align: top; }
td.value { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.text { overflow-wrap: anywhere; }
td.absent, .note { color: #707070; }
.columns > div { min-width: 0; }
.columns { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); }
summary { cursor: pointer; font-weight: 600; margin: .6rem 0; }
svg { max-width: 100%; height: auto; }
"""
_COLOURS: Final = ("#3182bd", "#e6730a", "#2c9f6b", "#6a51a3")


def shown(value: Any) -> str:
    """A value as the tables print it: four significant digits, booleans and text as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def report_html(report: Mapping[str, Any], timeline: str = "") -> str:
    """The page.

    Args:
        report: of ``launcher.report.build_report``.
        timeline: an SVG picture of a traced call, or empty.
    """
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{html.escape(report['title'])}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(report['title'])}</h1>",
        f'<p class="note">Figures that are absent say why. {_floor(report["source"]["rows"])}</p>',
        *_plots(report),
    ]
    if timeline:
        parts += ["<h2>A traced call</h2>", timeline]
    if report["power"]:
        parts += ["<h2>Power under sustained load</h2>", *_power_plot(report["power"])]
    parts.append("<h2>How to repeat it</h2><div class='columns'>")
    for part, figures in report["header"].items():
        parts += [f"<div><h3>{html.escape(part)}</h3>", _table(f"header.{part}", figures), "</div>"]
    parts.append("</div><h2>Rows</h2>")
    for i, row in enumerate(report["rows"]):
        state = " open" if i == 0 else ""
        parts.append(f"<details{state}><summary>{html.escape(row['title'])}</summary>")
        parts.append("<div class='columns'>")
        sections = {"times": row["times"], "overlap": row["overlap"]}
        sections |= {f"ledgers.{name}": figures for name, figures in row["ledgers"].items()}
        for name, figures in sections.items():
            title = name.removeprefix("ledgers.")
            parts.append(f"<div><h3>{html.escape(title)}</h3>")
            parts += [_table(f"rows.{i}.{name}", figures), "</div>"]
        parts.append("</div></details>")
    data = json.dumps(report).replace("</", "<\\/")
    parts.append(f'<script type="application/json" id="report">{data}</script></body></html>')
    return "\n".join(parts) + "\n"


def _table(path: str, figures: Sequence[Mapping[str, Any]]) -> str:
    lines = ["<table>"]
    for i, figure in enumerate(figures):
        where = html.escape(f"{path}.{i}", quote=True)
        name, unit = html.escape(figure["name"]), html.escape(figure["unit"])
        if figure["value"] is None:
            reason = html.escape(figure["reason"])
            lines.append(
                f"<tr><td>{name}</td><td class='absent' data-figure=\"{where}\" colspan='2'>"
                f"absent: {reason}</td></tr>"
            )
        else:
            value = html.escape(shown(figure["value"]))
            kind = "text" if isinstance(figure["value"], str) else "value"
            lines.append(
                f"<tr><td>{name}</td><td class='{kind}' data-figure=\"{where}\">{value}</td>"
                f"<td>{unit}</td></tr>"
            )
    return "".join([*lines, "</table>"])


# ---------------------------------------------------------------- plots


def _floor(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the floor is, where rows have one: CPU ranks have none."""
    if not any(row.get("floor_us") for row in rows):
        return ""
    if "variant" in rows[0]:  # of attention-pre
        return f"Floor: bytes of weights, keys and inputs at {H200.read / 1e12:.2f} TB/s."
    return (
        f"Floor: the longest of routed arithmetic at {H200.flops / 1e12:g} TFLOPS, active experts' "
        f"weights at {H200.read / 1e12:.2f} TB/s and remote rows at {H200.link / 1e9:g} GB/s, on "
        "the busiest rank."
    )


def _peer(rows: Sequence[Mapping[str, Any]]) -> str:
    """The peer's name: on CPU ranks rows say which contender it is."""
    return "; ".join(sorted({str(r["peer"]) for r in rows if r.get("peer")})) or "peer"


def _plots(report: Mapping[str, Any]) -> Iterator[str]:
    """Times of all contenders, and fractions of the floor: a bar per row of the source."""
    rows = [row for row in report["source"]["rows"] if row.get("total_us") or row.get("us")]
    if not rows:
        return
    names = ("model", "variant", "tokens", "routing", "m", "kv", "l2")
    labels = [" ".join(str(r[n]) for n in names if r.get(n) is not None) for r in rows]
    series = {
        "ours": [r.get("total_us", r.get("us")) for r in rows],
        _peer(rows): [r.get("peer_us") for r in rows],
        "unfused": [r.get("unfused_us") for r in rows],
        "floor": [r.get("floor_us") for r in rows],
    }
    yield "<h2>Time of a call, µs (shorter is better; each row to its own scale)</h2>"
    yield _bars(labels, {k: v for k, v in series.items() if any(v)}, own_scale=True)
    fractions = [r.get("fraction_of_floor") for r in rows]
    if any(fractions):
        yield "<h2>Fraction of the floor (longer is better)</h2>"
        yield _bars(labels, {"ours": fractions}, own_scale=False)


def _bars(
    labels: Sequence[str], series: Mapping[str, Sequence[float | None]], *, own_scale: bool
) -> str:
    bar, gap, left, width = 13, 8, 270, 760
    group = bar * len(series) + gap
    height = group * len(labels) + 24
    parts = [
        f'<svg viewBox="0 0 {left + width + 90} {height}" width="{left + width + 90}" '
        'font-family="sans-serif" font-size="12" role="img">'
    ]
    x = left
    for i, name in enumerate(series):
        parts.append(
            f'<rect x="{x}" y="2" width="11" height="11" fill="{_COLOURS[i]}"/>'
            f'<text x="{x + 16}" y="12">{html.escape(name)}</text>'
        )
        x += max(110, 32 + 8 * len(name))
    for row, label in enumerate(labels):
        top = 24 + row * group
        parts.append(f'<text x="0" y="{top + 11}">{html.escape(label[:42])}</text>')
        values = [of[row] for of in series.values()]
        most = max([v for v in values if v] or [1.0]) if own_scale else 1.0
        present = [(i, value) for i, value in enumerate(values) if value]
        for place, (i, value) in enumerate(present):
            long = width * min(value / most, 1.0)
            y = top + place * bar
            parts.append(
                f'<rect x="{left}" y="{y}" width="{long:.1f}" height="{bar - 2}" '
                f'fill="{_COLOURS[i]}"/><text x="{left + long + 5:.1f}" y="{y + 10}">'
                f"{html.escape(shown(value))}</text>"
            )
    return "".join([*parts, "</svg>"])


def _power_plot(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Power and SM clock over time, a pair of plots per variant."""
    lines = ["<table><tr><th>variant</th><th>tokens</th><th>burst µs</th><th>sustained µs</th>"]
    lines.append("<th>W</th><th>MHz</th><th>J per token</th><th>held back by (share)</th></tr>")
    for row in rows:
        held = row.get("throttle")
        text = ", ".join(f"{k} {v}" for k, v in held.items()) if held else "—"
        cells = [row["variant"], row["tokens"], row["burst_us"], row["sustained_us"]]
        cells += [row.get("watts"), row.get("sm_mhz"), row.get("joules_per_token"), text]
        joined = "".join(f"<td>{html.escape('—' if c is None else shown(c))}</td>" for c in cells)
        lines.append(f"<tr>{joined}</tr>")
    yield "".join([*lines, "</table>"])
    for name, unit in (("watts", "W"), ("sm_mhz", "MHz")):
        curves = {f"{r['variant']} {r['tokens']}": r["series"] for r in rows}
        drawn = {k: s for k, s in curves.items() if any(v is not None for v in s[name])}
        if drawn:
            yield f"<h3>{unit} over the seconds of sustained load</h3>{_curves(drawn, name)}"


def _curves(curves: Mapping[str, Mapping[str, Sequence[Any]]], name: str) -> str:
    left, width, height = 60, 900, 190
    points = {
        key: [(t, v) for t, v in zip(s["seconds"], s[name], strict=True) if v is not None]
        for key, s in curves.items()
    }
    every = [p for of in points.values() for p in of]
    last, low = max(t for t, _ in every) or 1.0, min(v for _, v in every)
    high = max(v for _, v in every)
    span = (high - low) or 1.0
    parts = [
        f'<svg viewBox="0 0 {left + width + 220} {height + 30}" width="{left + width + 220}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f'<text x="0" y="14">{shown(high)}</text><text x="0" y="{height}">{shown(low)}</text>',
        f'<text x="{left + width}" y="{height + 20}" text-anchor="end">{shown(last)} s</text>',
    ]
    for i, (key, of) in enumerate(points.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(
            f"{left + t / last * width:.1f},{10 + (high - v) / span * (height - 14):.1f}"
            for t, v in of
        )
        dash = ' stroke-dasharray="5 3"' if i >= len(_COLOURS) else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>')
        parts.append(
            f'<text x="{left + width + 10}" y="{16 + 15 * i}" fill="{colour}">'
            f"{html.escape(key)}</text>"
        )
    return "".join([*parts, "</svg>"])
