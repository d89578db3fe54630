"""KernelPlan: everything the kernel needs for one batch, except addresses.

A ``Planner`` belongs to one graph and one number of workers. It keeps plans by batch bucket, so a
decode step re-plans only when a request enters its next 256-key tile, and it numbers
specialisations for good, so a compiled kernel stays valid until a plan needs a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Literal, TypeVar

from megamoe.attention_pre.grid import partials_name
from megamoe.attention_pre.op_graph import OpGraph
from megamoe.attention_pre.passes import (
    RECORD_BYTES,
    RELAY,
    EventGraph,
    PassReport,
    Scope,
    fuse_events,
    linearize,
    normalize,
)
from megamoe.attention_pre.schedule import CostModel, QueueKind, Queues, schedule, simulate
from megamoe.attention_pre.stages import StageGraph, partition
from megamoe.attention_pre.task_graph import POLICIES, Policy, build_task_graph
from megamoe.attention_pre.tilers import tile_graph
from megamoe.attention_pre.tiling import (
    Batch,
    Finish,
    Specialization,
    StageTiles,
    TileConfig,
    choose_tiles,
)

__all__ = ["Buffer", "KernelPlan", "Planner", "summarize"]

T = TypeVar("T")

_KINDS: Final[tuple[QueueKind, ...]] = ("round_robin", "list", "dynamic")

# Planning needs no compiled module, so what it must know of instruction.hpp is repeated here (and
# as RECORD_BYTES); a test compares each with the header.
MAX_WAITS: Final = 4
MAX_SIGNALS: Final = 2
OPERAND_SLOTS: Final = 16
COUNTER_BYTES: Final = 128


@dataclass(frozen=True)
class Buffer:
    """Memory that an operand names: sizes with every symbol resolved but ``"?"``.

    ``kind`` is ``"input"``, ``"weight"``, ``"cache"``, ``"value"`` (a result) or ``"workspace"``.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    kind: str


_CLEARLY: Final = 0.9
"""List scheduling was estimated 3 % faster where it took 39 % longer (M = 128, 65,536 keys)."""


@dataclass(frozen=True)
class KernelPlan:
    """Tasks on queues, with their events.

    Attributes:
        batch: the bucket the plan is for.
        graph: tasks in linear order, units, events.
        queues: where each task runs.
        spec_ids: number of each stage's specialisation, by stage index; ``RELAY`` has none.
        rows: stages with operands; the position is the operand row.
        buffers: by tensor name.
        operands: per row, operand slot name to buffer name.
        reports: what each pass changed.
        estimates_us: simulated makespan by kind of queue.
        seconds: host time that planning took, by step.
    """

    batch: Batch
    tiles: TileConfig
    stage_graph: StageGraph
    graph: EventGraph
    queues: Queues
    specializations: tuple[Specialization, ...]
    spec_ids: tuple[int, ...]
    rows: tuple[str, ...]
    buffers: Mapping[str, Buffer]
    operands: tuple[Mapping[str, str], ...]
    reports: tuple[PassReport, ...]
    estimates_us: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def reduce_counters(self) -> dict[int, int]:
        """Arrival counters by unit: counters after the events', for units of several tasks."""
        several = [u.index for u in self.graph.units if len(u.tasks) > 1]
        return {unit: len(self.graph.events) + i for i, unit in enumerate(several)}

    @property
    def num_counters(self) -> int:
        """Event counters and arrival counters."""
        return len(self.graph.events) + len(self.reduce_counters)


