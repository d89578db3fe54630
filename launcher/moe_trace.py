"""Traces of the MoE kernel: what they must obey, and what they say.

``trace_problems`` checks a trace, ``trace_figures`` sums it up, ``ring_depth`` follows a ring. A
trace is of one rank (``MoELayer.trace``); times are nanoseconds of that rank's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from megamoe.backends.trace import LayerTrace

__all__ = [
    "RINGS",
    "Ring",
    "communication_spans",
    "compute_spans",
    "ring_depth",
    "trace_figures",
    "trace_problems",
    "union_ns",
]

Spans = NDArray[np.int64]
"""[N, 2]: begin, end in ns."""
Ring = Literal["l1", "l2"]
RINGS: Final[tuple[Ring, ...]] = ("l1", "l2")

_SHOWN: Final = 5

# ---------------------------------------------------------------- what a trace must obey


def trace_problems(trace: LayerTrace) -> list[str]:
    """What is wrong with a trace, in words; empty if it is sound.

    Checked: kinds and roles exist; stamps are set and no event ends before it begins; events of a
    track nest or do not touch; tokens are staged by all units or none, before any unit has all
    counts; every tile is computed once, scattered once and announced once;
    every row arrives once; no tile ends before its inputs are announced; no ring holds more blocks
    than it has; all tokens are combined. Dropped events are a problem of their own, and leave out
    what counts events.
    """
    events = trace.events
    found = [*_stamp_problems(trace)]
    if found:
        return found
    found += _nesting_problems(trace)
    if dropped := int(trace.dropped.sum()):
        return [*found, f"{dropped} events did not fit into their tracks"]
    if len(events):
        found += _accounting_problems(trace)
    if not found and len(events):
        found += _order_problems(trace)
    return found


def _stamp_problems(trace: LayerTrace) -> Iterator[str]:
    events = trace.events
    for field, limit in (("kind", len(trace.kinds)), ("role", len(trace.roles))):
        bad = events[events[field] >= limit]
        if len(bad):
            yield f"{len(bad)} events of {field} {bad[0][field]}: must be below {limit}"
    if len(events) and not events["begin"].all():
        yield f"{int((events['begin'] == 0).sum())} events have no begin"
    bad = events[events["end"] < events["begin"]]
    for event in bad[:_SHOWN]:
        early = event["begin"] - event["end"]
        yield f"unit {event['unit']}: an event ends {early} ns before it begins"


def _nesting_problems(trace: LayerTrace) -> Iterator[str]:
    shown = 0
    track: tuple[int, int] | None = None
    open_ends: list[int] = []
    columns = ("unit", "role", "begin", "end", "kind")
    for unit, role, begin, end, kind in zip(
        *(trace.events[name].tolist() for name in columns), strict=True
    ):
        if (unit, role) != track:
            track, open_ends = (unit, role), []
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            yield (
                f"unit {unit}, {trace.roles[role]}: {trace.kinds[kind]} ends {end - open_ends[-1]} "
                "ns after the event that it began in"
            )
            shown += 1
            if shown == _SHOWN:
                return
        open_ends.append(end)


def _tiles(trace: LayerTrace, kind: str) -> NDArray[np.int64]:
    """[N, 2]: block and column."""
    events = trace.of(kind)
    return np.stack([events["a"], events["b"]], -1).astype(np.int64)


def _num_blocks(trace: LayerTrace) -> int:
    events = trace.of("rows")
    return int(events["a"].max()) + 1 if len(events) else 0


def _accounting_problems(trace: LayerTrace) -> Iterator[str]:
    blocks = _num_blocks(trace)
    columns = {"linear1": trace.l1_tiles, "publish1": trace.l1_tiles}
    columns |= dict.fromkeys(("linear2", "scatter", "publish2"), trace.l2_tiles)
    if len(trace.of("activate")):
        columns["activate"] = trace.l1_tiles
    for kind, width in columns.items():
        tiles = _tiles(trace, kind)
        if len(tiles) and (tiles.max(0) >= (blocks, width)).any():
            yield f"{kind}: tile {tiles.max(0).tolist()} of {blocks} blocks of {width} columns"
            continue
        count = np.zeros((blocks, width), np.int64)
        np.add.at(count, (tiles[:, 0], tiles[:, 1]), 1)
        for block, column in np.argwhere(count != 1)[:_SHOWN].tolist():
            yield f"{kind}: tile {column} of block {block} comes {count[block, column]} times"
    rows = trace.of("rows")
    per_block = np.bincount(rows["a"], rows["b"], minlength=blocks).astype(np.int64)
    for (block,) in np.argwhere(per_block != trace.block_m)[:_SHOWN].tolist():
        yield f"block {block} has had {per_block[block]} rows: must be {trace.block_m}"
    asked, first = int(trace.of("pull")["b"].sum()), trace.of("linear1")
    computed = int(first["c"][first["b"] == 0].sum())
    if not asked == len(rows) == computed:
        yield f"{asked} rows are pulled, {len(rows)} arrive, {computed} are computed"
    yield from _staging_problems(trace)
    combined = int(trace.of("combine")["b"].sum())
    if combined != trace.num_tokens:
        yield f"{combined} tokens are combined: must be {trace.num_tokens}"


def _staging_problems(trace: LayerTrace) -> Iterator[str]:
    """CTAs stage a share each, CPU ranks on the host; nobody where the caller wrote the window."""
    staged = trace.of("stage")
    if not len(staged):
        return
    units = 1 if trace.backend == "cpu" else trace.num_units
    found = np.bincount(staged["unit"], minlength=units)
    if len(found) != units or (found != 1).any():
        yield f"{len(staged)} units have staged tokens: must be {units}, each once"
    for event in staged[staged["a"] != trace.num_tokens][:_SHOWN]:
        yield f"unit {event['unit']} stages {event['a']} tokens: must be {trace.num_tokens}"
    exchanged = trace.of("exchange")
    early = int(staged["end"].max()) - int(exchanged["end"].min()) if len(exchanged) else 0
    if early > 0:
        yield f"a unit has all counts {early} ns before the last token is staged"


def _per_block(events: NDArray[Any], field: str, blocks: int, reduce: np.ufunc) -> Any:
    start = 0 if reduce is np.maximum else np.iinfo(np.int64).max
    out = np.full(blocks, start, np.int64)
    reduce.at(out, events["a"].astype(np.int64), events[field].astype(np.int64))
    return out


def _order_problems(trace: LayerTrace) -> Iterator[str]:
    blocks = _num_blocks(trace)
    for maker, field, user in (("rows", "begin", "linear1"), ("publish1", "begin", "linear2")):
        ready = _per_block(trace.of(maker), field, blocks, np.maximum)
        first = _per_block(trace.of(user), "end", blocks, np.minimum)
        for (block,) in np.argwhere(first < ready)[:_SHOWN].tolist():
            yield (
                f"block {block}: a {user} tile ends {ready[block] - first[block]} ns before the "
                f"last {maker}"
            )
    for ring, capacity in zip(RINGS, (trace.ring_l1, trace.ring_l2), strict=True):
        _, depth = ring_depth(trace, ring)
        if len(depth) and depth.max() > capacity:
            yield f"the {ring} ring holds {depth.max()} blocks: it has {capacity}"


# ---------------------------------------------------------------- what a trace says


def ring_depth(trace: LayerTrace, ring: Ring) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Blocks in a ring over time, as the published events tell it.

    A block is in the L1 ring from its first row's arrival to its last Linear 1 tile, and in the L2
    ring from its first Linear 1 tile's end to its last Linear 2 tile.

    Returns:
        Times in ns, ascending, and the depth from then on.
    """
    blocks = _num_blocks(trace)
    enter, leave = ("rows", "publish1") if ring == "l1" else ("linear1", "publish2")
    came = _per_block(trace.of(enter), "end", blocks, np.minimum)
    went = _per_block(trace.of(leave), "begin", blocks, np.maximum)
    times = np.concatenate([went, came])  # at equal stamps blocks leave first
    step = np.concatenate([np.full(blocks, -1), np.full(blocks, 1)])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(step[order])


