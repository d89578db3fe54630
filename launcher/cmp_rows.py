"""Times the standalone kernels on one Hopper GPU; the command is ``bench_cmp``.

The method is that of ``attention_rows``, as for the megakernel. ``graph_us`` is one run's graph
between two events (an empty kernel's is a row of its own), ``span_us`` the first CTA's entry to the
last one's end in such a run, by time stamps in a build that takes them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.attention_rows import (
    SCORES,
    Copies,
    Row,
    Timing,
    floor_us,
    need_right,
    score_error,
    table_row,
    time_graph,
    time_replays,
)
from launcher.console import make_folder_for
from launcher.results import write_whole
from megamoe.attention_pre.data import random_caches, random_inputs
from megamoe.attention_pre.encode import encode
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import KernelPlan, Planner
from megamoe.attention_pre.stages import StageGraph, partition
from megamoe.attention_pre.tiling import Batch, TileConfig
from megamoe.backends.attention import AttentionKernel, BoundPlan
from megamoe.cmp.bound import BoundCmp
from megamoe.cmp.graphs import CmpGraph, EmptyGraph
from megamoe.cmp.modes import MODES, Mode
from megamoe.cmp.tuning import Tuning, tuning_of
from megamoe.errors import MegaMoeError

__all__ = [
    "bench_empty",
    "bench_megakernel",
    "bench_variants",
    "bind_all",
    "merge_rows",
    "plan_for",
    "time_alone",
    "time_runs",
    "time_single",
]


def bind_all(
    plan: KernelPlan, every: Sequence[Mapping[str, Tensor]], **options: Any
) -> list[BoundCmp]:
    """The plan on several sets of tensors; options are those of ``BoundCmp``."""
    made: list[BoundCmp] = []
    for tensors in every:
        made.append(BoundCmp(plan, tensors, like=made[0] if made else None, **options))
    return made


def time_runs(
    bounds: Sequence[BoundCmp],
    mode: Mode,
    *,
    launches: int = 60,
    replays: int = 25,
    programmatic: Sequence[tuple[str, str]] | None = None,
    state: bool = True,
    apart: bool = False,
) -> Timing:
    """One graph of ``launches`` runs that rotates over the bound plans.

    ``apart``: with an empty kernel between two runs, whose time is not taken out.
    """
    runs = [bounds[i % len(bounds)] for i in range(launches)]
    graph = CmpGraph(runs, mode, programmatic=programmatic, apart=apart)
    stream = torch.cuda.current_stream().cuda_stream
    timing = time_replays(lambda _: graph.launch(stream), launches, replays, state=state)
    graph.close()
    return timing


def time_alone(launches: Sequence[Callable[[int], object]], replays: int = 30) -> float:
    """Microseconds of one launch, given a stream's handle, between two events; by turns."""
    stream = torch.cuda.current_stream().cuda_stream
    turns = len(launches)
    return time_replays(lambda i: launches[i % turns](stream), 1, replays, state=False).median_us


def time_single(
    bounds: Sequence[BoundCmp],
    traced: Sequence[BoundCmp],
    mode: Mode,
    *,
    replays: int = 30,
    programmatic: Sequence[tuple[str, str]] | None = None,
) -> tuple[float, float]:
    """(graph time, span) of graphs of one run each, rotating over bound plans.

    Spans are of plans that take stamps, graph times of those that do not.
    """
    plain = [CmpGraph([b], mode, programmatic=programmatic) for b in bounds]
    graph_us = time_alone([g.launch for g in plain], replays)
    graphs = [CmpGraph([b], mode, programmatic=programmatic) for b in traced]
    stream = torch.cuda.current_stream().cuda_stream
    spans = []
    for i in range(replays):
        graphs[i % len(graphs)].launch(stream)
        torch.cuda.synchronize()
        spans.append(traced[i % len(graphs)].span_us())
    for graph in (*plain, *graphs):
        graph.close()
    return graph_us, statistics.median(spans)


def plan_for(graph: StageGraph, batch: Batch, tiles: TileConfig | None = None) -> KernelPlan:
    """The plan whose stages become kernels."""
    workers = torch.cuda.get_device_properties(0).multi_processor_count
    return Planner(graph, workers, queue="round_robin", tiles=tiles).plan(batch)


