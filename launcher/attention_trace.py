"""Stamps of a traced attention-pre run as a Chrome/Perfetto trace and as a table of stages.

A record is the stamps of one instruction in nanoseconds, in the order of ``STAMPS``; 0 where the
instruction did not pass. Chrome's ``trace_event`` format: a process per CTA, a thread per role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["STAMPS", "chrome_trace", "stage_table"]

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
