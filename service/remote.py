"""The engine of the HTTP process: requests over a Unix socket and shared memory to the ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from service import ipc
from service.arena import (
    ATTENTION_OUTPUTS,
    Arena,
    attention_parts,
    layout_of,
    moved,
)
from service.engine import (
    AttentionRequest,
    AttentionResult,
    EngineBusy,
    EngineUnavailable,
    LayerInfo,
    MoERequest,
    MoEResult,
    Segments,
)
from service.group import Group, Waiting
from service.keeper import GroupKeeper

__all__ = ["RemoteEngine"]


class RemoteEngine(GroupKeeper):
    """``engine.Engine`` over a group of rank processes. Lives on one event loop."""

    _next_request = 0

    async def run_moe(self, request: MoERequest) -> MoEResult:
        """Executes one request; see ``Engine``."""
        group, layer, arena = self._enter(request.num_tokens)
        layout = layout_of(request, layer)
        layout = moved(layout, self._allocate(arena, layout.nbytes))
        _put(arena, layout.hidden, request.hidden)
        for offset, data in (
            (layout.scales, request.scales),
            (layout.topk_ids, request.topk_ids),
            (layout.topk_weights, request.topk_weights),
        ):
            if data is not None:
                _put(arena, offset, Segments([data]))

        def submit(number: int, now: float) -> ipc.Submit:
            return ipc.Submit(
                request=number,
                num_tokens=request.num_tokens,
                fp8=request.scales is not None,
                routed=request.topk_ids is not None,
                layout=layout,
                submitted=now,
                deadline=request.deadline,
            )

        block = (layout.begin, layout.nbytes)
        waiting, done = await self._execute(group, block, request.num_tokens, submit)
        view, times = self._times(group, waiting, done)
        rows = request.num_tokens
        chosen = request.routes and request.topk_ids is None
        ids_bytes = rows * layer.topk * 4
        return MoEResult(
            output=view(layout.output, rows * layer.hidden * 2),
            topk_ids=bytes(view(layout.topk_ids, ids_bytes)) if chosen else None,
            topk_weights=bytes(view(layout.topk_weights, ids_bytes)) if chosen else None,
            high_water=tuple(done.high_water),
            release=lambda: group.free(waiting),
            **times,
        )

    async def run_attention(self, request: AttentionRequest) -> AttentionResult:
        """Executes one attention-pre request; see ``Engine``."""
        group, layer, arena = self._enter(request.num_tokens)
        if layer.attention is None or request.generation != self._generation:
            raise EngineUnavailable("the group of ranks was replaced meanwhile: its caches are new")
        parts, nbytes = attention_parts(request, layer.attention)
        begin = self._allocate(arena, nbytes)
        parts = {name: (begin + at, size) for name, (at, size) in parts.items()}
        _put(arena, parts["x"][0], request.hidden)
        _put(arena, parts["residual_in"][0], request.residual)
        if request.positions is not None:
            _put(arena, parts["positions"][0], Segments([request.positions]))
        if request.upload is not None:
            _put(arena, parts["upload"][0], request.upload[1])

        def submit(number: int, now: float) -> ipc.SubmitAttention:
            return ipc.SubmitAttention(
                request=number,
                num_tokens=request.num_tokens,
                new_tokens=request.new_tokens,
                context_lens=request.context_lens,
                block_table=request.block_table,
                upload=request.upload[0] if request.upload is not None else [],
                parts=parts,
                submitted=now,
                deadline=request.deadline,
            )

        waiting, done = await self._execute(group, (begin, nbytes), request.num_tokens, submit)
        view, times = self._times(group, waiting, done)
        return AttentionResult(
            tensors={name: view(*parts[name]) for name in ATTENTION_OUTPUTS if name in parts},
            release=lambda: group.free(waiting),
            **times,
        )

    def _enter(self, num_tokens: int) -> tuple[Group, LayerInfo, Arena]:
        """The group that takes a request of so many tokens now.

        Raises:
            EngineUnavailable: none does.
            EngineBusy: the queue is full.
        """
        status = self.status()
        group = self._group
        if status.state != "ready" or group is None or group.arena is None or group.layer is None:
            raise EngineUnavailable(f"not ready ({status.state}): {status.reason}")
        if status.num_requests >= self.config.queue_requests:
            raise EngineBusy(f"{status.num_requests} requests wait already: retry later")
        limit = self._queue_tokens(group.layer)
        if status.num_tokens + num_tokens > limit:
            raise EngineBusy(
                f"{status.num_tokens} tokens wait already and this request has "
                f"{num_tokens}, at most {limit} may wait: retry later"
            )
        return group, group.layer, group.arena

    @staticmethod
    def _allocate(arena: Arena, nbytes: int) -> int:
        begin = arena.allocate(nbytes)
        if begin is None:
            raise EngineBusy(f"no room for {nbytes} bytes of tensors: retry later")
        return begin

    async def _execute(
        self,
        group: Group,
        block: tuple[int, int],
        num_tokens: int,
        submit: Callable[[int, float], ipc.ToRank],
    ) -> tuple[Waiting, ipc.Done]:
        """Hands a request to rank 0 and waits for its answer."""
        self._next_request += 1
        number, now = self._next_request, time.monotonic()
        waiting = Waiting(*block, num_tokens, now, self._loop.create_future())
        group.waiting[number] = waiting
        self._send(group, 0, submit(number, now))
        try:
            return waiting, await waiting.future
        except asyncio.CancelledError:
            if number in group.waiting:
                # The ranks may be writing into the block: it is freed when they have answered.
                self._send(group, 0, ipc.Cancel(number))
            elif not waiting.future.cancelled() and waiting.future.exception() is None:
                group.free(waiting)  # answered in the moment in which its client left
            raise

    @staticmethod
    def _times(
        group: Group, waiting: Waiting, done: ipc.Done
    ) -> tuple[Callable[[int, int], memoryview], dict[str, Any]]:
        """How to look into the arena, and the fields that all results share."""
        total = time.monotonic() - waiting.submitted
        queue = max(0.0, done.started - waiting.submitted)
        arena = group.arena
        if arena is None:  # the group ended between its answer and this line
            raise EngineUnavailable("the group of ranks ended while the answer was being read")
        times = {
            "queue_s": queue,
            "kernel_s": done.kernel_s,
            "host_s": max(0.0, total - queue - done.kernel_s),
            "step": done.step,
            "step_tokens": done.step_tokens,
        }
        return lambda at, nbytes: arena.view[at : at + nbytes], times


def _put(arena: Arena, offset: int, data: Segments) -> None:
    data.copy_to(arena.view[offset : offset + data.nbytes])
