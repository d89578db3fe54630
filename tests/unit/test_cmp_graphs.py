"""Edges of the kernels' graphs: from the data flow, and the same whichever way they are made.

A driver that keeps graphs, streams and events as the CUDA guide says stands in for the real one;
the real driver's own types are used, so that an argument of the wrong type shows here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.tiling import Batch
from megamoe.cmp import graphs
from megamoe.cmp.dag import chain, data_edges, leaves, streams
from megamoe.cmp.graphs import CmpGraph
from megamoe.cmp.kernels import standalone_kernels
from megamoe.cmp.modes import MODES
from megamoe.errors import SpecError
from megamoe.spec import ATTENTION_MODELS

driver = pytest.importorskip("cuda.bindings.driver")

ORDER = ["A0", "B0p", "B0f", "C0", "B1p", "B1f", "D1p", "D1f", "D0", "D2", "E1"]
DATA = {
    ("A0", "B0p"),
    ("A0", "C0"),
    ("A0", "B1p"),
    ("B0p", "B0f"),
    ("B0f", "D1p"),
    ("B0f", "D0"),
    ("C0", "D1f"),
    ("B1p", "B1f"),
    ("B1f", "E1"),
    ("D1p", "D1f"),
    ("D1f", "E1"),
    ("D0", "D2"),
}
FULL, PROGRAMMATIC = 0, 1
SPACER = 2


class FakeDriver:
    """Graphs and capture. A stream's state is the set of (node, kind of edge) that come next."""

    def __init__(self) -> None:
        self.edges: dict[tuple[int, int], int] = {}
        self.count = 0
        self.ahead: dict[int, set[tuple[int, int]]] = {}
        self.event: dict[int, set[tuple[int, int]]] = {}
        self.priorities: dict[int, int] = {}
        self.handles = 100

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)  # types and enumerations

    def _handle(self) -> int:
        self.handles += 1
        return self.handles

    def _add(self, before: set[tuple[int, int]]) -> int:
        self.count += 1
        for node, kind in before:
            self.edges[node, self.count] = kind
        return self.count

    def cuStreamCreate(self, flags: int) -> tuple:
        stream = self._handle()
        self.ahead[stream] = set()
        return 0, driver.CUstream(stream)

    def cuEventCreate(self, flags: int) -> tuple:
        return 0, driver.CUevent(self._handle())

    def cuStreamDestroy(self, stream: Any) -> tuple:
        return (0,)

    cuEventDestroy = cuStreamDestroy
    cuGraphExecDestroy = cuGraphDestroy = cuStreamDestroy

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple:
        return (0,)

    def cuStreamEndCapture(self, stream: Any) -> tuple:
        joined = {node for node, _ in self.ahead[int(stream)]}
        ends = set(range(1, self.count + 1)) - {a for a, _ in self.edges}
        assert ends <= joined, f"nodes {ends - joined} were not joined"
        return 0, driver.CUgraph(1)

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: int, extra: int) -> tuple:
        names = {int(a.id): a.value for a in (config.attrs or [])[: config.numAttrs]}
        before = set(self.ahead[int(config.hStream)])
        if 6 in names and names[6].programmaticStreamSerializationAllowed:
            before = {(node, PROGRAMMATIC) for node, _ in before}
        node = self._add(before)
        if 8 in names:
            self.priorities[node] = names[8].priority
        self.ahead[int(config.hStream)] = {(node, FULL)}
        if 7 in names:
            self.event[int(names[7].programmaticEvent.event)] = {(node, PROGRAMMATIC)}
        return (0,)

    def cuEventRecord(self, event: Any, stream: Any) -> tuple:
        self.event[int(event)] = set(self.ahead[int(stream)])
        return (0,)

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> tuple:
        self.ahead[int(stream)] |= self.event[int(event)]
        return (0,)

    def cuStreamGetCaptureInfo(self, stream: Any) -> tuple:
        nodes = [driver.CUgraphNode(n) for n, _ in self.ahead[int(stream)]]
        return 0, 1, 1, driver.CUgraph(1), nodes, [], len(nodes)

    def cuGraphCreate(self, flags: int) -> tuple:
        return 0, driver.CUgraph(1)

    def cuGraphAddKernelNode(self, graph: Any, before: list, count: int, params: Any) -> tuple:
        assert params.gridDimX > 0
        assert params.kernelParams or int(params.func) == SPACER
        return 0, driver.CUgraphNode(self._add(set()))

    def cuGraphKernelNodeSetAttribute(self, node: Any, name: Any, value: Any) -> tuple:
        assert isinstance(value, driver.CUkernelNodeAttrValue)
        assert isinstance(name, driver.CUkernelNodeAttrID)
        self.priorities[int(node)] = value.priority
        return (0,)

    def cuGraphAddDependencies(
        self, graph: Any, begin: list, end: list, data: list, n: int
    ) -> tuple:
        # The real one made every edge of a mixed list programmatic.
        assert len({int(edge.type) for edge in data}) == 1
        for a, b, edge in zip(begin, end, data, strict=True):
            assert (int(a), int(b)) not in self.edges
            assert edge.from_port == int(edge.type)
            self.edges[int(a), int(b)] = int(edge.type)
        return (0,)

    def cuGraphRemoveDependencies(
        self, graph: Any, begin: list, end: list, data: list, n: int
    ) -> tuple:
        for a, b, edge in zip(begin, end, data, strict=True):
            assert self.edges.pop((int(a), int(b))) == int(edge.type)
        return (0,)

    def cuGraphGetEdges(self, graph: Any, most: int) -> tuple:
        assert len(self.edges) <= most
        data = []
        for kind in self.edges.values():
            edge = driver.CUgraphEdgeData()
            edge.from_port = kind
            edge.type = driver.CUgraphDependencyType(kind)
            data.append(edge)
        begin = [driver.CUgraphNode(a) for a, _ in self.edges]
        end = [driver.CUgraphNode(b) for _, b in self.edges]
        return 0, begin, end, data, len(data)

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple:
        return 0, driver.CUgraphExec(1)