class Planner:
    """Plans batches of one graph for one kernel.

    Args:
        graph: captured or already partitioned.
        num_workers: resident CTAs.
        tiles: ``None`` cuts each batch for ``num_workers``; otherwise a fixed configuration.
        queue: a kind of queue, or ``"auto"``: round robin, or list scheduling where its estimate
            is a tenth lower.
        scope: see ``fuse_events``.
        policies: pair policies.
        cost: model of the estimates and of list scheduling.
        final: see ``Tiling.final``; for chosen tiles.
        keep: plans kept.
    """

    def __init__(
        self,
        graph: OpGraph | StageGraph,
        num_workers: int,
        *,
        tiles: TileConfig | None = None,
        queue: QueueKind | Literal["auto"] = "auto",
        scope: Scope = "port",
        policies: Mapping[tuple[str, str], Policy] = POLICIES,
        cost: CostModel | None = None,
        final: Finish = "all",
        keep: int = 64,
    ) -> None:
        self.graph = partition(graph) if isinstance(graph, OpGraph) else graph
        self.num_workers = num_workers
        self._tiles = tiles
        self._queue = queue
        self._scope: Scope = scope
        self._policies = policies
        self._cost = cost or CostModel()
        self._final: Finish = final
        self._keep = keep
        self._plans: OrderedDict[Batch, KernelPlan] = OrderedDict()
        self._specializations: dict[Specialization, int] = {}
        self.hits = 0
        self.misses = 0

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        """Every specialisation that a plan of this planner has asked for, by ``spec_id``."""
        return tuple(self._specializations)

    def plan(self, batch: Batch) -> KernelPlan:
        """The plan of a batch; from memory if its bucket was planned before."""
        bucket = batch.bucket()
        if bucket in self._plans:
            self.hits += 1
            self._plans.move_to_end(bucket)
            return self._plans[bucket]
        self.misses += 1
        made = self._make(bucket)
        self._plans[bucket] = made
        while len(self._plans) > self._keep:
            self._plans.popitem(last=False)
        return made

    def _make(self, batch: Batch) -> KernelPlan:
        seconds: dict[str, float] = {}

        def timed(step: str, make: Callable[[], T]) -> T:
            begin = perf_counter()
            made = make()
            seconds[step] = perf_counter() - begin
            return made

        config = self._tiles or choose_tiles(self.graph, batch, self.num_workers, final=self._final)
        stages = timed("tile", lambda: tile_graph(self.graph, batch, config))
        tasks = timed("dependences", lambda: build_task_graph(self.graph, stages, self._policies))
        fused, fusion = timed("fusion", lambda: fuse_events(tasks, self._scope))
        bounded, normalization = timed(
            "normalization", lambda: normalize(fused, max_waits=MAX_WAITS, max_signals=MAX_SIGNALS)
        )
        linear, linearization = timed("linearization", lambda: linearize(bounded))
        queues, estimates = timed("schedule", lambda: self._place(linear))
        spec_ids = tuple(
            -1
            if stage.opcode == RELAY
            else self._specializations.setdefault(stage.specialization, len(self._specializations))
            for stage in linear.stages
        )
        buffers, operands = _buffers(self.graph, batch, stages)
        return KernelPlan(
            batch=batch,
            tiles=config,
            stage_graph=self.graph,
            graph=linear,
            queues=queues,
            specializations=self.specializations,
            spec_ids=spec_ids,
            rows=tuple(s.name for s in self.graph.stages),
            buffers=buffers,
            operands=operands,
            reports=(fusion, normalization, linearization),
            estimates_us=estimates,
            seconds=seconds,
        )

    def _place(self, graph: EventGraph) -> tuple[Queues, dict[str, float]]:
        kinds: tuple[QueueKind, ...] = (self._queue,) if self._queue != "auto" else _KINDS
        made = schedule(graph, self.num_workers, kinds, self._cost)
        times: dict[str, float] = {
            kind: simulate(graph, queues, self._cost).makespan for kind, queues in made.items()
        }
        if len(kinds) == 1:
            return made[kinds[0]], times
        listed = times["list"] < times["round_robin"] * _CLEARLY
        return made["list" if listed else "round_robin"], times


