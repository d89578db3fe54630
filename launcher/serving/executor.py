"""A rank's share of a step: rows of the arena in, through the layer, rows of the arena out."""

from __future__ import annotations

import logging
import time
import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from launcher.serving.routing import SteadyRouter
from megamoe.backends.trace import stretches, trace_wanted
from megamoe.layer import MoELayer
from service import ipc
from service.arena import Arena
from service.batching import rank_rows
from service.reports import Span

if TYPE_CHECKING:
    from megamoe.router import Router

__all__ = ["Executor"]

_log = logging.getLogger("megamoe.rank")


class Executor:
    """A rank's share of a step.

    Args:
        layer: opened, its weights loaded.
        arena: where requests' tensors lie.
        router: the layer's, or None.
        device: where the layer's tensors live.
    """

    def __init__(self, layer: MoELayer, arena: Arena, router: Router | None, device: str) -> None:
        self.layer = layer
        self.router = None if router is None else SteadyRouter(router, device)
        self.device = device
        self.spec = layer.spec
        self.rank = layer.rank
        self.num_ranks = layer.config.num_ranks
        self.bytes = torch.frombuffer(arena.view, dtype=torch.uint8)
        if device != "cpu":
            layer.time_calls()
            _pin(self.bytes)
        self.heartbeat = self._heartbeat_input()

    def _heartbeat_input(self) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        ramp = torch.arange(spec.hidden, dtype=torch.float32) * 0.37 + self.rank
        ids = (torch.arange(spec.topk) * spec.num_experts // spec.topk)[None].to(torch.int32)
        weights = torch.full((1, spec.topk), 1.0 / spec.topk)
        x = torch.sin(ramp)[None].to(torch.bfloat16)
        return x.to(self.device), ids.to(self.device), weights.to(self.device)

    def view(self, offset: int, rows: range, columns: int, dtype: torch.dtype) -> Tensor:
        """Rows of a tensor in the arena, ``[len(rows), columns]``."""
        width = columns * dtype.itemsize
        begin, end = offset + rows.start * width, offset + rows.stop * width
        return self.bytes[begin:end].view(dtype).view(len(rows), columns)

    def run(self, plan: ipc.Plan) -> ipc.RankReport:
        """Executes this rank's rows of a plan."""
        spans = []
        begun = time.monotonic()
        parts: list[tuple[ipc.PlanItem, range]] = []
        total = sum(item.num_tokens for item in plan.items)
        mine = rank_rows(total, self.num_ranks, self.rank)
        first = 0
        for item in plan.items:
            rows = range(max(mine.start, first), min(mine.stop, first + item.num_tokens))
            if len(rows):
                parts.append((item, range(rows.start - first, rows.stop - first)))
            first += item.num_tokens
        scale: Tensor | None = None
        counts: list[int] = []
        if plan.items:
            hidden, scale, ids, weights = self._gather(parts, plan.fp8)
        else:
            hidden, ids, weights = self.heartbeat
        gathered = time.monotonic()
        self.layer.clear_counters()
        y = self.layer.run(hidden if scale is None else (hidden, scale), ids, weights)
        ran = time.monotonic()
        kernel_s = self.layer.call_seconds()
        checksum = 0
        if plan.items:
            self._scatter(parts, y)
            counts = self._count_routes(parts)
            if self.device != "cpu":
                torch.cuda.current_stream().synchronize()
        else:
            checksum = zlib.crc32(y.cpu().view(torch.uint8).numpy().tobytes())
        ended = time.monotonic()
        for role, start, stop in (
            ("gather", begun, gathered),
            ("layer", gathered, ran),
            ("scatter", ran, ended),
        ):
            spans.append(Span(self.rank, -1, role, (start - begun) * 1e6, (stop - start) * 1e6))
        spans += self._device_spans((gathered - begun) * 1e6)
        counters = self.layer.counters()
        return ipc.RankReport(
            rank=self.rank,
            step=plan.step,
            kernel_s=ran - gathered if kernel_s is None else kernel_s,
            num_tokens=hidden.shape[0],
            checksum=checksum,
            expert_counts=counts,
            high_water=_both(counters.high_water_l1, counters.high_water_l2),
            backpressure=_both(counters.blocked.get("l1_empty"), counters.blocked.get("l2_empty")),
            spans=spans,
        )

    def _device_spans(self, offset_us: float) -> list[Span]:
        """What each CTA or worker did in the last call; with ``MEGAMOE_TRACE=1``."""
        if not trace_wanted():
            return []
        return [
            Span(self.rank, unit, kind, offset_us + begin_us, length_us)
            for unit, kind, begin_us, length_us in stretches(self.layer.trace())
        ]

    def _gather(
        self, parts: list[tuple[ipc.PlanItem, range]], fp8: bool
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Activations, their scales, routes and weights, on the device or on their way to it."""
        spec = self.spec
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        hidden: list[Tensor] = []
        scales: list[Tensor] = []
        ids: list[Tensor] = []
        weights: list[Tensor] = []
        for item, rows in parts:
            at = item.layout
            hidden.append(self.view(at.hidden, rows, spec.hidden, dtype))
            if fp8:
                scales.append(self.view(at.scales, rows, spec.hidden // 128, torch.float32))
            ids.append(self.view(at.topk_ids, rows, spec.topk, torch.int32))
            weights.append(self.view(at.topk_weights, rows, spec.topk, torch.float32))
        x = _joined(hidden, spec.hidden, dtype, self.device)
        x_scales = None
        if fp8:
            x_scales = _joined(scales, spec.hidden // 128, torch.float32, self.device)
        first = 0
        for (item, rows), item_ids, item_weights in zip(parts, ids, weights, strict=True):
            if not item.routed:
                part = slice(first, first + len(rows))
                wide = _wide(x[part], None if x_scales is None else x_scales[part])
                assert self.router is not None
                for mine, chosen in zip((item_ids, item_weights), self.router(wide), strict=True):
                    mine.copy_(chosen)
            first += len(rows)
        return (
            x,
            x_scales,
            _joined(ids, spec.topk, torch.int32, self.device),
            _joined(weights, spec.topk, torch.float32, self.device),
        )

    def _count_routes(self, parts: list[tuple[ipc.PlanItem, range]]) -> list[int]:
        """Routes of these rows per expert; on the CPU, where the arena is."""
        spec = self.spec
        ids = [
            self.view(item.layout.topk_ids, rows, spec.topk, torch.int32) for item, rows in parts
        ]
        routes = _joined(ids, spec.topk, torch.int32, "cpu")
        return torch.bincount(routes[routes >= 0], minlength=spec.num_experts).tolist()

    def _scatter(self, parts: list[tuple[ipc.PlanItem, range]], y: Tensor) -> None:
        """Enqueues the copies of the output; the caller waits for them."""
        at = 0
        for item, rows in parts:
            out = self.view(item.layout.output, rows, self.spec.hidden, torch.bfloat16)
            out.copy_(y[at : at + len(rows)], non_blocking=True)
            at += len(rows)


def _both(l1: int | None, l2: int | None) -> tuple[int, int] | None:
    """A pair of counters; None where the backend does not count."""
    return None if l1 is None or l2 is None else (l1, l2)


def _wide(x: Tensor, scales: Tensor | None) -> Tensor:
    """What the router looks at: FP8 activations widened to BF16."""
    if scales is None:
        return x
    values = x.float().view(x.shape[0], -1, 128) * scales[:, :, None]
    return values.view(x.shape).to(torch.bfloat16)


def _joined(tensors: list[Tensor], columns: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows [n, columns] one below the other; on the CPU one piece alone stays where it lies."""
    if len(tensors) == 1 and device == "cpu":
        return tensors[0]
    rows = sum(len(t) for t in tensors)
    # As bytes: the CPU has no copy of e4m3.
    whole = torch.empty((rows, columns * dtype.itemsize), dtype=torch.uint8, device=device)
    at = 0
    for t in tensors:
        whole[at : at + len(t)].copy_(t.view(torch.uint8), non_blocking=True)
        at += len(t)
    return whole.view(dtype)


def _pin(memory: Tensor) -> None:
    """Locks pages for the copies of a GPU, which are several times slower without."""
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        _log.warning("requests' memory is not pinned (CUDA error %d): copies are slower", status)
