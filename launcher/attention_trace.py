"""Stamps of a traced attention-pre run as a Chrome/Perfetto trace, a table of stages, a picture.

A record is the stamps of one instruction in nanoseconds, in the order of ``STAMPS``; 0 where the
instruction did not pass. Chrome's ``trace_event`` format: a process per CTA, a thread per role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["STAMPS", "chrome_trace", "stage_table", "timeline_svg"]

STAMPS: Final = ("visible", "inputs ready", "begun", "loaded", "summed", "stored", "published")
"""As in ``csrc/attention_pre/vm.cuh``."""
_SPANS: Final = (
    ("prefetch", "visible", "inputs ready", 0),
    ("wait", "begun", "loaded", 1),
    ("main loop", "loaded", "summed", 1),
    ("finish", "summed", "stored", 1),
    ("publish", "stored", "published", 2),
)
_ROLES: Final = ("weights, events", "math", "publisher")


def _microseconds(stamps: NDArray[np.int64]) -> NDArray[np.float64]:
    """µs from the first stamp of the run; NaN where there is none."""
    begin = int(stamps[stamps > 0].min())
    return np.where(stamps > 0, (stamps - begin) / 1e3, np.nan)


def chrome_trace(
    stamps: NDArray[np.int64], opcodes: NDArray[np.uint32], names: Mapping[int, str]
) -> dict[str, Any]:
    """A trace for ``chrome://tracing`` or ui.perfetto.dev.

    Args:
        stamps: [queues, depth, 7] ns (``BoundPlan.stamps``).
        opcodes: [queues, depth].
        names: of opcodes; places whose opcode has none are left out.
    """
    times = _microseconds(stamps)
    index = {name: i for i, name in enumerate(STAMPS)}
    events: list[dict[str, Any]] = []
    for queue, place in np.argwhere((stamps > 0).any(-1)).tolist():
        name = names.get(int(opcodes[queue, place]))
        if name is None:
            continue
        at = times[queue, place]
        last = index["begun"]  # bodies without a main loop go from here to "stored"
        for span, begin, end, role in _SPANS:
            first = at[index[begin]]
            if np.isnan(first):
                first = at[last]
            if np.isnan(at[index[end]]) or at[index[end]] < first:
                continue
            if role == 1:
                last = index[end]
            events.append(
                {
                    "name": f"{name} {span}",
                    "cat": name,
                    "ph": "X",
                    "ts": float(first),
                    "dur": float(at[index[end]] - first),
                    "pid": queue,
                    "tid": role,
                    "args": {"place": place},
                }
            )
    for queue in sorted({e["pid"] for e in events}):
        events.append(
            {"ph": "M", "name": "process_name", "pid": queue, "args": {"name": f"CTA {queue}"}}
        )
        events += [
            {"ph": "M", "name": "thread_name", "pid": queue, "tid": i, "args": {"name": role}}
            for i, role in enumerate(_ROLES)
        ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def stage_table(
    stamps: NDArray[np.int64], opcodes: NDArray[np.uint32], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Per opcode: tasks, and the first, median and last of every stamp in µs."""
    times = _microseconds(stamps)
    rows: list[dict[str, Any]] = []
    for number, name in names.items():
        mine = times[(opcodes == number) & (stamps > 0).any(-1)]
        if not len(mine):
            continue
        row: dict[str, Any] = {"stage": name, "tasks": len(mine)}
        for i, stamp in enumerate(STAMPS):
            seen: Sequence[float] = mine[:, i][~np.isnan(mine[:, i])].tolist()
            row[stamp] = [min(seen), float(np.median(seen)), max(seen)] if seen else None
        rows.append(row)
    return rows


_LEFT, _WIDTH, _ROW, _TOP = 90, 1000, 46, 24


def timeline_svg(
    stamps: NDArray[np.int64], opcodes: NDArray[np.uint32], names: Mapping[int, str]
) -> str:
    """A row per opcode, a line per task: light until its inputs are ready, then dark."""
    times = _microseconds(stamps)
    present = [(number, name) for number, name in names.items() if bool((opcodes == number).any())]
    end = float(np.nanmax(times))
    scale = _WIDTH / end
    height = _TOP + _ROW * len(present) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for tick in range(0, int(end) + 1, 5):
        x = _LEFT + tick * scale
        parts.append(f'<path d="M{x:.1f} {_TOP}V{height - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{tick} µs</text>')
    visible, ready, published = (STAMPS.index(s) for s in ("visible", "inputs ready", "published"))
    for row, (number, name) in enumerate(present):
        mine = times[(opcodes == number) & (stamps > 0).any(-1)]
        mine = mine[np.argsort(mine[:, ready])]
        top = _TOP + row * _ROW
        parts.append(f'<text x="4" y="{top + _ROW / 2:.0f}">{name} ({len(mine)})</text>')
        step = (_ROW - 8) / max(len(mine), 1)
        for i, task in enumerate(mine.tolist()):
            y = top + 2 + i * step
            # Inputs may be ready before the weight loader gets to the instruction.
            spans = (
                (task[visible], task[ready], "#9ecae1"),
                (task[ready], task[published], "#e6730a"),
            )
            for first, last, colour in spans:
                if last > first:
                    parts.append(
                        f'<rect x="{_LEFT + first * scale:.1f}" y="{y:.2f}" fill="{colour}" '
                        f'width="{(last - first) * scale:.1f}" height="{step:.2f}"/>'
                    )
    return "\n".join([*parts, "</svg>"]) + "\n"
