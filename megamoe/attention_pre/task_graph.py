"""TaskGraph: tiles become tasks, and overlapping regions become dependences.

A task must wait for the units that write what it reads. Which units those are is the pair policy's
decision, by (producer opcode, consumer opcode):

    exact    one unit writes precisely the box that the task reads
    cover    units write disjoint boxes that together contain it
    reduce   units add parts of sums whose boxes contain it; every part is needed
    whole    every unit of the producer, whatever the regions: the fallback for other pairs

The device sees none of this, only counters. A policy is a claim about how two bodies cut their
tensors, so building the graph checks it against the declared regions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from megamoe.attention_pre.regions import Region, first_conflict, is_covered, sweep_dimension
from megamoe.attention_pre.stages import StageGraph
from megamoe.attention_pre.tiling import StageTiles, Tile
from megamoe.errors import SpecError

__all__ = ["POLICIES", "Need", "Policy", "Task", "TaskGraph", "TaskUnit", "build_task_graph"]

Policy = Literal["exact", "cover", "reduce", "whole"]

POLICIES: Final[Mapping[tuple[str, str], Policy]] = {
    ("norm_quant", "qkv_a"): "cover",
    ("norm_quant", "head_gate"): "cover",
    ("norm_quant", "index_key"): "cover",
    ("norm_quant", "gemm_swiglu"): "cover",
    ("qkv_a", "qkv_a_final"): "reduce",
    ("qkv_a", "index_query"): "cover",
    ("qkv_a", "main_query"): "cover",
    ("qkv_a_final", "index_query"): "cover",
    ("qkv_a_final", "main_query"): "cover",
    ("head_gate", "index_query"): "reduce",
    ("main_query", "absorb_query"): "cover",
    ("index_query", "index_query_final"): "reduce",
    ("head_gate", "index_query_final"): "reduce",
    ("index_query_final", "index_score"): "cover",
    ("index_key", "index_key_final"): "reduce",
    ("index_key_final", "index_score"): "cover",
    ("index_query", "index_score"): "cover",
    ("index_key", "index_score"): "cover",
    ("gemm_swiglu", "gemm_store"): "cover",
}


@dataclass(frozen=True, slots=True)
class Task:
    """One instruction to be: a tile with a number, the stage it is from, and its unit."""

    index: int
    stage: int
    tile: Tile
    unit: int


@dataclass(frozen=True, slots=True)
class TaskUnit:
    """Tasks that publish together; the last to finish publishes (see ``tiling.Unit``)."""

    index: int
    stage: int
    tasks: tuple[int, ...]
    writes: tuple[Region, ...]
    publications: int
    final_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """What one task needs of one producer: units of a stage, by the port they publish."""

    stage: int
    port: str
    units: tuple[int, ...]


@dataclass(frozen=True)
class TaskGraph:
    """Tasks, units, and for each task what it needs of others."""

    name: str
    stages: tuple[StageTiles, ...]
    tasks: tuple[Task, ...]
    units: tuple[TaskUnit, ...]
    needs: tuple[tuple[Need, ...], ...]


class _WriteIndex:
    """The writes of one stage to one tensor, sorted along the dimension they differ most in."""

    def __init__(self, writes: Sequence[tuple[int, Region]]) -> None:
        self._dim = sweep_dimension([region for _, region in writes])
        self._writes = sorted(writes, key=lambda w: w[1].ranges[self._dim])
        ranges = [region.ranges[self._dim] for _, region in self._writes]
        self._starts = [first for first, _ in ranges]
        self._widest = max(last - first for first, last in ranges)

    def overlapping(self, read: Region) -> list[tuple[int, Region]]:
        first, last = read.ranges[self._dim]
        begin = bisect_left(self._starts, first - self._widest)
        end = bisect_left(self._starts, last)
        return [w for w in self._writes[begin:end] if w[1].overlaps(read)]


def _check(
    policy: Policy, pair: str, read: Region, found: list[tuple[int, Region]], whole: bool
) -> None:
    """Whether a registered policy agrees with the regions of one read.

    ``whole`` says that the producer must have written all of ``read``; a cache also holds what
    earlier calls wrote.
    """
    writes = [region for _, region in found]

    def fail(why: str) -> None:
        shown = ", ".join(str(w) for w in writes[:4]) + (", ..." if len(writes) > 4 else "")
        raise SpecError(
            f"policy {policy} of pair {pair} does not fit: {why}. Read {read}, written {shown}. "
            "Correct the regions, or register 'whole'"
        )

    if policy == "exact":
        if len(writes) != 1 or writes[0].ranges != read.ranges or writes[0].part != (0, 1):
            fail("one unit must write exactly the box that is read")
        return
    if policy == "cover" and any(w.part != (0, 1) for w in writes):
        fail("parts of a sum are no cover")
    if policy == "reduce":
        parts: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
        for w in writes:
            parts.setdefault(w.ranges, []).append(w.part)
        for ranges, have in parts.items():
            count = have[0][1]
            if sorted(have) != [(i, count) for i in range(count)]:
                fail(f"box {ranges} needs every part exactly once, has {sorted(have)}")
    if (conflict := first_conflict(writes)) is not None:
        fail(f"{conflict[0]} and {conflict[1]} overlap")
    if whole and not is_covered(read, writes):
        fail("part of the read is written by nobody")


def build_task_graph(
    graph: StageGraph,
    stages: Sequence[StageTiles],
    policies: Mapping[tuple[str, str], Policy] = POLICIES,
) -> TaskGraph:
    """Numbers the tiles and finds what each task must wait for.

    Args:
        graph: for ports and caches; tensors it does not know are workspaces of a stage.
        stages: tiled stages, producers before consumers.
        policies: pair policies; other pairs wait for the whole producer.

    Raises:
        SpecError: two units write the same element, or a policy disagrees with the regions.
    """
    tasks: list[Task] = []
    units: list[TaskUnit] = []
    writers: dict[tuple[int, str], list[tuple[int, Region]]] = {}
    for s, stage in enumerate(stages):
        first = len(tasks)
        unit_of = {t: len(units) + u for u, unit in enumerate(stage.units) for t in unit.tiles}
        if sorted(unit_of) != list(range(len(stage.tiles))):
            raise SpecError(f"stage {stage.name}: every tile must belong to one unit")
        tasks += [Task(first + i, s, tile, unit_of[i]) for i, tile in enumerate(stage.tiles)]
        for unit in stage.units:
            members = tuple(first + i for i in unit.tiles)
            made = TaskUnit(
                len(units), s, members, unit.writes, unit.publications, unit.final_bytes
            )
            units.append(made)
            for region in unit.writes:
                writers.setdefault((s, region.tensor), []).append((made.index, region))
        _check_writes(stage)

    makers: dict[str, list[int]] = {}
    for s, tensor in writers:
        makers.setdefault(tensor, []).append(s)
    for tensor, by in makers.items():
        if len(by) > 1:
            names = ", ".join(stages[s].name for s in by)
            raise SpecError(f"tensor {tensor} is written by several stages: {names}")

    maker = {tensor: by[0] for tensor, by in makers.items()}
    finder = _Finder(graph, stages, units, policies, writers, maker)
    needs = tuple(finder.needs(task) for task in tasks)
    return TaskGraph(graph.name, tuple(stages), tuple(tasks), tuple(units), needs)


def _check_writes(stage: StageTiles) -> None:
    solo = [w for t in stage.tiles for w in t.writes]
    final = [w for u in stage.units if len(u.tiles) > 1 for w in u.writes]
    if (conflict := first_conflict(solo + final)) is not None:
        raise SpecError(f"stage {stage.name}: both {conflict[0]} and {conflict[1]} are written")


class _Finder:
    """Looks up what a read needs; equal reads of a stage are looked up once."""

    def __init__(
        self,
        graph: StageGraph,
        stages: Sequence[StageTiles],
        units: Sequence[TaskUnit],
        policies: Mapping[tuple[str, str], Policy],
        writers: Mapping[tuple[int, str], list[tuple[int, Region]]],
        maker: Mapping[str, int],
    ) -> None:
        self._graph = graph
        self._stages = stages
        self._policies = policies
        self._maker = maker
        self._index = {key: _WriteIndex(found) for key, found in writers.items()}
        self._all = {s: tuple(u.index for u in units if u.stage == s) for s in range(len(stages))}
        self._known: dict[tuple[int, Region], tuple[str, tuple[int, ...]]] = {}

    def _find(self, consumer: int, producer: int, read: Region) -> tuple[str, tuple[int, ...]]:
        tensor = self._graph.tensors.get(read.tensor)
        port = tensor.port if tensor else read.tensor
        cached = tensor is not None and tensor.storage != tensor.name
        pair = self._stages[producer].opcode, self._stages[consumer].opcode
        policy = self._policies.get(pair, "whole")
        if policy == "whole":
            return port, self._all[producer]
        found = self._index[producer, read.tensor].overlapping(read)
        if found or not cached:
            name = f"{self._stages[producer].name} -> {self._stages[consumer].name}"
            _check(policy, name, read, found, whole=not cached)
        return port, tuple(sorted({unit for unit, _ in found}))

    def needs(self, task: Task) -> tuple[Need, ...]:
        by_port: dict[tuple[int, str], set[int]] = {}
        for read in task.tile.reads:
            producer = self._maker.get(read.tensor)
            if producer is None or producer == task.stage:
                continue
            key = task.stage, read
            if key not in self._known:
                self._known[key] = self._find(task.stage, producer, read)
            port, units = self._known[key]
            if units:
                by_port.setdefault((producer, port), set()).update(units)
        return tuple(Need(s, port, tuple(sorted(u))) for (s, port), u in by_port.items())
