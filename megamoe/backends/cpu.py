"""CPU ranks: worker threads over shared memory, the protocol of the GPU kernel phase by phase."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import numpy as np
from torch import Tensor, bfloat16

from megamoe import native
from megamoe.backends.base import Counters, need_same_layer, not_loaded
from megamoe.backends.trace import (
    NOT_TRACED,
    LayerTrace,
    decode_trace,
    event_dtype,
    trace_wanted,
)
from megamoe.errors import GroupBroken, MegaMoeError, PeerTimeout
from megamoe.layout import window_layout
from megamoe.spec import EpConfig, MoESpec
from megamoe.symmetric.base import Rendezvous, SymmetricMemory
from megamoe.symmetric.local import LocalMemory, LocalRendezvous
from megamoe.symmetric.shm import SharedMemory
from megamoe.weights import ExpertWeights, check_expert

__all__ = ["CpuSession", "cpu_shape"]

_TRACE_CAPACITY = 1 << 15
"""Events of a track: a rank has few tracks, and one of them pulls all rows."""
_OPEN_LIMIT_S = 300.0
"""Limit of the first meeting: peers may still be reserving shared memory."""


def cpu_shape(spec: MoESpec, config: EpConfig) -> native.MoEShape:
    """The shape that CPU ranks run; ``config`` may hold zeros."""
    cores = len(os.sched_getaffinity(0))
    units = config.num_workers or max(1, cores // config.num_ranks)
    return native.make_shape(
        spec,
        config.resolved(spec),
        num_units=units,
        num_pullers=1,
        l2_tile_n=native.describe()["cpu_l2_tile_n"],
    )


class CpuSession:
    """A session over CPU ranks (``megamoe.backends.base.Session``)."""

    def __init__(self, spec: MoESpec, config: EpConfig, rendezvous: Rendezvous) -> None:
        """Collective: allocates the window, maps the peers' and meets them.

        Raises:
            SymmetricMemoryError: a rank could not allocate or map; on every rank.
            SpecError: ranks disagree about the layer; on every rank.
        """
        self._spec, self.config = spec, config.resolved(spec)
        shape = cpu_shape(spec, config)
        layout = window_layout(shape)
        need_same_layer(rendezvous, spec, shape)
        memory: SymmetricMemory = (
            LocalMemory(rendezvous)
            if isinstance(rendezvous, LocalRendezvous)
            else SharedMemory(rendezvous)
        )
        self._window = memory.allocate(layout.nbytes)
        self._shape = shape
        self._rank = rendezvous.rank
        clamp = math.inf if spec.swiglu_clamp is None else spec.swiglu_clamp
        self._native: native.CpuSession | None = native.CpuSession(
            shape, rendezvous.rank, list(self._window.bases), clamp, config.timeout_s
        )
        self._traced = trace_wanted()
        if self._traced:
            self._native.enable_trace(_TRACE_CAPACITY)
        self._num_tokens = 0
        self._missing = set(range(spec.experts_per_rank(config.num_ranks) + spec.num_shared))
        self._broken: GroupBroken | None = None
        self._meet(_OPEN_LIMIT_S)

    def load_weights(self, experts: Iterable[ExpertWeights]) -> None:
        """Packs this rank's experts into the layout of the tile functions, one at a time."""
        session = self._open()
        for expert in experts:
            check_expert(self._spec, expert, self.config.num_ranks)
            w1, w2 = expert.w1.cpu().contiguous(), expert.w2.cpu().contiguous()
            s1 = expert.w1_scale.cpu().contiguous() if expert.w1_scale is not None else None
            s2 = expert.w2_scale.cpu().contiguous() if expert.w2_scale is not None else None
            session.load_expert(
                expert.index,
                w1.data_ptr(),
                s1.data_ptr() if s1 is not None else 0,
                w2.data_ptr(),
                s2.data_ptr() if s2 is not None else 0,
            )
            self._missing.discard(expert.index)

    def stage(self, x: Tensor, x_scale: Tensor | None) -> None:
        """Writes (and for FP8 layers quantises) a call's tokens into the own window."""
        session = self._open()
        x = x.contiguous()
        if x.dtype == bfloat16:
            session.stage_bf16(x.data_ptr(), x.shape[0])
        else:
            assert x_scale is not None
            scale = x_scale.contiguous()
            session.stage_fp8(x.data_ptr(), scale.data_ptr(), x.shape[0])
        self._num_tokens = x.shape[0]

    def input_buffers(self) -> tuple[Tensor, Tensor | None] | None:
        """None: the native session copies."""
        return None

    def run_moe(self, topk_idx: Tensor, topk_weight: Tensor, out: Tensor) -> None:
        """Collective: runs the staged tokens."""
        session = self._open()
        if self._missing:
            raise not_loaded(self._missing)
        if session.faulted:
            raise self._timeout()
        idx, weight = topk_idx.contiguous(), topk_weight.contiguous()
        assert out.is_contiguous()
        assert idx.shape[0] == self._num_tokens == out.shape[0]
        if not session.run(self._num_tokens, idx.data_ptr(), weight.data_ptr(), out.data_ptr()):
            raise self._timeout()

    def check(self) -> None:
        """Nothing: no call outlasts ``run_moe``."""

    def time_calls(self) -> None:
        """Nothing: on a CPU the caller's clock tells the same."""

    def call_seconds(self) -> float | None:
        """Not measured."""
        return None

    def trace_events(self) -> LayerTrace:
        """Events of the last call; with ``MEGAMOE_TRACE=1``."""
        session = self._open()
        if not self._traced:
            raise MegaMoeError(NOT_TRACED)
        recorded, events = session.trace()
        tracks = np.frombuffer(recorded, np.uint32).reshape(
            -1, len(native.describe()["trace_roles"])
        )
        size = (*tracks.shape, _TRACE_CAPACITY, event_dtype().itemsize)
        return decode_trace(
            tracks,
            np.frombuffer(events, np.uint8).reshape(size),
            self._shape,
            rank=self._rank,
            backend="cpu",
            num_tokens=self._num_tokens,
        )

    def counters(self) -> Counters:
        """Figures since the session was opened or cleared."""
        session = self._open()
        stats = session.stats()
        blocked: dict[str, int] = stats["blocked"]
        return Counters(
            backend="cpu",
            device=session.isa,
            epoch=session.epoch,
            num_units=self._shape.num_units,
            window_bytes=self._window.nbytes,
            ring_l1_blocks=self._shape.ring_l1,
            ring_l2_blocks=self._shape.ring_l2,
            high_water_l1=stats["high_water_l1"],
            high_water_l2=stats["high_water_l2"],
            backpressure_events=blocked["l1_empty"] + blocked["l2_empty"],
            blocked=blocked,
        )

    def clear_counters(self) -> None:
        """Starts the high-water marks and event counts again from zero."""
        self._open().clear_stats()

    def reset(self, limit_s: float) -> None:
        """Collective: no call runs any more, then state is cleared, then all go on."""
        session = self._open()
        self._meet(limit_s)
        session.clear_state()
        self._meet(limit_s)

    def close(self) -> None:
        """Frees weights and windows; a peer's mapping of this window stays valid for the peer."""
        self._native = None
        self._window.close()

    def _open(self) -> native.CpuSession:
        if self._native is None:
            raise MegaMoeError("the layer is closed: open a new one")
        if self._broken is not None:
            raise self._broken
        return self._native

    def _meet(self, limit_s: float) -> None:
        missing = self._open().host_barrier(limit_s)
        if missing:
            self._broken = GroupBroken(tuple(missing), limit_s)
            raise self._broken

    def _timeout(self) -> PeerTimeout:
        record = native.fault_record(self._open().fault())
        return PeerTimeout(record, self.config.timeout_s)
