"""A chain of dependent short kernels on the GPU, launched four ways and stamped (csrc/pdl_chain).

The chain is ``x_{l+1} = relu(x_l) * w_l + b_l``, one kernel a layer. Its result is the CPU's to the
bit, so a layer that read its input too early shows.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
import torch

from megamoe import jit
from megamoe.backends.base import hopper_available
from megamoe.backends.cuda_driver import Kernel, Module, check
from megamoe.errors import BackendUnavailable, MegaMoeError

__all__ = [
    "MODES",
    "Chain",
    "Gaps",
    "Launch",
    "Mode",
    "Timing",
    "Trigger",
    "compile_chain",
    "expected",
    "gaps",
    "random_chain",
]

Array = np.ndarray[Any, Any]
Trigger = Literal["end", "start"]

_UNIT: Final = "pdl_chain/pdl_chain.cu"
_QUEUE: Final = 1000
"""Launches that a stream holds before the host waits."""


@dataclass(frozen=True)
class Mode:
    """How the kernels of the chain come to the GPU.

    Attributes:
        name: as the results call it.
        graph: captured once and replayed, instead of launched one by one.
        pdl: with programmatic stream serialisation.
    """

    name: str
    graph: bool
    pdl: bool


MODES: Final = (
    Mode("stream", graph=False, pdl=False),
    Mode("stream_pdl", graph=False, pdl=True),
    Mode("graph", graph=True, pdl=False),
    Mode("graph_pdl", graph=True, pdl=True),
)


class LayerParams(ctypes.Structure):
    """``LayerParams`` of csrc/pdl_chain/pdl_chain.cu; its size is checked against that one."""

    _fields_ = (
        ("input", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("weight", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("stamps", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("delay_ns", ctypes.c_uint32),
    )


def compile_chain(*, stamps: bool, trigger: Trigger = "end", wait: bool = True) -> jit.Cubin:
    """The chain's kernel. Needs no GPU.

    Args:
        stamps: each CTA writes when it started, was past its wait, and was done.
        trigger: where the next kernel is let in: ``"end"`` after the store, ``"start"`` at once.
        wait: False leaves the wait for the predecessor out; then results are wrong under PDL.
    """
    defines = {
        "PDL_CHAIN_STAMPS": int(stamps),
        "PDL_CHAIN_WAIT": int(wait),
        "PDL_CHAIN_TRIGGER_FIRST": int(trigger == "start"),
    }
    return jit.compile_cubin(_UNIT, defines)


def random_chain(layers: int, count: int, seed: int) -> tuple[Array, Array, Array]:
    """Activations FP32 [count] in ±1, weights [layers, count] in 0.5…1.5, biases in ±0.1."""
    draw = np.random.default_rng(seed)
    x = draw.uniform(-1.0, 1.0, count)
    weight = draw.uniform(0.5, 1.5, (layers, count))
    bias = draw.uniform(-0.1, 0.1, (layers, count))
    return x.astype(np.float32), weight.astype(np.float32), bias.astype(np.float32)


def expected(x: Array, weight: Array, bias: Array) -> Array:
    """The chain on the CPU: FP32, each product rounded before the sum."""
    for w, b in zip(weight, bias, strict=True):
        x = np.where(x < 0, np.float32(0), x) * w + b
    return x


@dataclass(frozen=True)
class Gaps:
    """What lies between two kernels of a chain, µs, from time stamps of every CTA.

    Attributes:
        gap_us: from the last store of a layer to the first CTA of the next past its wait; median
            over layers. Between them nothing of the chain happens.
        gap_p99_us: 99th percentile of the same.
        body_us: from that CTA to the layer's last store; median.
        early_us: how long before the predecessor's last store the first CTA of a layer already ran;
            negative where it started after it. Median.
        span_us: from the first CTA's start to the last store of the chain; median over runs.
        timer_us: the smallest step seen between two stamps: what the figures are good to.
    """

    gap_us: float
    gap_p99_us: float
    body_us: float
    early_us: float
    span_us: float
    timer_us: float

    def to_dict(self) -> dict[str, float]:
        """Rounded to nanoseconds."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def gaps(stamps: Array) -> Gaps:
    """Gaps of one or more runs.

    Args:
        stamps: ns, integers [runs, layers, CTAs, 3]: start, past the wait, done.
    """
    start, ready = stamps[..., 0].min(-1), stamps[..., 1].min(-1)
    done = stamps[..., 2].max(-1)
    between = np.sort((ready[:, 1:] - done[:, :-1]).ravel()) / 1e3
    steps = np.diff(np.unique(stamps))
    return Gaps(
        gap_us=float(np.median(between)),
        gap_p99_us=float(between[math.ceil(0.99 * len(between)) - 1]),
        body_us=float(np.median(done - ready) / 1e3),
        early_us=float(np.median(done[:, :-1] - start[:, 1:]) / 1e3),
        span_us=float(np.median(done[:, -1] - start[:, 0]) / 1e3),
        timer_us=float(steps.min() / 1e3),
    )


