"""The page at ``/``: what the group does now, by server-sent events once a second.

All assets are files beside this module; the page loads nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from service.config import ServiceConfig
from service.engine import Engine, LayerInfo
from service.errors import ServiceError, busy
from service.metrics import Metrics, load_figures
from service.reports import EngineFault, StepRecord, TelemetrySample
from service.sequences import Sequences
from service.trace import chrome_trace

__all__ = ["Dashboard"]

PERIOD_S: Final = 1.0
HISTORY: Final = 300
TRACED_STEPS: Final = 100
TRACED_SAMPLES: Final = 1000
_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
_POLICY: Final = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
_GAUGES: Final = ("power_watts", "power_limit_watts", "sm_clock_hertz", "temperature_celsius")


def _files() -> dict[str, tuple[bytes, str]]:
    found = {}
    for path in sorted(_STATIC.rglob("*")):
        if path.is_file() and path.suffix in _TYPES:
            found[path.relative_to(_STATIC).as_posix()] = (path.read_bytes(), _TYPES[path.suffix])
    return found


class Dashboard:
    """Collects what the page shows, and serves the page."""

    def __init__(
        self, config: ServiceConfig, engine: Engine, metrics: Metrics, sequences: Sequences
    ) -> None:
        self.config = config
        self.engine = engine
        self.metrics = metrics
        self.sequences = sequences
        self.files = _files()
        self.points: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self.faults: deque[dict[str, Any]] = deque(maxlen=20)
        self.step: StepRecord | None = None
        self.attention_step: StepRecord | None = None
        self.samples: dict[int, TelemetrySample] = {}
        self.traced: deque[StepRecord] = deque(maxlen=TRACED_STEPS)
        self.traced_samples: deque[tuple[float, TelemetrySample]] = deque(maxlen=TRACED_SAMPLES)
        self.tokens = self.steps = 0
        self.clients = 0
        self.closing = asyncio.Event()
        engine.observers.step.append(self._on_step)
        engine.observers.telemetry.append(self._on_telemetry)
        engine.observers.fault.append(self._on_fault)

    def _on_step(self, record: StepRecord) -> None:
        if record.model != "moe":
            self.attention_step = record
        # A heartbeat is shown only until there is work to show.
        elif record.num_requests or self.step is None or not self.step.num_requests:
            self.step = record
        self.traced.append(record)
        if record.num_requests:
            self.tokens += record.num_tokens
            self.steps += 1

    def _on_telemetry(self, sample: TelemetrySample) -> None:
        self.samples[sample.rank] = sample
        self.traced_samples.append((time.monotonic(), sample))

    def _on_fault(self, fault: EngineFault) -> None:
        self.faults.appendleft({"time": time.time(), **msgspec.to_builtins(fault)})
        self.samples.clear()
        self.step = self.attention_step = None

    def sample(self) -> dict[str, Any]:
        """One point of the charts, over the last period; adds it to the history."""
        now = time.monotonic()
        recent = sorted(total for at, total in self.metrics.recent if now - at <= PERIOD_S)
        status = self.engine.status()

        def percentile(share: float) -> float | None:
            return recent[min(len(recent) - 1, int(share * len(recent)))] * 1e3 if recent else None

        ranks = sorted(self.samples)
        point: dict[str, Any] = {
            "time": time.time(),
            "queue_requests": status.num_requests,
            "queue_tokens": status.num_tokens,
            "requests": len(recent),
            "tokens": self.tokens,
            "steps": self.steps,
            "p50_ms": percentile(0.50),
            "p99_ms": percentile(0.99),
            "throttled": any(
                active and reason not in ("gpu_idle", "applications_clocks_setting")
                for rank in ranks
                for reason, active in (self.samples[rank].clocks_events or {}).items()
            ),
        }
        for name in _GAUGES:
            point[name] = [self.samples[rank].values.get(name) for rank in ranks]
        self.tokens = self.steps = 0
        self.points.append(point)
        return point

    def state(self) -> dict[str, Any]:
        """Everything on the page that is not a time series."""
        status = self.engine.status()
        layer = self.engine.layer
        step = self.step
        counts = step.expert_counts if step is not None else ()
        return {
            "status": {
                "state": status.state,
                "reason": status.reason,
                "generation": status.generation,
            },
            "layer": msgspec.to_builtins(layer) if layer is not None else None,
            "step": msgspec.to_builtins(step) if step is not None else None,
            "load": load_figures(counts),
            "attention": self._attention(layer),
            "telemetry": [msgspec.to_builtins(self.samples[rank]) for rank in sorted(self.samples)],
            "faults": list(self.faults),
        }

    def _attention(self, layer: LayerInfo | None) -> dict[str, Any] | None:
        """What the panel of ``attention_pre`` shows; None without such a layer."""
        if layer is None or layer.attention is None:
            return None
        return {
            "step": msgspec.to_builtins(self.attention_step) if self.attention_step else None,
            "sequences": len(self.sequences),
            "pages_used": self.sequences.pages_used,
            "pages": layer.attention.num_pages,
        }

    async def run(self) -> None:
        """Samples once a period until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.sample()

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Runs the sampler while the app runs."""
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            task.cancel()

    async def _events(self) -> AsyncIterator[bytes]:
        self.clients += 1
        try:
            yield _event("history", list(self.points))
            sent = self.points[-1]["time"] if self.points else 0.0
            yield _event("state", self.state())
            while not self.closing.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.closing.wait(), PERIOD_S)
                for point in [p for p in self.points if p["time"] > sent]:
                    sent = point["time"]
                    yield _event("point", point)
                yield _event("state", self.state())
        finally:
            self.clients -= 1

    def router(self) -> APIRouter:
        """The page, its assets and its event stream."""
        router = APIRouter(include_in_schema=False)

        @router.get("/")
        async def page() -> Response:
            return self._file("index.html")

        @router.get("/static/{name:path}")
        async def asset(name: str) -> Response:
            return self._file(name)

        @router.get("/trace")
        async def trace() -> Response:
            steps, samples = list(self.traced), list(self.traced_samples)
            # With MEGAMOE_TRACE=1 seconds of work: requests do not wait for it.
            made = await asyncio.to_thread(
                lambda: msgspec.json.encode(chrome_trace(steps, samples))
            )
            return Response(
                made,
                media_type="application/json",
                headers={"content-disposition": 'attachment; filename="megamoe-trace.json"'},
            )

        @router.get("/events")
        async def events() -> Response:
            if self.clients >= self.config.event_clients:
                raise busy(f"{self.clients} dashboards are open, at most that many are served")
            return StreamingResponse(
                self._events(),
                media_type="text/event-stream",
                headers={"cache-control": "no-store"},
            )

        return router

    def _file(self, name: str) -> Response:
        if name not in self.files:
            raise ServiceError(404, f"no such path: /static/{name[:80]}")
        content, kind = self.files[name]
        return Response(content, media_type=kind, headers=_POLICY)


def _event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
