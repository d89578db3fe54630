"""The session that both backends implement, and what they share."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megamoe import native
from megamoe.backends.trace import LayerTrace
from megamoe.errors import BackendUnavailable, MegaMoeError, SpecError
from megamoe.spec import EpConfig, MoESpec
from megamoe.symmetric.base import Rendezvous, agree
from megamoe.weights import ExpertWeights

__all__ = [
    "Counters",
    "Session",
    "device_name",
    "hopper_available",
    "need_same_layer",
    "not_loaded",
]


@dataclass(frozen=True)
class Counters:
    """Figures of a session since it was opened or its counters were cleared.

    Attributes:
        backend: ``"cpu"`` or ``"cuda"``.
        device: instruction set or GPU name.
        epoch: calls finished since the last reset.
        num_units: math workers or CTAs.
        window_bytes: symmetric memory of this rank.
        ring_l1_blocks, ring_l2_blocks: capacities.
        high_water_l1, high_water_l2: the most blocks in use at once; None on GPUs, where the kernel
            does not count.
        backpressure_events: waits for a free ring slot that had to wait; None as above.
        blocked: waits that had to wait, by tag.
    """

    backend: str
    device: str
    epoch: int
    num_units: int
    window_bytes: int
    ring_l1_blocks: int
    ring_l2_blocks: int
    high_water_l1: int | None
    high_water_l2: int | None
    backpressure_events: int | None
    blocked: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def hopper_available() -> bool:
    """Whether the current CUDA device runs the kernels: compute capability 9.0."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def device_name(backend: str) -> str:
    """What a tuned configuration belongs to: the GPU's name, or instruction set and cores.

    Raises:
        BackendUnavailable: ``"cuda"`` without a Hopper GPU.
    """
    if backend == "cuda":
        if not hopper_available():
            raise BackendUnavailable("the CUDA backend needs a Hopper GPU (compute capability 9.0)")
        return str(torch.cuda.get_device_name())
    return f"cpu {native.describe()['cpu_isas'][-1]}, {len(os.sched_getaffinity(0))} cores"


def need_same_layer(rendezvous: Rendezvous, spec: MoESpec, shape: native.MoEShape) -> None:
    """Collective: checks that every rank opens the same layer, before anything is allocated.

    Raises:
        SpecError: on every rank, if any two differ; says in what.
    """
    mine = {name: getattr(shape, name) for name in native.describe()["shape_fields"]}
    mine["swiglu_clamp"] = spec.swiglu_clamp
    said = agree(rendezvous, "opening the layer", mine)
    differ = [
        f"{name} = {', '.join(str(theirs[name]) for theirs in said)}"
        for name in mine
        if any(theirs[name] != mine[name] for theirs in said)
    ]
    if differ:
        raise SpecError(
            f"ranks disagree about the layer's shape or configuration (by rank: "
            f"{'; '.join(differ)}): pass the same MoESpec and EpConfig on every rank, and set "
            "num_workers where ranks see different cores"
        )


def not_loaded(missing: Collection[int]) -> MegaMoeError:
    """What a call without all weights raises; ``missing`` are places among the rank's experts."""
    some = ", ".join(map(str, sorted(missing)[:8]))
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return MegaMoeError(
        f"{len(missing)} of this rank's experts are not loaded (index {some}{more}): call "
        "load_weights first, with all of them"
    )


class Session(Protocol):
    """One rank's part of a group that runs one layer. Calls marked collective run on all ranks.

    Attributes:
        config: how the group runs it, every 0 replaced by what was chosen.
    """

    config: EpConfig

    def load_weights(self, experts: Iterable[ExpertWeights]) -> None:
        """Takes this rank's experts one at a time; each may be freed when the next is asked for."""
        ...

    def stage(self, x: Tensor, x_scale: Tensor | None) -> None:
        """Puts a call's tokens into the window: BF16 ``[T,H]``, or e4m3 with FP32 ``[T,H/128]``."""
        ...

    def input_buffers(self) -> tuple[Tensor, Tensor | None] | None:
        """Where ``stage`` puts tokens, for callers that write there themselves; None on CPUs."""
        ...

    def run_moe(self, topk_idx: Tensor, topk_weight: Tensor, out: Tensor) -> None:
        """Collective: runs the staged tokens. int32, FP32 ``[T,K]``; ``out`` BF16 ``[T,H]``.

        Raises:
            PeerTimeout: a wait expired on any rank. The session refuses calls until ``reset``.
        """
        ...

    def check(self) -> None:
        """Waits for enqueued calls.

        Raises:
            PeerTimeout: as ``run_moe``.
        """
        ...

    def time_calls(self) -> None:
        """From now on every call is timed, where the device can."""
        ...

    def call_seconds(self) -> float | None:
        """Device time of the last call; None where it is not measured."""
        ...

    def trace_events(self) -> LayerTrace:
        """What every role did in the last call.

        Raises:
            MegaMoeError: ``MEGAMOE_TRACE`` was not set when the session was opened.
        """
        ...

    def counters(self) -> Counters:
        """Figures since the session was opened or cleared."""
        ...

    def clear_counters(self) -> None:
        """Starts the high-water marks and event counts again from zero."""
        ...

    def reset(self, limit_s: float) -> None:
        """Collective: clears a faulted group.

        Raises:
            GroupBroken: a rank did not come within ``limit_s`` seconds.
        """
        ...

    def close(self) -> None:
        """Frees weights and windows. Not collective."""
        ...