@dataclass(frozen=True)
class Timing:
    """Times of one forward, i.e. of the whole chain.

    Attributes:
        span_us: GPU time with the host ahead; median of the samples.
        span_p99_us: 99th percentile; the slowest of fewer than 100.
        back_to_back_us: forwards one after another, launched as fast as the host can.
        host_us: host time to enqueue a forward.
    """

    span_us: float
    span_p99_us: float
    back_to_back_us: float
    host_us: float


class Chain:
    """Buffers of a chain on the current device, and its kernel.

    Args:
        layers: L, kernels of a forward; at most 1000, which a stream can queue.
        count: elements of an activation, 4 bytes each.
        seed: of activations and weights.
        stamps: see ``compile_chain``; so for ``trigger`` and ``wait``.
        delay_ns: each thread sleeps so long before its store.

    Raises:
        BackendUnavailable: no Hopper GPU, or a missing package.
    """

    def __init__(
        self,
        layers: int,
        count: int,
        seed: int,
        *,
        stamps: bool = False,
        trigger: Trigger = "end",
        wait: bool = True,
        delay_ns: int = 0,
    ) -> None:
        if not hopper_available():
            raise BackendUnavailable(
                "the PDL chain needs a Hopper GPU (compute capability 9.0); "
                "programmatic dependent launch does not exist before"
            )
        cubin = compile_chain(stamps=stamps, trigger=trigger, wait=wait)
        assert cubin.constant("megamoe_pdl_param_bytes") == ctypes.sizeof(LayerParams)
        threads = cubin.constant("megamoe_pdl_threads")
        module = Module(cubin.image)
        self._kernels = {
            pdl: Kernel(module, "megamoe_pdl_layer", threads=threads, programmatic=pdl)
            for pdl in (False, True)
        }
        self.layers, self._grid = layers, -(-count // threads)
        x, weight, bias = random_chain(layers, count, seed)
        self.expected = expected(x, weight, bias)
        self._x, self._weight, self._bias = (torch.from_numpy(t).cuda() for t in (x, weight, bias))
        self._buffers = torch.empty((2, count), device="cuda")
        shape = (layers, self._grid, cubin.constant("megamoe_pdl_stamps"))
        self._stamps = torch.zeros(shape if stamps else (1,), dtype=torch.int64, device="cuda")
        self._params = []
        source = self._x
        for layer in range(layers):
            target = self._buffers[layer % 2]
            self._params.append(
                LayerParams(
                    input=source.data_ptr(),
                    out=target.data_ptr(),
                    weight=self._weight[layer].data_ptr(),
                    bias=self._bias[layer].data_ptr(),
                    stamps=self._stamps[layer].data_ptr() if stamps else 0,
                    count=count,
                    delay_ns=delay_ns,
                )
            )
            source = target
        self._result = source
        self.stream = torch.cuda.Stream()
        self.poison()

    def poison(self) -> None:
        """Fills activations with NaN, so that a value nobody wrote shows."""
        self._buffers.fill_(float("nan"))
        torch.cuda.synchronize()

    def enqueue(self, *, pdl: bool) -> None:
        """Launches one forward, kernel by kernel."""
        kernel, stream = self._kernels[pdl], self.stream.cuda_stream
        for params in self._params:
            kernel.launch(self._grid, params, stream)

    def result(self) -> Array:
        """FP32 [count] of the last forward."""
        torch.cuda.synchronize()
        return np.asarray(self._result.cpu().numpy())

    def stamps(self) -> Array:
        """Int64 [L, CTAs, 3] of the last forward, ns."""
        torch.cuda.synchronize()
        return np.asarray(self._stamps.cpu().numpy())


class Launch:
    """A mode bound to a chain: ``launch()`` enqueues one forward.

    Attributes:
        edges: by kind, dependencies of the captured graph; empty outside a graph.
    """

    def __init__(self, chain: Chain, mode: Mode) -> None:
        self._chain = chain
        self.edges: dict[str, int] = {}
        self.launch: Callable[[], None] = lambda: chain.enqueue(pdl=mode.pdl)
        if mode.graph:
            self.launch = self._capture(mode)

    def _capture(self, mode: Mode) -> Callable[[], None]:
        from cuda.bindings import runtime

        stream = self._chain.stream.cuda_stream
        local = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        torch.cuda.synchronize()
        check(runtime.cudaStreamBeginCapture(stream, local), "starting a capture")
        self._chain.enqueue(pdl=mode.pdl)
        graph = check(runtime.cudaStreamEndCapture(stream), "ending a capture")
        count = check(runtime.cudaGraphGetEdges(graph), "counting a graph's edges")[-1]
        data = check(runtime.cudaGraphGetEdges(graph, count), "reading a graph's edges")[2]
        kinds = runtime.cudaGraphDependencyType
        programmatic = int(kinds.cudaGraphDependencyTypeProgrammatic)
        ahead = sum(int(data[i].type) == programmatic for i in range(count))
        self.edges = {"full": count - ahead, "programmatic": ahead}
        self._exec = check(runtime.cudaGraphInstantiate(graph, 0), "instantiating a graph")
        check(runtime.cudaGraphDestroy(graph), "freeing a graph")
        return lambda: check(runtime.cudaGraphLaunch(self._exec, stream), "replaying a graph")

    def time(self, samples: int, forwards: int) -> Timing:
        """GPU spans with the host ahead, and forwards as the host sends them."""
        stream = self._chain.stream
        self.launch()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        begin.record(stream)
        for _ in range(forwards):
            self.launch()
        end.record(stream)
        host_us = (time.perf_counter() - began) / forwards * 1e6
        torch.cuda.synchronize()
        back_to_back = begin.elapsed_time(end) * 1e3 / forwards
        many = max(1, min(4, _QUEUE // self._chain.layers))
        cycles = int(2e3 * (1e3 + 2 * many * host_us))
        spans: list[float] = []
        for _ in range(3 * samples):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
            begin.record(stream)
            for _ in range(many):
                self.launch()
            end.record(stream)
            ahead = not begin.query()
            torch.cuda.synchronize()
            if ahead:
                spans.append(begin.elapsed_time(end) * 1e3 / many)
            if len(spans) == samples:
                break
        if len(spans) < samples:
            raise MegaMoeError("the host was not ahead of the GPU: is this machine busy?")
        spans.sort()
        p99 = spans[math.ceil(0.99 * len(spans)) - 1]
        return Timing(statistics.median(spans), p99, back_to_back, host_us)

    def stamped(self, runs: int) -> Gaps:
        """Gaps of a chain with stamps; the host is ahead of each run."""
        found = []
        for run in range(1 + runs):  # the first warms up
            with torch.cuda.stream(self._chain.stream):
                torch.cuda._sleep(10_000_000)  # 5 ms: more than a forward's launches take
            self.launch()
            if run:
                found.append(self._chain.stamps())
        return gaps(np.stack(found))
