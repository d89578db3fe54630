"""Prometheus metrics of the service: one registry, in base units, fed by the engine's reports.

GPU readings come from the ranks' NVML samplers. What a rank could not read is absent from the
output, and ``megamoe_telemetry_available`` says so; nothing unread is ever exported as 0.
``DCGM_NAMES`` maps the GPU metrics to the names of NVIDIA's dcgm-exporter.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.engine import Engine
from service.reports import EngineFault, StepRecord, TelemetrySample
from service.sequences import Sequences

__all__ = ["CONTENT_TYPE", "DCGM_NAMES", "GPU_METRICS", "Metrics", "gini", "load_figures"]

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
_SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5,
    10, 30,
)  # fmt: skip
_TOKENS: Final = tuple(1 << k for k in range(17))
ENERGY_WINDOW_S: Final = 5.0
"""NVML's energy counter moves in steps: below seconds a quotient of two readings means little."""

GPU_METRICS: Final[dict[str, tuple[str, str]]] = {
    "sm_clock_hertz": ("gauge", "SM clock."),
    "memory_clock_hertz": ("gauge", "Memory clock."),
    "power_watts": ("gauge", "Board power, instantaneous."),
    "power_limit_watts": ("gauge", "Enforced power limit."),
    "energy_joules_total": ("counter", "Energy since the driver was loaded."),
    "temperature_celsius": ("gauge", "GPU temperature."),
    "memory_used_bytes": ("gauge", "Device memory in use."),
    "memory_total_bytes": ("gauge", "Device memory."),
    "nvlink_transmit_bytes_total": ("counter", "NVLink payload sent, all links."),
    "nvlink_receive_bytes_total": ("counter", "NVLink payload received, all links."),
    "utilization_ratio": ("gauge", "Share of time with a kernel running."),
}
"""Readings by the field name of ``TelemetrySample.values``; exported as ``megamoe_gpu_NAME``."""

DCGM_NAMES: Final[dict[str, tuple[str, float] | None]] = {
    "sm_clock_hertz": ("DCGM_FI_DEV_SM_CLOCK", 1e6),
    "memory_clock_hertz": ("DCGM_FI_DEV_MEM_CLOCK", 1e6),
    "power_watts": ("DCGM_FI_DEV_POWER_USAGE_INSTANT", 1.0),
    "power_limit_watts": ("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", 1.0),
    "energy_joules_total": ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1e-3),
    "temperature_celsius": ("DCGM_FI_DEV_GPU_TEMP", 1.0),
    "memory_used_bytes": ("DCGM_FI_DEV_FB_USED", float(1 << 20)),
    "memory_total_bytes": ("DCGM_FI_DEV_FB_TOTAL", float(1 << 20)),
    "nvlink_transmit_bytes_total": ("DCGM_FI_DEV_NVLINK_COUNT_TX_BYTES", 1.0),
    "nvlink_receive_bytes_total": ("DCGM_FI_DEV_NVLINK_COUNT_RX_BYTES", 1.0),
    "utilization_ratio": ("DCGM_FI_DEV_GPU_UTIL", 0.01),
    "clocks_event_active": ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", 1.0),
}
"""dcgm-exporter's name of each GPU metric, and what to multiply its value by to get ours."""


def gini(counts: Iterable[int]) -> float:
    """Gini coefficient of a load: 0 when equal, towards 1 when one expert takes all.

    ``(2 * sum(i * c_i) / (n * sum(c)) - (n + 1) / n)`` over counts sorted ascending, i from 1.
    """
    load = np.sort(np.asarray(list(counts), np.float64))
    total = load.sum()
    if total == 0:
        return 0.0
    n = len(load)
    return float(2 * (np.arange(1, n + 1) * load).sum() / (n * total) - (n + 1) / n)


def load_figures(counts: Sequence[int]) -> dict[str, float] | None:
    """Skew of a load: ``max_over_mean``, ``gini``, ``empty``; None when nothing was routed."""
    total = sum(counts)
    if not total:
        return None
    return {
        "max_over_mean": max(counts) * len(counts) / total,
        "gini": gini(counts),
        "empty": sum(count == 0 for count in counts),
    }