def bench_variants(
    copies: Copies,
    batch: Batch,
    *,
    modes: Sequence[Mode] = MODES,
    l2: Sequence[str] = ("cold", "warm"),
    tuning: Mapping[str, Tuning] | None = None,
    check: bool = True,
    launches: int = 60,
    replays: int = 25,
) -> list[Row]:
    """Every mode on one shape; the first copy's scores are compared with the oracle's before.

    Args:
        copies: weights.
        batch: the shape.
        modes: kinds of graph.
        l2: ``"cold"``, ``"warm"`` or both.
        tuning: of every mode, see ``BoundCmp``; each mode's own otherwise.
        check: whether scores are compared.
        launches: runs of a timed graph.
        replays: of a timed graph.

    Returns:
        Rows with ``variant`` (the mode), ``m``, ``requests``, ``kv``, ``l2``, ``us``, ``p99_us``,
        ``graph_us`` and ``span_us`` (one run; cold), ``apart_us`` (see ``time_runs``; cold),
        clocks, ``floor_us``, ``max_rel_err``.

    Raises:
        MegaMoeError: a mode's scores are wrong, or not the first mode's to the bit.
    """
    plan = plan_for(partition(attention_pre_graph(copies.spec)), batch)
    host = random_inputs(copies.spec, batch, 1) | random_caches(copies.spec, batch, 2)
    tensors = copies.tensors(encode(plan).buffers, host)
    floor = floor_us(tensors[0], batch, copies.spec)
    rows, error = [], None
    for mode in modes:
        tuned = tuning or tuning_of(mode)
        bounds = bind_all(plan, tensors, tuning=tuned)
        traced = bind_all(plan, tensors, tuning=tuned, trace=True)
        first = CmpGraph(bounds[:1], mode)
        tensors[0][SCORES].fill_(torch.nan)
        first.launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        first.close()
        if check:
            if error is None:
                error = score_error(copies, batch, host, tensors[0][SCORES])
                expected = tensors[0][SCORES].clone()
            need_right(mode, batch, error)
            if not torch.equal(expected, tensors[0][SCORES]):
                raise MegaMoeError(f"{mode}: its scores differ in bits from {modes[0]}'s")
        graph_us, span = time_single(bounds, traced, mode)
        for state in l2:
            used = bounds if state == "cold" else bounds[:1]
            timing = time_runs(used, mode, launches=launches, replays=replays)
            more = {"graph_us": round(graph_us, 3), "span_us": round(span, 3)}
            if state == "cold":
                kept = time_runs(used, mode, launches=launches, state=False, apart=True)
                more["apart_us"] = round(kept.median_us, 3)
            rows.append(
                table_row(
                    mode,
                    batch,
                    state,
                    timing,
                    **(more if state == "cold" else {}),
                    floor_us=round(floor, 3),
                    max_rel_err=error,
                )
            )
    return rows


def bench_megakernel(copies: Copies, batch: Batch) -> Row:
    """The resident kernel beside them: the same copies, the same method, the same process."""
    workers = torch.cuda.get_device_properties(0).multi_processor_count
    planner = Planner(partition(attention_pre_graph(copies.spec)), workers)
    plan = planner.plan(batch)
    host = random_inputs(copies.spec, batch, 1) | random_caches(copies.spec, batch, 2)
    kernel = AttentionKernel(planner.specializations)
    tensors = copies.tensors(encode(plan).buffers, host)
    plans = [BoundPlan(kernel, encode(plan), t) for t in tensors]
    plans[0].run()
    error = score_error(copies, batch, host, tensors[0][SCORES])
    need_right("megakernel", batch, error)
    timing = time_graph([plans[i % len(plans)].launch for i in range(60)], 25)
    for bound in plans:
        bound.check()
    alone = time_alone([_replay_of(bound.launch) for bound in plans])
    for bound in plans:
        bound.check()
    more = {"graph_us": round(alone, 3), "queue": plan.queues.kind, "max_rel_err": error}
    return table_row("megakernel_beside_cmp", batch, "cold", timing, **more)


def _replay_of(launch: Callable[[torch.cuda.Stream], None]) -> Callable[[int], object]:
    """A graph of one launch, replayed on the current stream."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch(stream)
    return lambda _: graph.replay()


def bench_empty(batch: Batch) -> Row:
    """A graph of one kernel that does nothing: what of ``graph_us`` is launching and events."""
    graph = EmptyGraph()
    timing = Timing(time_alone([graph.launch]), 0.0, None, None, None)
    graph.close()
    return table_row("empty_graph", batch, "cold", timing)


def merge_rows(path: Path, rows: Sequence[Row], meta: Mapping[str, Any]) -> None:
    """Replaces the rows of the same variant and shape in a results file, and notes the method."""
    held = json.loads(path.read_text()) if path.exists() else {"meta": {}, "rows": []}

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("variant", "m", "kv", "l2"))

    new = {key(row) for row in rows}
    kept = [row for row in held["rows"] if key(row) not in new]
    held["meta"]["cmp"] = dict(meta)
    held["rows"] = [*kept, *rows]
    make_folder_for(path)
    write_whole(path, json.dumps(held, indent=1) + "\n")
