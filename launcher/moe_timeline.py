"""A picture of a traced call: what some units did, and how full the rings were. SVG, no scripts."""

from __future__ import annotations

from typing import Final

import numpy as np

from launcher.moe_trace import RINGS, ring_depth
from megamoe.backends.trace import LayerTrace

__all__ = ["timeline_svg"]

_COLOURS: Final = {
    "stage": "#c49c94",
    "list": "#8c6bb1",
    "exchange": "#bcbddc",
    "pull": "#2c9f6b",
    "linear1": "#3182bd",
    "linear2": "#e6730a",
    "scatter": "#b30000",
    "combine": "#6a51a3",
    "wait": "#d9d9d9",
}
"""Drawn in this order: what lies inside another event comes after it."""
_LANES: Final = (("pull", "feed"), ("combine", "dispatch", "math"))
"""Roles of a lane, in the order in which they are drawn."""
_LEFT, _WIDTH, _TOP, _LANE, _GAP, _RING = 96, 1000, 40, 11, 6, 54


def timeline_svg(trace: LayerTrace, units: int = 10, title: str = "") -> str:
    """Two lanes per shown unit (pulls and waits; math and combine), and the depth of both rings.

    Args:
        trace: of one rank.
        units: how many units are shown, evenly chosen.
        title: above the picture.
    """
    events = trace.events
    begin, end = int(events["begin"].min()), int(events["end"].max())
    scale = _WIDTH / max(end - begin, 1)
    shown = np.unique(np.linspace(0, trace.num_units - 1, min(units, trace.num_units)).astype(int))
    lanes_height = len(shown) * (2 * _LANE + _GAP)
    height = _TOP + lanes_height + 2 * (_RING + _GAP) + 34

    def x(at: float) -> float:
        return _LEFT + (at - begin) * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" '
        f'width="{_LEFT + _WIDTH + 20}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="4" y="14" font-weight="bold">{title}</text>',
    ]
    at = _LEFT
    for kind, colour in _COLOURS.items():
        parts.append(f'<rect x="{at}" y="21" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{at + 15}" y="31">{kind}</text>')
        at += 26 + 8 * len(kind)
    total_us = (end - begin) / 1e3
    step = _step(total_us)
    for i in range(int(total_us / step) + 1):
        tick = _LEFT + i * step * 1e3 * scale
        parts.append(f'<path d="M{tick:.1f} {_TOP}V{height - 22}" stroke="#eee"/>')
        parts.append(
            f'<text x="{tick:.1f}" y="{height - 6}" text-anchor="middle">{i * step:g} µs</text>'
        )
    colours = {trace.kinds.index(kind): colour for kind, colour in _COLOURS.items()}
    name = "SM" if trace.backend == "cuda" else "unit"
    for row, unit in enumerate(shown.tolist()):
        top = _TOP + row * (2 * _LANE + _GAP)
        parts.append(f'<text x="4" y="{top + _LANE + 4}">{name} {unit}</text>')
        of_unit = events[events["unit"] == unit]
        for lane, roles in enumerate(_LANES):
            y = top + lane * _LANE
            for role in roles:
                mine = of_unit[of_unit["role"] == trace.roles.index(role)]
                for number, colour in colours.items():
                    path = "".join(
                        f"M{x(e['begin']):.1f} {y}h{max((e['end'] - e['begin']) * scale, 0.3):.1f}"
                        f"v{_LANE - 1}H{x(e['begin']):.1f}z"
                        for e in mine[mine["kind"] == number]
                    )
                    if path:
                        parts.append(f'<path d="{path}" fill="{colour}"/>')
    for i, ring in enumerate(RINGS):
        capacity = (trace.ring_l1, trace.ring_l2)[i]
        times, depth = ring_depth(trace, ring)
        bottom = _TOP + lanes_height + (i + 1) * (_RING + _GAP)
        most = int(depth.max()) if len(depth) else 0
        unit_height = (_RING - 4) / max(most, 1)
        path = f"M{_LEFT} {bottom}" + "".join(
            f"H{x(t):.1f}V{bottom - d * unit_height:.1f}"
            for t, d in zip(times.tolist(), depth.tolist(), strict=True)
        )
        parts.append(f'<path d="{path}V{bottom}z" fill="#9ecae1" stroke="#3182bd"/>')
        parts.append(f'<text x="4" y="{bottom - _RING / 2:.0f}">{ring.upper()} ring</text>')
        parts.append(f'<text x="4" y="{bottom - _RING / 2 + 14:.0f}">{most} of {capacity}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _step(total_us: float) -> float:
    """A round distance of ticks: six to fifteen of them."""
    step = 10.0 ** np.floor(np.log10(max(total_us, 1e-3) / 6))
    for factor in (1.0, 2.0, 5.0, 10.0):
        if total_us / (step * factor) <= 15:
            return float(step * factor)
    return float(step * 10)
