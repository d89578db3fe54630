"""Times the standalone kernels on one Hopper GPU; the command is ``bench_cmp``.

Method, as for the megakernel: a graph of many runs one after another that rotates over several
copies of weights and caches (cold L2) or stays on one (warm); the time is the graph's over its
runs. ``graph_us`` is one run's graph between two events, ``span_us`` the first CTA's entry to the
last one's end in such a run, by time stamps in a build that takes them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from launcher.bench_attention_pre import floor_us, time_graph
from megamoe.attention_pre.data import random_caches, random_inputs, random_weights
from megamoe.attention_pre.encode import encode
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import KernelPlan, Planner
from megamoe.attention_pre.stages import StageGraph, partition
from megamoe.attention_pre.tiling import Batch, TileConfig
from megamoe.backends.attention import MEASURED_COST, AttentionKernel, BoundPlan
from megamoe.cmp.bound import BoundCmp, Tuning
from megamoe.cmp.graphs import MODES, CmpGraph, Mode
from megamoe.cmp.prefetch import Prefetch
from megamoe.reference.attention_pre import AttentionPreOracle
from megamoe.spec import AttentionPreSpec
from megamoe.telemetry import Sampler

__all__ = [
    "Copies",
    "Row",
    "Timing",
    "bench_megakernel",
    "bench_variants",
    "merge_rows",
    "plan_for",
    "table_row",
    "time_runs",
    "time_single",
]

_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "fp32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
    "bytes": torch.uint8,
}
Row = dict[str, Any]


@dataclass
class Copies:
    """Weights of a layer on the device, several times; and buffers of plans on each.

    Attributes:
        spec: the layer.
        host: the weights.
        weights: copies on the device, by name.
    """

    spec: AttentionPreSpec
    host: Mapping[str, Tensor]
    weights: list[dict[str, Tensor]] = field(default_factory=list)

    @staticmethod
    def make(spec: AttentionPreSpec, longest: int, count: int) -> Copies:
        """Random weights for requests of up to ``longest`` keys."""
        host = random_weights(spec, longest, seed=0)
        return Copies(spec, host, [{n: t.cuda() for n, t in host.items()} for _ in range(count)])

    def tensors(self, plan: KernelPlan, host: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """A plan's buffers beside each copy: inputs and caches given, all others NaN."""
        buffers = encode(plan).buffers
        every = []
        for weights in self.weights:
            made: dict[str, Tensor] = {}
            for name, buffer in buffers.items():
                if name in weights:
                    made[name] = weights[name]
                elif name in host:
                    made[name] = host[name].cuda()
                else:
                    shape = tuple(int(d) for d in buffer.shape)
                    made[name] = torch.empty(shape, dtype=_DTYPES[buffer.dtype], device="cuda")
                    made[name].view(torch.uint8).fill_(0xFF)
            every.append(made)
        return every


@dataclass(frozen=True)
class Timing:
    """Microseconds per run, and the GPU's state meanwhile."""

    us: float
    p99_us: float
    sm_mhz: float | None
    watts: float | None
    throttle: list[str] | None


def _replay(
    launch: Callable[[int], None], runs: int, replays: int, *, state: bool = True
) -> Timing:
    """Times ``launch(i)``, a graph of ``runs`` runs, the i-th time."""
    for i in range(3):
        launch(i)
    samples = []
    for i in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(400_000)  # the host is ahead when the first event is reached
        begin.record()
        launch(i)
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / runs)
    samples.sort()
    p99 = samples[math.ceil(0.99 * len(samples)) - 1]
    if not state:
        return Timing(statistics.median(samples), p99, None, None, None)
    for i in range(40):  # enough to look at the clocks meanwhile
        launch(i)
    reading = Sampler(torch.cuda.current_device()).read()
    torch.cuda.synchronize()
    clock, events = reading.values.get("sm_clock_hertz"), reading.clocks_events
    return Timing(
        statistics.median(samples),
        p99,
        None if clock is None else clock / 1e6,
        reading.values.get("power_watts"),
        None if events is None else [name for name, on in events.items() if on],
    )


def time_runs(
    bounds: Sequence[BoundCmp],
    mode: Mode,
    *,
    launches: int = 60,
    replays: int = 25,
    programmatic: Sequence[tuple[str, str]] | None = None,
    state: bool = True,
) -> Timing:
    """One graph of ``launches`` runs that rotates over the bound plans."""
    runs = [bounds[i % len(bounds)] for i in range(launches)]
    graph = CmpGraph(runs, mode, programmatic=programmatic)
    stream = torch.cuda.current_stream().cuda_stream
    timing = _replay(lambda _: graph.launch(stream), launches, replays, state=state)
    graph.close()
    return timing


def time_single(
    bounds: Sequence[BoundCmp],
    mode: Mode,
    *,
    replays: int = 30,
    programmatic: Sequence[tuple[str, str]] | None = None,
) -> tuple[float, float]:
    """(graph time, span) of graphs of one run each, rotating over bound plans that take stamps."""
    graphs = [CmpGraph([b], mode, programmatic=programmatic) for b in bounds]
    stream = torch.cuda.current_stream().cuda_stream
    timing = _replay(lambda i: graphs[i % len(graphs)].launch(stream), 1, replays, state=False)
    spans = []
    for i in range(replays):
        graphs[i % len(graphs)].launch(stream)
        torch.cuda.synchronize()
        spans.append(bounds[i % len(graphs)].span_us())
    for graph in graphs:
        graph.close()
    return timing.us, statistics.median(spans)