def union_ns(spans: Spans) -> Spans:
    """Disjoint spans that cover the same time."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0])]
    reach = np.maximum.accumulate(spans[:, 1])
    starts = np.flatnonzero(np.concatenate([[True], spans[1:, 0] > reach[:-1]]))
    ends = np.concatenate([starts[1:] - 1, [len(spans) - 1]])
    return np.stack([spans[starts, 0], reach[ends]], -1)


def _length(spans: Spans) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())


def _both(left: Spans, right: Spans) -> int:
    """What two unions share, in ns."""
    joined = union_ns(np.concatenate([left, right]))
    return _length(left) + _length(right) - _length(joined)


def _spans(events: NDArray[Any]) -> Spans:
    return np.stack([events["begin"], events["end"]], -1).astype(np.int64)


def compute_spans(trace: LayerTrace) -> tuple[NDArray[np.int64], Spans]:
    """When units compute: tiles from when their inputs were there, without the scatter of rows.

    Returns:
        Units [N], and spans [N, 2].
    """
    blocks = _num_blocks(trace)
    units: list[NDArray[Any]] = []
    spans: list[Spans] = []
    for kind, inputs in (("linear1", "rows"), ("linear2", "publish1")):
        ready = _per_block(trace.of(inputs), "end", blocks, np.maximum)
        tiles = trace.of(kind)
        span = _spans(tiles)
        span[:, 0] = np.maximum(span[:, 0], ready[tiles["a"]])
        if kind == "linear2":
            begun = np.zeros((blocks, trace.l2_tiles), np.int64)
            scatter = trace.of("scatter")
            begun[scatter["a"], scatter["b"]] = scatter["begin"]
            span[:, 1] = np.minimum(span[:, 1], begun[tiles["a"], tiles["b"]])
        units.append(tiles["unit"])
        spans.append(span)
    return np.concatenate(units).astype(np.int64), np.concatenate(spans)


def communication_spans(trace: LayerTrace) -> Spans:
    """When rows are pulled or scattered: pulls without their waits for a ring slot, and scatters.

    Returns:
        Spans [N, 2], of any unit.
    """
    pulls, scatters = trace.of("pull"), trace.of("scatter")
    waits = trace.of("wait")
    waits = waits[waits["role"] == trace.roles.index("pull")]
    found = [_spans(scatters)]
    for unit in np.unique(pulls["unit"]):
        pulling = union_ns(_spans(pulls[pulls["unit"] == unit]))
        found.append(_minus(pulling, union_ns(_spans(waits[waits["unit"] == unit]))))
    return np.concatenate(found)


def _minus(left: Spans, right: Spans) -> Spans:
    """Of a union, what is not in the other."""
    times = np.concatenate([left[:, 0], right[:, 1], left[:, 1], right[:, 0]])
    inside = np.repeat([1, 0, -1, 0], [len(left), len(right), len(left), len(right)])
    outside = np.repeat([0, -1, 0, 1], [len(left), len(right), len(left), len(right)])
    order = np.argsort(times, kind="stable")
    keep = (np.cumsum(inside[order]) > 0) & (np.cumsum(outside[order]) <= 0)
    at = np.flatnonzero(keep[:-1]) if len(keep) else np.zeros(0, np.int64)
    return np.stack([times[order][at], times[order][at + 1]], -1)


def trace_figures(trace: LayerTrace) -> dict[str, Any]:
    """Sums of a trace, in µs.

    Returns:
        ``call_us`` from the first event to the last; ``stage_us`` to the end of the last token's
        staging, if any; ``additions`` to words in L2 that the protocol
        makes for what was recorded; ``busy_us`` by kind, summed over units;
        ``wait_us`` by role and awaited word; ``compute_us`` and ``communication_us``, when any unit
        computes and when any pulls or scatters rows, ``overlapped_us`` of it both; ``overlap``,
        their share of the communication; ``exposed_us`` when no unit computes; ``math_busy``, the
        share of all units' time; ``wave_tail_us`` from the first unit's last tile to the last
        unit's; ``rows_remote`` and ``rows_local``; ``high_water`` of both rings.
    """
    events = trace.events
    if not len(events):
        return {"call_us": 0.0, "events": 0}
    us = 1e-3
    begin, end = int(events["begin"].min()), int(events["end"].max())
    length = (events["end"] - events["begin"]).astype(np.float64) * us
    busy = {
        kind: round(float(length[events["kind"] == i].sum()), 1)
        for i, kind in enumerate(trace.kinds)
        if kind not in ("rows", "wait") and bool((events["kind"] == i).any())
    }
    waits = events[events["kind"] == trace.kinds.index("wait")]
    wait: dict[str, float] = {}
    for role, tag in sorted({(int(w["role"]), int(w["a"])) for w in waits}):
        mine = waits[(waits["role"] == role) & (waits["a"] == tag)]
        total = float((mine["end"] - mine["begin"]).sum()) * us
        wait[f"{trace.roles[role]}: {trace.tags[tag]}"] = round(total, 1)
    units, spans = compute_spans(trace)
    compute = union_ns(spans)
    talk = union_ns(communication_spans(trace))
    both = _both(compute, talk)
    per_unit = sum(_length(union_ns(spans[units == unit])) for unit in np.unique(units))
    tiles = trace.of("linear1", "linear2")
    last = np.zeros(trace.num_units, np.int64)
    np.maximum.at(last, tiles["unit"].astype(np.int64), tiles["end"].astype(np.int64))
    last = last[last > 0]
    rows, staged = trace.of("rows"), trace.of("stage")
    remote = int((rows["c"] != trace.rank).sum())
    depth = {ring: ring_depth(trace, ring)[1] for ring in RINGS}
    return {
        "call_us": round((end - begin) * us, 1),
        "stage_us": round((int(staged["end"].max()) - begin) * us, 1) if len(staged) else 0.0,
        "events": len(events),
        "units": trace.num_units,
        # Tickets, finished tiles, rows that arrive in the ring and, as results, at their tokens.
        "additions": 3 * len(trace.of("publish1")) + 2 * len(trace.of("publish2")) + 2 * len(rows),
        "busy_us": busy,
        "wait_us": wait,
        "compute_us": round(_length(compute) * us, 1),
        "communication_us": round(_length(talk) * us, 1),
        "overlapped_us": round(both * us, 1),
        "overlap": round(both / _length(talk), 4) if _length(talk) else None,
        "exposed_us": round((end - begin - _length(compute)) * us, 1),
        "math_busy": round(per_unit / (trace.num_units * (end - begin)), 4),
        "wave_tail_us": round(int(last.max() - last.min()) * us, 1) if len(last) else 0.0,
        "rows_remote": remote,
        "rows_local": len(rows) - remote,
        "high_water": {ring: int(d.max()) if len(d) else 0 for ring, d in depth.items()},
    }
