"""Traces of a group for ui.perfetto.dev or chrome://tracing.

Source of the format: the "Trace Event Format" document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from launcher.moe_trace import RINGS, ring_depth
from megamoe.backends.trace import LayerTrace

__all__ = ["MeteredSample", "chrome_trace"]

MeteredSample = tuple[float, Mapping[str, float]]
"""Seconds after the call's end (before it: negative), and values as ``telemetry.Reading`` has."""

_ROLE_SLOTS: Final = 8  # thread ids of a unit in the Chrome form
_COUNTERS: Final = (
    ("power_watts", "board power, W", 1.0),
    ("sm_clock_hertz", "SM clock, MHz", 1e-6),
    ("temperature_celsius", "temperature, °C", 1.0),
)


def chrome_trace(
    traces: Sequence[LayerTrace], samples: Mapping[int, Sequence[MeteredSample]] | None = None
) -> dict[str, Any]:
    """Traces of a group's ranks for ui.perfetto.dev or chrome://tracing.

    A process per rank, a thread per unit and role, counter tracks of the rings, power and clocks.
    GPUs have clocks of their own: theirs are set so that all ranks see the last peer's counts at
    the same time, which is true to a few microseconds.

    Args:
        traces: of the ranks, one call.
        samples: sensor readings by rank, around the call.
    """
    exchanged = [int(t.of("exchange")["end"].min()) if len(t.of("exchange")) else 0 for t in traces]
    own_clocks = any(t.backend == "cuda" for t in traces) and len(traces) > 1
    shift = [exchanged[0] - at if own_clocks else 0 for at in exchanged]
    first = min(
        (
            int(t.events["begin"].min()) + s
            for t, s in zip(traces, shift, strict=True)
            if len(t.events)
        ),
        default=0,
    )
    out: list[dict[str, Any]] = []
    for trace, moved in zip(traces, shift, strict=True):
        zero = first - moved
        out += _chrome_names(trace)
        out += _chrome_events(trace, zero)
        for ring in RINGS:
            times, depth = ring_depth(trace, ring)
            name = f"{ring.upper()} ring, blocks"
            for at, value in zip(times.tolist(), depth.tolist(), strict=True):
                out.append(_counter(trace.rank, name, (at - zero) / 1e3, value))
        end = int(trace.events["end"].max()) if len(trace.events) else zero
        for seconds, values in (samples or {}).get(trace.rank, ()):
            at_us = (end - zero) / 1e3 + seconds * 1e6
            for key, name, scale in _COUNTERS:
                if key in values:
                    out.append(_counter(trace.rank, name, at_us, values[key] * scale))
    return {"traceEvents": out, "displayTimeUnit": "ns"}


def _chrome_names(trace: LayerTrace) -> Iterator[dict[str, Any]]:
    rank, unit_name = trace.rank, "SM" if trace.backend == "cuda" else "unit"
    yield _meta("process_name", rank, 0, {"name": f"rank {rank}"})
    tracks = np.unique(trace.events[["unit", "role"]])
    for unit, role in tracks.tolist():
        thread = unit * _ROLE_SLOTS + role + 1
        name = f"{unit_name} {unit}: {trace.roles[role]}"
        yield _meta("thread_name", rank, thread, {"name": name})
        yield _meta("thread_sort_index", rank, thread, {"sort_index": thread})


def _chrome_events(trace: LayerTrace, zero: int) -> Iterator[dict[str, Any]]:
    arguments = {
        "stage": ("tokens",),
        "pull": ("first", "rows"),
        "rows": ("block", "rows", "source"),
        "combine": ("first", "tokens"),
        **dict.fromkeys(
            ("linear1", "linear2", "activate", "scatter", "publish1", "publish2"),
            ("block", "column", "rows"),
        ),
    }
    names = trace.events.dtype.names or ()
    for values in zip(*(trace.events[name].tolist() for name in names), strict=True):
        event = dict(zip(names, values, strict=True))
        kind = trace.kinds[event["kind"]]
        numbers = (event["a"], event["b"], event["c"])
        found: dict[str, Any] = {
            "name": kind,
            "pid": trace.rank,
            "tid": event["unit"] * _ROLE_SLOTS + event["role"] + 1,
            "ts": (event["begin"] - zero) / 1e3,
        }
        if kind == "wait":
            found["name"] = f"wait {trace.tags[numbers[0]]}"
            found["args"] = {"index": numbers[1]}
        elif kind in arguments:
            found["args"] = dict(zip(arguments[kind], numbers, strict=False))
        if kind == "rows":
            found |= {"ph": "i", "s": "t"}
        else:
            found |= {"ph": "X", "dur": (event["end"] - event["begin"]) / 1e3}
        yield found


def _counter(rank: int, name: str, at_us: float, value: float) -> dict[str, Any]:
    return {"name": name, "ph": "C", "pid": rank, "tid": 0, "ts": at_us, "args": {"value": value}}


def _meta(kind: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args}
