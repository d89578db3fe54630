"""Chrome trace JSON of the last steps, for Perfetto or chrome://tracing.

One process per rank, one thread per unit and role, so that no track holds two stretches at once;
counter tracks for ring depth, watts and SM clock; an arrow in each step from where a rank takes
its tokens in to where it gives its results out. Source: the "Trace Event Format" document.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from service.reports import StepRecord, TelemetrySample

__all__ = ["chrome_trace"]

Event = dict[str, Any]


def chrome_trace(
    steps: Iterable[StepRecord], samples: Iterable[tuple[float, TelemetrySample]]
) -> dict[str, Any]:
    """A trace.

    Args:
        steps: with ``started`` in seconds of the monotonic clock.
        samples: sensor readings with their time on that clock.

    Returns:
        The JSON object; times are microseconds on that clock.
    """
    events: list[Event] = []
    tracks: dict[tuple[int, int, str], int] = {}
    for record in steps:
        events += _step_events(record, tracks)
    for at, sample in samples:
        for name, value in (
            ("watts", sample.values.get("power_watts")),
            ("SM clock, Hz", sample.values.get("sm_clock_hertz")),
        ):
            if value is not None:
                events.append(_counter(sample.rank, name, at * 1e6, {name: value}))
    names: list[Event] = []
    for rank in sorted({event["pid"] for event in events}):
        names.append(_name("process_name", rank, 0, f"rank {rank}"))
    for (rank, unit, role), thread in tracks.items():
        where = "host" if unit < 0 else f"unit {unit}"
        names.append(_name("thread_name", rank, thread, f"{where}: {role}"))
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _step_events(record: StepRecord, tracks: dict[tuple[int, int, str], int]) -> list[Event]:
    events: list[Event] = []
    begun = record.started * 1e6
    ends: dict[tuple[int, int], list[Event]] = {}
    for span in record.spans:
        key = (span.rank, span.unit, span.role)
        thread = tracks.setdefault(key, len(tracks) + 1)
        event = {
            "name": span.role,
            "ph": "X",
            "pid": span.rank,
            "tid": thread,
            "ts": begun + span.start_us,
            "dur": span.length_us,
            "args": {"step": record.step, "tokens": record.num_tokens},
        }
        events.append(event)
        ends.setdefault((span.rank, span.unit), []).append(event)
    for (rank, unit), mine in ends.items():
        mine.sort(key=lambda event: event["ts"])
        if len(mine) > 1:
            flow = {"name": "tokens", "cat": "step", "id": f"{record.step}.{rank}.{unit}"}
            first, last = mine[0], mine[-1]
            start = {"ph": "s", "pid": rank, "tid": first["tid"], "ts": first["ts"]}
            end = {"ph": "f", "bp": "e", "pid": rank, "tid": last["tid"], "ts": last["ts"]}
            events += [{**flow, **start}, {**flow, **end}]
    for rank, (l1, l2) in enumerate(record.high_water):
        events.append(_counter(rank, "ring blocks", begun, {"L1": l1, "L2": l2}))
    return events


def _counter(rank: int, name: str, at_us: float, values: dict[str, float]) -> Event:
    return {"name": name, "ph": "C", "pid": rank, "tid": 0, "ts": at_us, "args": values}


def _name(kind: str, rank: int, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
