"""What an engine says of itself: steps, sensors, faults, its state, and who hears of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

__all__ = [
    "EngineFault",
    "EngineStatus",
    "Observers",
    "Span",
    "State",
    "StepRecord",
    "TelemetrySample",
]

State = Literal["starting", "ready", "draining", "failed"]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of work in a step's timeline, relative to the step's begin.

    Attributes:
        rank: where.
        unit: CTA (GPU) or worker thread (CPU); -1 for the rank's host thread.
        role: what it did.
        start_us: begin.
        length_us: duration.
    """

    rank: int
    unit: int
    role: str
    start_us: float
    length_us: float


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one executed step reported.

    Attributes:
        step: number within its group of ranks, from 1.
        num_requests: requests that shared it; 0 for a heartbeat.
        num_tokens: tokens over all ranks.
        queue_s: longest wait of its requests before the step began.
        host_s: step time outside the layer.
        kernel_s: slowest rank's time inside the layer.
        rank_tokens: tokens that each rank brought.
        expert_counts: routes per expert, or empty when unknown.
        high_water: per rank, most blocks in use at once in the (L1, L2) ring; empty where the
            ranks do not count.
        backpressure: per rank, waits for a free block in the (L1, L2) ring during the step; empty
            as above.
        spans: timeline of the step.
        started: when it began, ``time.monotonic()`` of this machine.
        model: whose step it was.
    """

    step: int
    num_requests: int
    num_tokens: int
    queue_s: float
    host_s: float
    kernel_s: float
    rank_tokens: tuple[int, ...]
    expert_counts: tuple[int, ...] = ()
    high_water: tuple[tuple[int, int], ...] = ()
    backpressure: tuple[tuple[int, int], ...] = ()
    spans: tuple[Span, ...] = ()
    started: float = 0.0
    model: str = "moe"


class TelemetrySample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reading of a rank's sensors; None is "cannot be read", never zero.

    The fields mirror ``megamoe.telemetry``, in base units.
    """

    rank: int
    device: str = ""
    unavailable: str = ""
    values: dict[str, float] = msgspec.field(default_factory=dict)
    clocks_events: dict[str, bool] | None = None


class EngineFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a group of ranks stopped serving.

    Attributes:
        kind: ``died``, ``timeout``, ``stuck``, ``mismatch`` (a heartbeat gave other bits),
            ``error``.
        rank: the rank at fault.
        message: one sentence for the client.
        record: the fault record of the bounded wait, if there is one.
    """

    kind: Literal["died", "timeout", "stuck", "mismatch", "error"]
    rank: int
    message: str
    record: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class EngineStatus:
    """Where the engine stands now.

    Attributes:
        state: only ``ready`` accepts requests.
        reason: why it is not ready; empty when it is.
        generation: groups of ranks seen so far; a restart adds one.
        num_requests: requests in the engine.
        num_tokens: their tokens.
        last_fault: the most recent fault, also after recovery.
    """

    state: State
    reason: str = ""
    generation: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    last_fault: EngineFault | None = None


@dataclass(slots=True)
class Observers:
    """Callbacks of interest to metrics and dashboard; they must not raise or block."""

    step: list[Callable[[StepRecord], None]] = field(default_factory=list)
    telemetry: list[Callable[[TelemetrySample], None]] = field(default_factory=list)
    fault: list[Callable[[EngineFault], None]] = field(default_factory=list)
    ipc_rejected: list[Callable[[str], None]] = field(default_factory=list)