def score_error(copies: Copies, batch: Batch, host: Mapping[str, Tensor], found: Tensor) -> float:
    """Relative error of scores: norm of the difference from the oracle's over theirs."""
    inputs = {name: t.clone() for name, t in host.items()}
    new = [n for n, _ in batch.requests]
    scores = AttentionPreOracle(copies.spec, copies.host).run(inputs, new).scores
    got_all = found.cpu().double()
    difference = reference = 0.0
    row = 0
    for count, expected in zip(new, scores, strict=True):
        got = got_all[row : row + count, : expected.shape[1]]
        seen = ~expected.isinf()
        if not bool((got[~seen] == -torch.inf).all()):
            return math.nan
        difference += float((got - expected)[seen].square().sum())
        reference += float(expected[seen].square().sum())
        row += count
    return math.sqrt(difference / reference)


def table_row(variant: str, batch: Batch, l2: str, timing: Timing, **more: Any) -> Row:
    """A row of the results file."""
    return {
        "variant": variant,
        "m": batch.rows,
        "requests": len(batch.requests),
        "kv": max(keys for _, keys in batch.requests),
        "l2": l2,
        "us": round(timing.us, 3),
        "p99_us": round(timing.p99_us, 3),
        "sm_mhz": timing.sm_mhz,
        "watts": timing.watts,
        "throttle": timing.throttle,
        **more,
    }


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
    prefetch: Prefetch | None = None,
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
        tuning: see ``BoundCmp``.
        prefetch: in the mode ``branches_pdl`` a further variant ``branches_pdl_l2``, with this
            node.
        check: whether scores are compared.
        launches: runs of a timed graph.
        replays: of a timed graph.

    Returns:
        Rows with ``variant`` (the mode), ``m``, ``requests``, ``kv``, ``l2``, ``us``, ``p99_us``,
        ``graph_us`` and ``span_us`` (one run; cold), clocks, ``floor_us``, ``max_rel_err``.
    """
    plan = plan_for(partition(attention_pre_graph(copies.spec)), batch)
    host = random_inputs(copies.spec, batch, 1) | random_caches(copies.spec, batch, 2)
    tensors = copies.tensors(plan, host)
    floor = floor_us(tensors[0], batch, copies.spec)
    variants: list[tuple[str, Mode, Prefetch | None]] = [(mode, mode, None) for mode in modes]
    if prefetch is not None:
        variants.append(("branches_pdl_l2", "branches_pdl", prefetch))
    rows, error = [], None
    for variant, mode, node in variants:
        bounds = [BoundCmp(plan, t, tuning=tuning, prefetch=node) for t in tensors]
        traced = [BoundCmp(plan, t, tuning=tuning, prefetch=node, trace=True) for t in tensors]
        first = CmpGraph(bounds[:1], mode)
        tensors[0]["E1.paged_logits.out"].fill_(torch.nan)
        first.launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        first.close()
        if check:
            if error is None:
                error = score_error(copies, batch, host, tensors[0]["E1.paged_logits.out"])
                expected = tensors[0]["E1.paged_logits.out"].clone()
            assert error < 2e-2, f"{mode}: relative error of the scores {error}"
            assert torch.equal(expected, tensors[0]["E1.paged_logits.out"]), f"{mode} differs"
        graph_us, span = time_single(traced, mode)
        for state in l2:
            used = bounds if state == "cold" else bounds[:1]
            timing = time_runs(used, mode, launches=launches, replays=replays)
            more = {"graph_us": round(graph_us, 3), "span_us": round(span, 3)}
            rows.append(
                table_row(
                    variant,
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
    planner = Planner(partition(attention_pre_graph(copies.spec)), workers, cost=MEASURED_COST)
    plan = planner.plan(batch)
    host = random_inputs(copies.spec, batch, 1) | random_caches(copies.spec, batch, 2)
    kernel = AttentionKernel(planner.specializations)
    tensors = copies.tensors(plan, host)
    plans = [BoundPlan(kernel, encode(plan), t) for t in tensors]
    plans[0].run()
    error = score_error(copies, batch, host, tensors[0]["E1.paged_logits.out"])
    assert error < 2e-2, f"megakernel: relative error of the scores {error}"
    timing = time_graph([plans[i % len(plans)].launch for i in range(60)], 25)
    for bound in plans:
        bound.check()
    found = Timing(timing.median_us, timing.p99_us, timing.sm_mhz, timing.watts, timing.throttle)
    more = {"queue": plan.queues.kind, "max_rel_err": error}
    return table_row("megakernel_beside_cmp", batch, "cold", found, **more)


def merge_rows(path: Path, rows: Sequence[Row], meta: Mapping[str, Any]) -> None:
    """Replaces the rows of the same variant and shape in a results file, and notes the method."""
    held = json.loads(path.read_text()) if path.exists() else {"meta": {}, "rows": []}

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("variant", "m", "kv", "l2"))

    new = {key(row) for row in rows}
    kept = [row for row in held["rows"] if key(row) not in new]
    held["meta"]["cmp"] = dict(meta)
    held["rows"] = [*kept, *rows]
    path.write_text(json.dumps(held, indent=1) + "\n")