class _GpuCollector(Collector):
    """The latest sample of each rank, only what was read."""

    def __init__(self) -> None:
        self.samples: dict[int, TelemetrySample] = {}

    def collect(self) -> Iterator[Metric]:
        available = GaugeMetricFamily(
            "megamoe_telemetry_available",
            "1 when the rank's NVML sampler reads a device; 0 when there is none to read.",
            labels=["rank", "source"],
        )
        for rank, sample in sorted(self.samples.items()):
            available.add_metric([str(rank), "nvml"], 0.0 if sample.unavailable else 1.0)
        yield available
        for name, (kind, text) in GPU_METRICS.items():
            family: GaugeMetricFamily | CounterMetricFamily
            if kind == "counter":
                family = CounterMetricFamily(f"megamoe_gpu_{name}", text, labels=["rank", "device"])
            else:
                family = GaugeMetricFamily(f"megamoe_gpu_{name}", text, labels=["rank", "device"])
            for rank, sample in sorted(self.samples.items()):
                if name in sample.values:
                    family.add_metric([str(rank), sample.device], sample.values[name])
            if family.samples:
                yield family
        events = GaugeMetricFamily(
            "megamoe_gpu_clocks_event_active",
            "1 while the driver holds the clocks back for this reason.",
            labels=["rank", "device", "reason"],
        )
        for rank, sample in sorted(self.samples.items()):
            for reason, active in (sample.clocks_events or {}).items():
                events.add_metric([str(rank), sample.device, reason], float(active))
        if events.samples:
            yield events


class _EngineCollector(Collector):
    """The engine's present state, asked at scrape time."""

    def __init__(self, engine: Engine, sequences: Sequences) -> None:
        self.engine = engine
        self.sequences = sequences

    def collect(self) -> Iterator[Metric]:
        status = self.engine.status()
        for name, text, value in (
            ("ready", "1 while requests are accepted.", float(status.state == "ready")),
            ("group_generation", "Groups of ranks seen since start.", status.generation),
            ("queue_requests", "Requests in the engine.", status.num_requests),
            ("queue_tokens", "Tokens in the engine.", status.num_tokens),
        ):
            yield GaugeMetricFamily(f"megamoe_{name}", text, value=value)
        layer = self.engine.layer
        if layer is not None and layer.attention is not None:
            for name, text, value in (
                ("sequences", "Sequences of attention_pre.", len(self.sequences)),
                ("cache_pages_used", "Pages in use.", self.sequences.pages_used),
                ("cache_pages", "Pages of each cache.", layer.attention.num_pages),
            ):
                yield GaugeMetricFamily(f"megamoe_attention_{name}", text, value=value)


class _LoadCollector(Collector):
    """Skew of the last step's expert load; nothing before there was one."""

    def __init__(self) -> None:
        self.counts: tuple[int, ...] = ()

    def collect(self) -> Iterator[Metric]:
        figures = load_figures(self.counts)
        if figures is None:
            return
        for name, text, value in (
            ("max_over_mean", "Last step: busiest expert / mean.", figures["max_over_mean"]),
            ("gini", "Last step: Gini coefficient of the expert load.", figures["gini"]),
            ("empty_experts", "Last step: experts without a route.", figures["empty"]),
        ):
            yield GaugeMetricFamily(f"megamoe_expert_load_{name}", text, value=value)


class _EnergyWindow:
    """Joules per token over windows of seconds."""

    def __init__(self) -> None:
        self.tokens = 0
        self.points: dict[int, deque[tuple[float, float, int]]] = {}

    def add(self, sample: TelemetrySample) -> None:
        joules = sample.values.get("energy_joules_total")
        if joules is None:
            self.points.pop(sample.rank, None)
            return
        points = self.points.setdefault(sample.rank, deque())
        now = time.monotonic()
        points.append((now, joules, self.tokens))
        while len(points) > 2 and now - points[1][0] >= ENERGY_WINDOW_S:
            points.popleft()

    def joules_per_token(self) -> float | None:
        """Energy of all ranks over their windows, per token; None when it cannot be said."""
        joules = tokens = 0.0
        for points in self.points.values():
            if not points or points[-1][0] - points[0][0] < ENERGY_WINDOW_S:
                return None
            joules += points[-1][1] - points[0][1]
            tokens = max(tokens, points[-1][2] - points[0][2])
        return joules / tokens if tokens > 0 else None


class _EnergyCollector(Collector):
    def __init__(self, window: _EnergyWindow) -> None:
        self.window = window

    def collect(self) -> Iterator[Metric]:
        value = self.window.joules_per_token()
        if value is not None:
            yield GaugeMetricFamily(
                "megamoe_energy_joules_per_token",
                f"Energy of all ranks per token, over the last {ENERGY_WINDOW_S:g} s or more.",
                value=value,
            )