def kernels(rows: int = 16, **options: Any) -> tuple:
    graph = attention_pre_graph(ATTENTION_MODELS["glm-5.2"])
    batch = Batch(tuple((8, 8192) for _ in range(rows // 8)))
    return standalone_kernels(Planner(graph, 132, **options).plan(batch))


def run_of(parts: tuple) -> Any:
    bound = [
        SimpleNamespace(
            kernel=part,
            function=driver.CUfunction(1),
            threads=320,
            shared_bytes=1024,
            priority=-1,
            pointers=64,
        )
        for part in parts
    ]
    return SimpleNamespace(kernels=bound, edges=data_edges(parts))


def names_of(parts: tuple, edges: Any) -> set[tuple[str, str]]:
    return {(parts[a].name, parts[b].name) for a, b in edges}


def test_edges_follow_the_data():
    parts = kernels()
    assert [k.name for k in parts] == ORDER
    edges = data_edges(parts)
    assert names_of(parts, edges) == DATA
    assert {parts[i].name for i in leaves(len(parts), edges)} == {"D2", "E1"}
    assert len(chain(parts)) == 10


def test_an_inserted_kernel_moves_no_edge():
    """Positions say nothing: the same edges when independent kernels change places."""
    parts = kernels()
    order = [0, 3, 4, 1, 5, 2, 8, 6, 9, 7, 10]
    moved = tuple(parts[i] for i in order)
    assert names_of(moved, data_edges(moved)) == DATA


def test_a_consumer_before_its_producer_is_refused():
    parts = kernels()
    with pytest.raises(SpecError, match="B0p reads what A0 stores"):
        data_edges((parts[1], parts[0], *parts[2:]))


def test_streams_follow_one_producer_each():
    parts = kernels()
    edges = data_edges(parts)
    place = dict(zip(ORDER, streams(len(parts), edges), strict=True))
    assert [place[n] for n in ("A0", "B0p", "B0f", "D1p", "D1f", "E1")] == [0] * 6
    assert place["B1p"] == place["B1f"] != 0
    assert place["D0"] == place["D2"] != 0
    assert len({place[n] for n in ("B0p", "C0", "B1p")}) == 3


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_kernel_keeps_runs_apart(mode, monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(graphs, "driver_api", lambda: fake)
    monkeypatch.setattr(graphs, "spacer", lambda: (None, driver.CUfunction(SPACER)))
    graph = CmpGraph([run_of(kernels()) for _ in range(3)], mode, apart=True)
    assert fake.count == 3 * len(ORDER) + 2
    known = {int(n) for nodes in graph.nodes for n in nodes}
    last = ["E1"] if mode.startswith("single_stream") else ["D2", "E1"]
    for r in (1, 2):
        first = int(graph.nodes[r][0])
        (between,) = {a for a, b in fake.edges if b == first}
        assert between not in known
        before = {a for a, b in fake.edges if b == between}
        assert before == {int(graph.nodes[r - 1][ORDER.index(n)]) for n in last}
        assert {fake.edges[a, between] for a in before} | {fake.edges[between, first]} == {FULL}
    assert [e[1:] for e in graph.edges if e[0] == 1] == graph.expected_edges(1)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_its_edges(mode, count, monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(graphs, "driver_api", lambda: fake)
    parts = kernels()
    runs = [run_of(parts) for _ in range(count)]
    graph = CmpGraph(runs, mode)
    for run in range(count):
        inside = [(a, b, kind) for r, a, b, kind in graph.edges if r == run]
        assert inside == graph.expected_edges(run)
        if not mode.startswith("single_stream"):
            assert {(a, b) for a, b, _ in inside} == DATA
    programmatic = mode not in ("single_stream", "branches")
    assert {kind for *_, kind in graph.edges} == {programmatic}
    assert set(fake.priorities.values()) == {-1}
    # A run begins when all of the run before has ended.
    for r in range(1, count):
        first = int(graph.nodes[r][0])
        before = {a for a, b in fake.edges if b == first}
        last = ["E1"] if mode.startswith("single_stream") else ["D2", "E1"]
        assert before == {int(graph.nodes[r - 1][ORDER.index(n)]) for n in last}
        assert all(fake.edges[a, first] == FULL for a in before)


@pytest.mark.parametrize("mode", ["graph_rewrite", "manual_streams"])
def test_three_ways_make_the_same_graph(mode, monkeypatch):
    """Edges between runs included."""
    made = []
    for way in ("branches_pdl", mode):
        fake = FakeDriver()
        monkeypatch.setattr(graphs, "driver_api", lambda fake=fake: fake)
        graph = CmpGraph([run_of(kernels()) for _ in range(3)], way)
        name = {
            int(node): (r, ORDER[i])
            for r, run in enumerate(graph.nodes)
            for i, node in enumerate(run)
        }
        made.append({(name[a], name[b]): kind for (a, b), kind in fake.edges.items()})
    assert made[0] == made[1]


def test_chosen_edges_are_programmatic(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(graphs, "driver_api", lambda: fake)
    chosen = [("A0", "B0p"), ("D0", "D2")]
    graph = CmpGraph([run_of(kernels())], "branches_pdl", programmatic=chosen)
    assert [(a, b) for _, a, b, kind in graph.edges if kind] == chosen
