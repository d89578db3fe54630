"""Placing tasks on workers: three kinds of queue, and the cost model that compares them.

    round_robin   task i of the linear order goes to worker i mod W: the published plan
    list          critical-path list scheduling: the task with the longest way to the end goes
                  where it would finish first (HEFT, with this kernel's prefetch in the model)
    dynamic       one queue in list order, from which workers take tickets

In every queue a task comes after all tasks that it waits for in one global order, and workers
take tasks in order: so the first unfinished task of that order can always run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

from megamoe.attention_pre.passes import EventGraph
from megamoe.errors import SpecError

__all__ = ["CostModel", "QueueKind", "Queues", "Timeline", "schedule", "simulate"]

QueueKind = Literal["round_robin", "list", "dynamic"]


@dataclass(frozen=True)
class CostModel:
    """Time of a task on one resident CTA, from bytes.

    Weights stream at the CTA's share of the memory's read ceiling, ahead of the events as far as
    shared memory holds them; inputs come from L2 after the events.

    Attributes:
        weight_rate: bytes per µs and worker; 4.70 TB/s (an H200's measured read ceiling) over 132.
        input_rate: bytes per µs and worker from L2.
        prefetch_bytes: weights that fit beside the running task's.
        event_us: from a producer's last store to a consumer's first operands: the fence before the
            signal, poll, inputs.
        body_us: what every task costs besides its bytes. This and ``event_us`` are those of the
            Hopper kernel on an H200: with them, the estimates of the kinds of queue fall in the
            order that was measured (``docs/attention_pre.md``).
        ticket_us: taking a task from the dynamic queue, asked for when the loads of the last began.
    """

    weight_rate: float = 4.70e6 / 132
    input_rate: float = 1.5e5
    prefetch_bytes: int = 128 << 10
    event_us: float = 3.0
    body_us: float = 2.0
    ticket_us: float = 0.7


@dataclass(frozen=True)
class Timeline:
    """Simulated times in µs, by task."""

    start: tuple[float, ...]
    finish: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """When the last task ends."""
        return max(self.finish, default=0.0)


@dataclass(frozen=True)
class Queues:
    """Tasks by worker, in order; one queue for all workers where ``dynamic``."""

    kind: QueueKind
    workers: tuple[tuple[int, ...], ...]
    num_workers: int

    @property
    def dynamic(self) -> bool:
        """Whether workers share one queue."""
        return self.kind == "dynamic"

    @property
    def depth(self) -> int:
        """Tasks of the longest queue."""
        return max((len(q) for q in self.workers), default=0)


class _Machine:
    """Workers and events under simulation. Tasks must run in an order that respects events.

    Of each worker: ``begun`` and ``loaded``, when the loads of its last task began and ended;
    ``done`` and ``before``, when its last task and the one before that ended. A worker has two
    instruction slots, so loads of a task wait for the task two places before it.
    """

    def __init__(
        self, graph: EventGraph, num_workers: int, cost: CostModel, ticket_us: float
    ) -> None:
        self._graph = graph
        self._cost = cost
        self._ticket = ticket_us
        self.begun = [-ticket_us] * num_workers
        self.loaded = [0.0] * num_workers
        self.done = [0.0] * num_workers
        self.before = [0.0] * num_workers
        self._missing = [len(e.producers) for e in graph.events]
        self._event_at = [0.0] * len(graph.events)
        self._left = [len(u.tasks) for u in graph.units]
        self._unit_at = [0.0] * len(graph.units)
        self.start = [0.0] * len(graph.tasks)
        self.finish = [0.0] * len(graph.tasks)

    def can_start(self, task: int) -> bool:
        """Whether the times of everything the task waits for are known."""
        return all(self._missing[e] == 0 for e in self._graph.waits[task])

    def _ready(self, task: int) -> float:
        """When a waiting worker has seen the task's events."""
        at = (self._event_at[e] + self._cost.event_us for e in self._graph.waits[task])
        return max(at, default=0.0)

    def _phases(self, task: int) -> tuple[float, float, float, float]:
        """Times of a task: all weights, weights beyond the prefetch, inputs, end."""
        tile, cost = self._graph.tasks[task].tile, self._cost
        return (
            tile.weight_bytes / cost.weight_rate,
            max(0, tile.weight_bytes - cost.prefetch_bytes) / cost.weight_rate,
            tile.input_bytes / cost.input_rate,
            tile.output_bytes / cost.input_rate + cost.body_us,
        )

    def best_worker(self, task: int) -> int:
        """The worker on which the task would finish first; among equals the least loaded."""
        ready = self._ready(task)
        weights, late, inputs, _ = self._phases(task)
        best, chosen = (float("inf"), 0.0), 0
        for w, (loaded, before, done) in enumerate(
            zip(self.loaded, self.before, self.done, strict=True)
        ):
            begin = loaded if loaded > before else before
            end = max(begin + weights, done + late, (ready if ready > done else done) + inputs)
            if (end, loaded) < best:
                best, chosen = (end, loaded), w
        return chosen

    def run(self, task: int, worker: int) -> None:
        """Commits the task to the worker."""
        w, ready = worker, self._ready(task)
        weights, late, inputs, tail = self._phases(task)
        begin = max(self.loaded[w], self.before[w], self.begun[w] + self._ticket)
        loaded = max(begin + weights, self.done[w] + late)
        self.start[task] = max(ready, self.done[w])
        finish = max(loaded, self.start[task] + inputs) + tail
        unit = self._graph.units[self._graph.tasks[task].unit]
        self._left[unit.index] -= 1
        last = self._left[unit.index] == 0
        if last and len(unit.tasks) > 1:
            finish += unit.final_bytes / self._cost.input_rate + self._cost.body_us
        self.begun[w], self.loaded[w] = begin, loaded
        self.before[w], self.done[w] = self.done[w], finish
        self.finish[task] = finish
        self._unit_at[unit.index] = max(self._unit_at[unit.index], finish)
        if last:
            for event in self._graph.signals[unit.index]:
                self._missing[event] -= 1
                self._event_at[event] = max(self._event_at[event], self._unit_at[unit.index])

    def timeline(self) -> Timeline:
        """The times so far."""
        return Timeline(tuple(self.start), tuple(self.finish))


def _ranks(graph: EventGraph, cost: CostModel) -> list[float]:
    """Longest remaining time from the start of each task, over its unit's events."""
    rank = [-1.0] * len(graph.tasks)
    unit_rank = [-1.0] * len(graph.units)
    # The linear order is topological, so that consumers are ranked before their producers.
    for task in reversed(graph.tasks):
        unit = graph.units[task.unit]
        if unit_rank[unit.index] < 0:
            after = [
                max((rank[c] + cost.event_us for c in graph.events[e].consumers), default=0.0)
                for e in graph.signals[unit.index]
            ]
            final = unit.final_bytes / cost.input_rate
            unit_rank[unit.index] = max(after, default=0.0) + final
        tile = task.tile
        own = max(tile.weight_bytes / cost.weight_rate, tile.input_bytes / cost.input_rate)
        rank[task.index] = own + cost.body_us + unit_rank[unit.index]
    return rank


def _list_schedule(
    graph: EventGraph, num_workers: int, cost: CostModel
) -> tuple[list[int], list[list[int]]]:
    """The order in which tasks were placed, and the queues they were placed in."""
    machine = _Machine(graph, num_workers, cost, 0.0)
    rank = _ranks(graph, cost)
    waiting = [len(w) for w in graph.waits]
    missing = [len(e.producers) for e in graph.events]
    left = [len(u.tasks) for u in graph.units]
    queues: list[list[int]] = [[] for _ in range(num_workers)]
    order: list[int] = []
    ready = [(-rank[t], t) for t, count in enumerate(waiting) if count == 0]
    heapify(ready)
    while ready:
        task = heappop(ready)[1]
        worker = machine.best_worker(task)
        machine.run(task, worker)
        queues[worker].append(task)
        order.append(task)
        unit = graph.tasks[task].unit
        left[unit] -= 1
        if left[unit]:
            continue
        for event in graph.signals[unit]:
            missing[event] -= 1
            if missing[event] == 0:
                for consumer in graph.events[event].consumers:
                    waiting[consumer] -= 1
                    if waiting[consumer] == 0:
                        heappush(ready, (-rank[consumer], consumer))
    return order, queues


def schedule(
    graph: EventGraph,
    num_workers: int,
    kinds: Iterable[QueueKind],
    cost: CostModel | None = None,
) -> dict[QueueKind, Queues]:
    """Places every task of a linearized graph, in each of the kinds of queue.

    Raises:
        SpecError: ``num_workers`` is not positive.
    """
    if num_workers < 1:
        raise SpecError(f"num_workers = {num_workers}: must be positive")
    made: dict[QueueKind, Queues] = {}
    listed: tuple[list[int], list[list[int]]] | None = None
    for kind in kinds:
        if kind == "round_robin":
            tasks = range(len(graph.tasks))
            queues = tuple(tuple(tasks[w::num_workers]) for w in range(num_workers))
        else:
            listed = listed or _list_schedule(graph, num_workers, cost or CostModel())
            queues = (tuple(listed[0]),) if kind == "dynamic" else tuple(map(tuple, listed[1]))
        made[kind] = Queues(kind, queues, num_workers)
    return made


def simulate(graph: EventGraph, queues: Queues, cost: CostModel | None = None) -> Timeline:
    """Times of all tasks under the cost model: an estimate for comparing queues, no measurement.

    Raises:
        SpecError: the queues deadlock, or do not hold every task once.
    """
    cost = cost or CostModel()
    held = sorted(t for q in queues.workers for t in q)
    if held != list(range(len(graph.tasks))):
        raise SpecError(f"queues hold {len(held)} tasks, not each of {len(graph.tasks)} once")
    machine = _Machine(graph, queues.num_workers, cost, cost.ticket_us if queues.dynamic else 0.0)
    if queues.dynamic:
        for task in queues.workers[0]:
            _need_start(machine, graph, [task])
            machine.run(task, min(range(queues.num_workers), key=lambda w: machine.loaded[w]))
        return machine.timeline()
    heads: Sequence[int] = [0] * queues.num_workers
    heads = list(heads)
    left = len(held)
    while left:
        before = left
        for worker, queue in enumerate(queues.workers):
            while heads[worker] < len(queue) and machine.can_start(queue[heads[worker]]):
                machine.run(queue[heads[worker]], worker)
                heads[worker] += 1
                left -= 1
        if left == before:
            stuck = [q[h] for q, h in zip(queues.workers, heads, strict=True) if h < len(q)]
            _need_start(machine, graph, stuck)
    return machine.timeline()


def _need_start(machine: _Machine, graph: EventGraph, tasks: list[int]) -> None:
    if not any(machine.can_start(t) for t in tasks):
        names = sorted({graph.stages[graph.tasks[t].stage].name for t in tasks})
        raise SpecError(
            f"queues deadlock: tasks {tasks[:8]} of {', '.join(names)} wait for later tasks"
        )