class Metrics:
    """All metrics of one service, in a registry of its own."""

    def __init__(self, engine: Engine, sequences: Sequences) -> None:
        # Twice the series, for times that nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.gpu = _GpuCollector()
        self.energy = _EnergyWindow()
        self.load = _LoadCollector()
        collectors = (
            self.gpu,
            self.load,
            _EngineCollector(engine, sequences),
            _EnergyCollector(self.energy),
        )
        for collector in collectors:
            registry.register(collector)

        # Series by their labels' values, looked up once each: the library's look-up takes longer
        # than an observation, and every request makes a dozen.
        def histogram(
            name: str, text: str, buckets: tuple[float, ...], *labels: str
        ) -> Callable[..., Histogram]:
            made = Histogram(f"megamoe_{name}", text, labels, registry=registry, buckets=buckets)
            return functools.cache(made.labels) if labels else lambda: made

        def counter(name: str, text: str, *labels: str) -> Callable[..., Counter]:
            made = Counter(f"megamoe_{name}", text, labels, registry=registry)
            return functools.cache(made.labels) if labels else lambda: made

        def gauge(name: str, text: str, *labels: str) -> Callable[..., Gauge]:
            return functools.cache(Gauge(f"megamoe_{name}", text, labels, registry=registry).labels)

        self.responses = counter("http_responses", "HTTP answers.", "path", "code")
        self.request_s = histogram(
            "request_seconds", "A request's time, by phase.", _SECONDS, "phase"
        )
        self.step_s = histogram("step_seconds", "A step's time, by phase.", _SECONDS, "phase")
        self.attention_s = histogram(
            "attention_step_seconds", "A step of attention_pre, by phase.", _SECONDS, "phase"
        )
        self.attention_tokens = counter("attention_tokens", "Tokens of attention_pre.")
        self.step_tokens = histogram("step_tokens", "Tokens of a step.", _TOKENS)
        self.step_requests = histogram("step_requests", "Requests that share a step.", _TOKENS[:10])
        self.steps = counter("steps", "Steps executed.", "kind")
        self.rank_tokens = counter("rank_tokens", "Tokens brought by a rank.", "rank")
        self.high_water = gauge(
            "ring_high_water_blocks", "Last step: most blocks in use.", "rank", "ring"
        )
        self.backpressure = counter(
            "ring_backpressure_events", "Waits for a free ring block.", "rank", "ring"
        )
        self.faults = counter("faults", "Faults of the group of ranks.", "kind", "rank")
        self.ipc_rejected = counter("ipc_rejected_messages", "Messages refused.", "reason")
        self.recent: deque[tuple[float, float]] = deque(maxlen=8192)
        """(monotonic time of the answer, total seconds) of recent requests, for the dashboard."""
        engine.observers.step.append(self.on_step)
        engine.observers.telemetry.append(self.on_telemetry)
        engine.observers.fault.append(self.on_fault)
        engine.observers.ipc_rejected.append(lambda reason: self.ipc_rejected(reason).inc())

    def on_step(self, record: StepRecord) -> None:
        """Counts one executed step."""
        if record.model != "moe":
            self.steps(record.model).inc()
            self.attention_tokens().inc(record.num_tokens)
            for phase in ("queue", "host", "kernel"):
                self.attention_s(phase).observe(getattr(record, f"{phase}_s"))
            return
        heartbeat = record.num_requests == 0
        self.steps("heartbeat" if heartbeat else "work").inc()
        if heartbeat:
            return
        self.energy.tokens += record.num_tokens
        for phase in ("queue", "host", "kernel"):
            self.step_s(phase).observe(getattr(record, f"{phase}_s"))
        self.step_tokens().observe(record.num_tokens)
        self.step_requests().observe(record.num_requests)
        for rank, tokens in enumerate(record.rank_tokens):
            self.rank_tokens(str(rank)).inc(tokens)
        self.load.counts = record.expert_counts
        rings = ("l1", "l2")
        for rank, water in enumerate(record.high_water):
            for ring, blocks in zip(rings, water, strict=True):
                self.high_water(str(rank), ring).set(blocks)
        for rank, waits in enumerate(record.backpressure):
            for ring, events in zip(rings, waits, strict=True):
                self.backpressure(str(rank), ring).inc(events)

    def on_request(self, queue_s: float, host_s: float, kernel_s: float, total_s: float) -> None:
        """Counts one answered request."""
        for phase, seconds in zip(
            ("queue", "host", "kernel", "total"), (queue_s, host_s, kernel_s, total_s), strict=True
        ):
            self.request_s(phase).observe(seconds)
        self.recent.append((time.monotonic(), total_s))

    def on_telemetry(self, sample: TelemetrySample) -> None:
        """Keeps a rank's latest reading."""
        self.gpu.samples[sample.rank] = sample
        self.energy.add(sample)

    def on_fault(self, fault: EngineFault) -> None:
        """Counts a fault, and forgets the group's readings: they would go stale."""
        self.faults(fault.kind, str(fault.rank)).inc()
        self.gpu.samples.clear()
        self.energy.points.clear()

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)

    def names(self) -> list[str]:
        """Names of every metric that has been exported so far, for the docs' test."""
        return sorted({family.name for family in itertools.chain(self.registry.collect())})


class CountResponses:
    """ASGI middleware: counts answers by route template and status, never by raw path."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI scope."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "unknown")
                self.metrics.responses(path, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counted)
