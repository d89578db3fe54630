"""Random graphs and tilings through every pass and queue: what must hold for any of them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.attention_pre.passes import fuse_events, linearize, normalize
from megamoe.attention_pre.regions import Region, first_conflict, is_covered
from megamoe.attention_pre.schedule import schedule, simulate
from megamoe.attention_pre.stages import StageGraph
from megamoe.attention_pre.task_graph import TaskGraph, build_task_graph
from megamoe.attention_pre.tiling import Specialization, StageTiles, Tile, Unit

N = 24
"""Columns of every tensor."""


@st.composite
def cuts(draw):
    """Consecutive ranges that tile N columns."""
    inner = draw(st.sets(st.integers(1, N - 1), max_size=6))
    edges = [0, *sorted(inner), N]
    return list(pairwise(edges))


def tile(reads, writes):
    return Tile((), frozenset(), tuple(reads), tuple(writes), 4000, 100, 10)


@st.composite
def graphs(draw) -> tuple[TaskGraph, dict]:
    """Stages that each read boxes of earlier tensors and write their own, some by split sums."""
    stages: list[StageTiles] = []
    policies = {}
    kinds = []
    for s in range(draw(st.integers(1, 6))):
        opcode = f"op{s}"
        parts = draw(st.sampled_from([1, 1, 2, 3]))
        reduced_here = parts > 1 and draw(st.booleans())
        tiles, units = [], []
        for first, last in draw(cuts()):
            reads = []
            for p in draw(st.sets(st.integers(0, s - 1), max_size=2)) if s else ():
                begin = draw(st.integers(0, N - 1))
                end = draw(st.integers(begin + 1, N))
                reads.append(Region(f"t{p}", ((begin, end),)))
            members = []
            for part in range(parts):
                final = Region(f"t{s}", ((first, last),), (0, 1) if reduced_here else (part, parts))
                partial = Region(f"w{s}", ((first, last),), (part, parts))
                tiles.append(tile(reads, [partial if reduced_here else final]))
                members.append(len(tiles) - 1)
            if reduced_here:
                done = Region(f"t{s}", ((first, last),))
                units.append(Unit(tuple(members), (done,), draw(st.integers(1, 4)), 50))
            else:
                units += [Unit((m,), tiles[m].writes) for m in members]
        spec = Specialization(opcode, 1, N, 1, 1, 1)
        stages.append(StageTiles(opcode, opcode, opcode, spec, tuple(tiles), tuple(units)))
        kinds.append("cover" if parts == 1 or reduced_here else "reduce")
        for p in range(s):
            if draw(st.booleans()):
                policies[f"op{p}", opcode] = kinds[p]
    graph = StageGraph("random", (), {}, ())
    return build_task_graph(graph, stages, policies), policies


def overlapping_units(graph: TaskGraph, task):
    """By brute force: units whose writes touch what the task reads."""
    return {
        unit.index
        for unit in graph.units
        for write in unit.writes
        for read in task.tile.reads
        if unit.stage != task.stage and write.overlaps(read)
    }


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(1, 5), st.sampled_from(["port", "task"]), st.data())
def test_any_graph_can_be_planned(made, workers, scope, data):
    graph, policies = made
    for task in graph.tasks:
        needed = {u for need in graph.needs[task.index] for u in need.units}
        touched = overlapping_units(graph, task)
        assert touched <= needed, "every overlap is a dependence"
        for unit in needed - touched:
            producer = graph.stages[graph.units[unit].stage].opcode
            consumer = graph.stages[task.stage].opcode
            assert (producer, consumer) not in policies, "only 'whole' waits for more"

    fused, report = fuse_events(graph, scope)
    assert report.after["events"] <= report.before["events"]
    max_waits, max_signals = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    bounded, _ = normalize(fused, max_waits=max_waits, max_signals=max_signals)
    assert all(len(w) <= max_waits for w in bounded.waits)
    assert all(len(s) <= max_signals for s in bounded.signals)
    linear, _ = linearize(bounded)
    check_reachability(graph, linear)

    for queues in schedule(linear, workers, ("round_robin", "list", "dynamic")).values():
        check_execution(linear, queues, data)
        timeline = simulate(linear, queues)
        for event in linear.events:
            done = max(timeline.finish[t] for u in event.producers for t in linear.units[u].tasks)
            assert all(timeline.start[t] >= done for t in event.consumers)


def check_reachability(graph: TaskGraph, linear):
    """Events order every needed unit before its task, relays or not."""
    # Tasks were renumbered: the original ones are those with a tile of a real stage, by identity.
    order = {id(task.tile): task.index for task in linear.tasks}
    before: list[set[int]] = [set() for _ in linear.tasks]
    for task in linear.tasks:
        for e in linear.waits[task.index]:
            for u in linear.events[e].producers:
                for member in linear.units[u].tasks:
                    assert member < task.index, "linear order is topological"
                    before[task.index] |= {member} | before[member]
    for task in graph.tasks:
        seen = before[order[id(task.tile)]]
        for need in graph.needs[task.index]:
            for u in need.units:
                members = {order[id(graph.tasks[m].tile)] for m in graph.units[u].tasks}
                assert members <= seen, "a dependence was lost"


def check_execution(linear, queues, data):
    """Runs the queues with random choices: each task once, counters end at their thresholds."""
    counters = [0] * len(linear.events)
    arrived = [0] * len(linear.units)
    heads = [0] * len(queues.workers)
    running: list[int] = []
    ran: list[int] = []
    slots = queues.num_workers if queues.dynamic else 1

    def ready(task):
        return all(counters[e] >= linear.events[e].threshold for e in linear.waits[task])

    while True:
        # A dynamic queue hands out up to one task per worker; a static one its head.
        held: list[tuple[int, int]] = []
        for q, queue in enumerate(queues.workers):
            room = slots - len(running) if queues.dynamic else 1
            held += [(q, t) for t in queue[heads[q] : heads[q] + room]]
        if queues.dynamic:
            running += [t for _, t in held]
            heads[0] += len(held)
            candidates = [(0, t) for t in running if ready(t)]
        else:
            candidates = [(q, t) for q, t in held if ready(t)]
        if not candidates:
            break
        q, task = data.draw(st.sampled_from(candidates), label="next task")
        if queues.dynamic:
            running.remove(task)
        else:
            heads[q] += 1
        ran.append(task)
        unit = linear.tasks[task].unit
        arrived[unit] += 1
        if arrived[unit] == len(linear.units[unit].tasks):
            for e in linear.signals[unit]:
                counters[e] += linear.units[unit].publications
    assert sorted(ran) == list(range(len(linear.tasks))), "each task once, none left"
    assert counters == [e.threshold for e in linear.events]


boxes = st.builds(
    lambda a, b, c, d: ((min(a, b), max(a, b) + 1), (min(c, d), max(c, d) + 1)),
    *[st.integers(0, 5)] * 4,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(boxes, max_size=6), boxes)
def test_region_algebra_is_that_of_cells(writes, read):
    """Overlap, conflict and cover against sets of cells."""

    def cells(box):
        return {(i, j) for i in range(*box[0]) for j in range(*box[1])}

    regions = [Region("t", box) for box in writes]
    whole = Region("t", read)
    for region, box in zip(regions, writes, strict=True):
        shared = cells(box) & cells(read)
        assert region.overlaps(whole) == bool(shared)
        assert region.shared(whole) == len(shared)
    conflict = any(cells(a) & cells(b) for i, a in enumerate(writes) for b in writes[i + 1 :])
    assert (first_conflict(regions) is not None) == conflict
    if not conflict:
        union = set().union(*(cells(box) for box in writes))
        assert is_covered(whole, regions) == (cells(read) <= union)
