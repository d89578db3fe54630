"""CUDA graphs of a plan's kernels, of every kind in ``modes``.

Edges come from ``dag.data_edges``; which node is which kernel is known because each node is asked
for when it is made.

A graph may hold several runs one after another, on one set of tensors each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch

from megamoe.backends.cuda_driver import Module, check, driver_api
from megamoe.cmp.bound import BoundCmp, BoundKernel
from megamoe.cmp.dag import Edge, chain, leaves, streams
from megamoe.cmp.modes import MODES, Mode
from megamoe.errors import MegaMoeError, SpecError
from megamoe.jit import compile_cubin

__all__ = ["CmpGraph", "EmptyGraph"]


def _attribute(name: str) -> Any:
    driver = driver_api()
    attribute = driver.CUlaunchAttribute()
    attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    return attribute


def _priority(value: int) -> Any:
    attribute = _attribute("PRIORITY")
    attribute.value.priority = value
    return attribute


def _serial() -> Any:
    """May begin before the kernel ahead of it on its stream has ended."""
    attribute = _attribute("PROGRAMMATIC_STREAM_SERIALIZATION")
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _announces(event: Any) -> Any:
    """Its ``launch_dependents`` records an event, which other streams may wait for."""
    attribute = _attribute("PROGRAMMATIC_EVENT")
    attribute.value.programmaticEvent.event = event
    attribute.value.programmaticEvent.flags = 0
    attribute.value.programmaticEvent.triggerAtBlockStart = 0
    return attribute


def _launch(bound: BoundKernel, stream: Any, attributes: Sequence[Any]) -> None:
    driver = driver_api()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = bound.kernel.launch
    config.blockDimX, config.blockDimY, config.blockDimZ = bound.threads, 1, 1
    config.sharedMemBytes = bound.shared_bytes
    config.hStream = stream
    every = [_priority(bound.priority), *attributes]
    config.attrs = every
    config.numAttrs = len(every)
    check(
        driver.cuLaunchKernelEx(config, bound.function, bound.pointers, 0),
        f"launching {bound.kernel.name} on {bound.kernel.ctas} CTAs",
    )


@cache
def _spacer_on(device: int) -> tuple[Module, Any]:
    module = Module(compile_cubin("cmp/spacer.cu", {}).image)
    return module, module.function("megamoe_spacer")


def spacer() -> tuple[Module, Any]:
    """The empty kernel, loaded on the current device."""
    return _spacer_on(torch.cuda.current_device())


def _launch_spacer(kernel: tuple[Module, Any], stream: Any) -> None:
    config = driver_api().CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.hStream = stream
    check(driver_api().cuLaunchKernelEx(config, kernel[1], 0, 0), "launching a spacer")


def _spacer_node(graph: Any, kernel: tuple[Module, Any]) -> Any:
    params = driver_api().CUDA_KERNEL_NODE_PARAMS()
    params.func = kernel[1]
    params.gridDimX = params.gridDimY = params.gridDimZ = 1
    params.blockDimX, params.blockDimY, params.blockDimZ = 32, 1, 1
    return check(driver_api().cuGraphAddKernelNode(graph, [], 0, params), "a spacer")


def _edge_data(programmatic: bool) -> Any:
    data = driver_api().CUgraphEdgeData()
    if programmatic:
        data.from_port = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        data.type = driver_api().CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return data


class EmptyGraph:
    """A graph of one empty kernel, for benchmarks: what it costs to launch a graph."""

    def __init__(self) -> None:
        self._graph = check(driver_api().cuGraphCreate(0), "a graph")
        _spacer_node(self._graph, spacer())
        self._exec = check(driver_api().cuGraphInstantiate(self._graph, 0), "an empty graph")

    def launch(self, stream: int) -> None:
        """Enqueues it on a stream, given by its handle."""
        check(driver_api().cuGraphLaunch(self._exec, stream), "launching an empty graph")

    def close(self) -> None:
        """Frees it; runs on the device must have ended."""
        driver_api().cuGraphExecDestroy(self._exec)
        driver_api().cuGraphDestroy(self._graph)


class CmpGraph:
    """An instantiated graph of one or more runs.

    Args:
        runs: bound plans, run one after another; equal plans on different tensors.
        mode: which edges, and how they are made.
        programmatic: of a graph with branches, the edges (by kernel names) that are programmatic;
            ``None`` leaves it to the mode.
        apart: whether an empty kernel stands between two runs.

    Attributes:
        mode: as given.
        nodes: of each run, by kernel position.
        edges: (run, producer name, consumer name, programmatic) of every edge in the graph that
            joins two kernels of one run, read back from the driver.
    """

    def __init__(
        self,
        runs: Sequence[BoundCmp],
        mode: Mode,
        *,
        programmatic: Collection[tuple[str, str]] | None = None,
        apart: bool = False,
    ) -> None:
        if mode not in MODES:
            raise SpecError(f"mode = {mode!r}: must be one of {', '.join(MODES)}")
        driver = driver_api()
        self.mode = mode
        self._programmatic = programmatic
        self._spacer = spacer() if apart else None
        self._runs = list(runs)  # kept alive
        self._streams: list[Any] = []
        self._events: list[Any] = []
        self.nodes: list[list[Any]] = []
        try:
            if mode == "manual_streams":
                self._graph = self._capture_streams()
            elif mode in ("single_stream", "single_stream_pdl"):
                self._graph = self._capture_chain(programmatic=mode == "single_stream_pdl")
            elif mode == "graph_rewrite":
                self._graph = self._capture_chain(programmatic=False)
                self._remove_all()
                self._connect()
            else:
                self._graph = self._build()
                self._connect()
            self._exec = check(driver.cuGraphInstantiate(self._graph, 0), f"instantiating {mode}")
        finally:
            for event in self._events:
                driver.cuEventDestroy(event)
            for stream in self._streams:
                driver.cuStreamDestroy(stream)
        self.edges = self._read_edges()

    # ------------------------------------------------------------ making

    def _stream(self) -> Any:
        driver = driver_api()
        flag = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._streams.append(check(driver.cuStreamCreate(flag), "a stream"))
        return self._streams[-1]

    def _event(self) -> Any:
        driver = driver_api()
        flag = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._events.append(check(driver.cuEventCreate(flag), "an event"))
        return self._events[-1]

    def _begin(self, stream: Any) -> None:
        mode = driver_api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver_api().cuStreamBeginCapture(stream, mode), "capturing")

    def _last_node(self, stream: Any) -> Any:
        """The node that the last launch on a capturing stream became."""
        found = check(driver_api().cuStreamGetCaptureInfo(stream), "the capture's state")
        return found[3][0]

    def _capture_chain(self, *, programmatic: bool) -> Any:
        stream = self._stream()
        serial = _serial()
        self._begin(stream)
        for run in self._runs:
            made = []
            if self._spacer and self.nodes and self.mode != "graph_rewrite":
                _launch_spacer(self._spacer, stream)
            for i, bound in enumerate(run.kernels):
                _launch(bound, stream, [serial] if programmatic and i > 0 else [])
                made.append(self._last_node(stream))
            self.nodes.append(made)
        return check(driver_api().cuStreamEndCapture(stream), "the end of a capture")

    def _build(self) -> Any:
        driver = driver_api()
        graph = check(driver.cuGraphCreate(0), "a graph")
        for run in self._runs:
            made = []
            for bound in run.kernels:
                params = driver.CUDA_KERNEL_NODE_PARAMS()
                params.func = bound.function
                params.gridDimX, params.gridDimY, params.gridDimZ = bound.kernel.launch
                params.blockDimX, params.blockDimY, params.blockDimZ = bound.threads, 1, 1
                params.sharedMemBytes = bound.shared_bytes
                params.kernelParams = bound.pointers
                name = bound.kernel.name
                node = check(driver.cuGraphAddKernelNode(graph, [], 0, params), f"node {name}")
                priority = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
                value = driver.CUkernelNodeAttrValue()
                value.priority = bound.priority
                check(
                    driver.cuGraphKernelNodeSetAttribute(node, priority, value),
                    f"the priority of {name}",
                )
                made.append(node)
            self.nodes.append(made)
        return graph

    def _remove_all(self) -> None:
        begin, end, data, count = self._get_edges()
        if count == 0:
            return
        check(
            driver_api().cuGraphRemoveDependencies(self._graph, begin, end, data, count),
            "removing a capture's edges",
        )

    def _is_programmatic(self, producer: str, consumer: str) -> bool:
        if self._programmatic is not None:
            return (producer, consumer) in self._programmatic
        return self.mode not in ("single_stream", "branches")

    def _connect(self) -> None:
        """Edges where data flows; a run's first kernels follow the last ones of the run before."""
        every: dict[bool, tuple[list[Any], list[Any]]] = {True: ([], []), False: ([], [])}

        def add(producer: Any, consumer: Any, programmatic: bool) -> None:
            every[programmatic][0].append(producer)
            every[programmatic][1].append(consumer)

        for i, (run, nodes) in enumerate(zip(self._runs, self.nodes, strict=True)):
            names = [b.kernel.name for b in run.kernels]
            for producer, consumer in run.edges:
                programmatic = self._is_programmatic(names[producer], names[consumer])
                add(nodes[producer], nodes[consumer], programmatic)
            if i == 0:
                continue
            last = [self.nodes[i - 1][k] for k in leaves(len(names), self._runs[i - 1].edges)]
            first = [nodes[k] for k in sorted(set(range(len(nodes))) - {c for _, c in run.edges})]
            pairs = [(a, b) for a in last for b in first]
            if self._spacer:
                node = _spacer_node(self._graph, self._spacer)
                pairs = [(a, node) for a in last] + [(node, b) for b in first]
            for a, b in pairs:
                add(a, b, False)
        # A call takes edges of one kind: the driver made all of a mixed list programmatic.
        for programmatic, (begin, end) in every.items():
            if begin:
                data = [_edge_data(programmatic)] * len(begin)
                done = driver_api().cuGraphAddDependencies(
                    self._graph, begin, end, data, len(begin)
                )
                check(done, "adding edges")

    def _capture_streams(self) -> Any:
        """Consumers on their producer's stream follow it there; others wait for its event."""
        driver = driver_api()
        serial = _serial()
        main = self._stream()
        self._begin(main)
        for run in self._runs:
            place = streams(len(run.kernels), run.edges)
            # Branches of their own in every run: a stream that is used again would have them follow
            # its last kernel of the run before.
            made = [main, *(self._stream() for _ in range(max(place)))]
            if self._spacer and self.nodes:
                _launch_spacer(self._spacer, main)
            self.nodes.append([])
            ready: dict[int, Any] = {}
            for i, bound in enumerate(run.kernels):
                producers = [p for p, c in run.edges if c == i]
                attributes = []
                for p in producers:
                    if place[p] == place[i]:
                        attributes.append(serial)
                    else:
                        check(
                            driver.cuStreamWaitEvent(made[place[i]], ready[p], 0),
                            f"{bound.kernel.name} waiting for {run.kernels[p].kernel.name}",
                        )
                if any(place[c] != place[i] for p, c in run.edges if p == i):
                    ready[i] = self._event()
                    attributes.append(_announces(ready[i]))
                _launch(bound, made[place[i]], attributes)
                self.nodes[-1].append(self._last_node(made[place[i]]))
            for i in leaves(len(run.kernels), run.edges):
                if place[i] == 0:
                    continue
                done = self._event()
                check(driver.cuEventRecord(done, made[place[i]]), "an event")
                check(driver.cuStreamWaitEvent(made[0], done, 0), "joining a branch")
        return check(driver.cuStreamEndCapture(main), "the end of a capture")

    # ------------------------------------------------------------ what it is

    def _get_edges(self) -> tuple[list[Any], list[Any], list[Any], int]:
        driver = driver_api()
        most = sum(len(n) for n in self.nodes) * 8
        begin, end, data, count = check(driver.cuGraphGetEdges(self._graph, most), "the edges")
        return list(begin)[:count], list(end)[:count], list(data)[:count], int(count)

    def _read_edges(self) -> list[tuple[int, str, str, bool]]:
        """Edges inside runs.

        Raises:
            MegaMoeError: an edge between runs is programmatic, so that these would overlap.
        """
        where = {
            int(node): (r, i) for r, nodes in enumerate(self.nodes) for i, node in enumerate(nodes)
        }
        found = []
        begin, end, data, _ = self._get_edges()
        for a, b, edge in zip(begin, end, data, strict=True):
            run, producer = where.get(int(a), (-1, -1))  # a spacer is none
            other, consumer = where.get(int(b), (-2, -2))
            if run != other and int(edge.type) == 1:
                raise MegaMoeError(f"{self.mode}: the driver lets runs of the graph overlap")
            if run == other:
                names = [self._runs[run].kernels[i].kernel.name for i in (producer, consumer)]
                found.append((run, names[0], names[1], int(edge.type) == 1))
        return sorted(found)

    def expected_edges(self, run: int = 0) -> list[tuple[str, str, bool]]:
        """What the mode says the edges inside a run are."""
        bound = self._runs[run]
        linear = self.mode.startswith("single_stream")
        edges: Sequence[Edge] = chain([b.kernel for b in bound.kernels]) if linear else bound.edges
        names = [b.kernel.name for b in bound.kernels]
        return sorted(
            (names[p], names[c], self._is_programmatic(names[p], names[c])) for p, c in edges
        )

    # ------------------------------------------------------------ running

    def launch(self, stream: int) -> None:
        """Enqueues all runs on a stream, given by its handle."""
        check(driver_api().cuGraphLaunch(self._exec, stream), f"launching {self.mode}")

    def close(self) -> None:
        """Frees the graph; runs on the device must have ended."""
        if self._exec is not None:
            driver_api().cuGraphExecDestroy(self._exec)
            driver_api().cuGraphDestroy(self._graph)
            self._exec = None