def _buffers(
    graph: StageGraph, batch: Batch, stages: tuple[StageTiles, ...]
) -> tuple[dict[str, Buffer], tuple[dict[str, str], ...]]:
    """Buffers by name, and the operand rows that name them."""
    symbols = {"M": batch.rows, "B": len(batch.requests)}
    buffers: dict[str, Buffer] = {}
    work = {name: (shape, dtype) for tiled in stages for name, shape, dtype in tiled.buffers}
    rows: list[dict[str, str]] = []
    for stage in graph.stages:
        row: dict[str, str] = {}
        for role, name in stage.operands.items():
            tensor = graph.tensors[name]
            if tensor.kind == "value" and name not in stage.reads and name not in stage.writes:
                continue
            storage = tensor.storage
            row[role] = storage
            root = graph.tensors.get(storage, tensor)
            shape: tuple[int | str, ...] = tuple(symbols.get(str(d), d) for d in root.shape)
            if role == "logits":
                shape = (batch.rows, batch.logits_stride)
            elif role == "block_table":
                shape = (len(batch.requests), batch.table_pages)
            shape = work.get(name, (shape, ""))[0]
            kind = "cache" if storage != name else root.kind
            buffers.setdefault(storage, Buffer(storage, shape, root.dtype, kind))
        partials = partials_name(stage)
        if partials in work:
            row["partials"] = partials
            buffers[partials] = Buffer(partials, *work[partials], "workspace")
        rows.append(row)
    return buffers, tuple(rows)


def summarize(plan: KernelPlan) -> dict[str, Any]:
    """The figures of a plan, as plain JSON types.

    Returns:
        ``tasks`` and ``tasks_per_stage``; ``events`` with label, threshold, producers and
        consumers of each kind; ``queues`` (kind, workers, depth, how many queues have each
        length); ``instruction_tensor``; ``counters``; ``bytes`` of each encoded part; ``passes``
        (counts before, after and the ratio); ``estimates_us``; ``seconds``.
    """
    graph = plan.graph
    per_stage: dict[str, int] = {stage.name: 0 for stage in graph.stages}
    for task in graph.tasks:
        per_stage[graph.stages[task.stage].name] += 1
    kinds: dict[tuple[str, int, int, int], int] = {}
    for event in graph.events:
        key = event.label, event.threshold, len(event.producers), len(event.consumers)
        kinds[key] = kinds.get(key, 0) + 1
    lengths: dict[int, int] = {}
    for queue in plan.queues.workers:
        lengths[len(queue)] = lengths.get(len(queue), 0) + 1
    tensor = [len(plan.queues.workers), plan.queues.depth, RECORD_BYTES // 4]
    passes = []
    for report in plan.reports:
        # Linearization is what makes ranges possible: it is compared with the lists.
        first = next(iter(report.before.values()))
        ratios = {
            name: (report.before[name] if len(report.after) > 1 else first) / report.after[name]
            for name in report.after
            if report.before.get(name) and report.after[name]
        }
        passes.append(
            {
                "pass": report.name,
                "before": dict(report.before),
                "after": dict(report.after),
                "shrink": ratios,
                "mpk": report.mpk,
            }
        )
    return {
        "graph": graph.name,
        "rows": plan.batch.rows,
        "requests": [list(r) for r in plan.batch.requests],
        "tiles": plan.tiles.name,
        "tasks": len(graph.tasks),
        "tasks_per_stage": per_stage,
        "units": len(graph.units),
        "events": len(graph.events),
        "event_kinds": [
            {"label": k[0], "threshold": k[1], "producers": k[2], "consumers": k[3], "count": n}
            for k, n in kinds.items()
        ],
        "counters": plan.num_counters,
        "queues": {
            "kind": plan.queues.kind,
            "workers": plan.queues.num_workers,
            "depth": plan.queues.depth,
            "lengths": {str(length): count for length, count in sorted(lengths.items())},
        },
        "instruction_tensor": tensor,
        "specializations": len({s for s in plan.spec_ids if s >= 0}),
        "bytes": {
            "instructions": 4 * tensor[0] * tensor[1] * tensor[2],
            "operand table": len(plan.rows) * OPERAND_SLOTS * 8,
            "counters": plan.num_counters * COUNTER_BYTES,
        },
        "passes": passes,
        "estimates_us": dict(plan.estimates_us),
        "seconds": dict(plan.seconds),
    }
