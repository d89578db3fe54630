"""The engine of the HTTP process: a group of ranks behind a Unix socket and shared memory.

It also guards the group: it knows every rank's process, sees it die at once (pidfd), sees it
stop (no sign of life), and sees the group stand still (no step). Then every request in flight is
answered with the reason, and what is left of the group is killed, so that torchrun starts anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import zmq

from service import ipc
from service.arena import Arena, ArenaError, Layout, arena_bytes, layout_of, moved
from service.config import ServiceConfig
from service.engine import (
    EngineBusy,
    EngineFault,
    EngineStatus,
    EngineUnavailable,
    LayerInfo,
    MoERequest,
    MoEResult,
    Observers,
    RequestExpired,
    State,
)

__all__ = ["RemoteEngine"]

_log = logging.getLogger("megamoe.service")
SILENCE_S: Final = 3.0
"""A rank that gave no sign of life for so long is stopped."""
GRACE_S: Final = 1.0
"""After a fault, ranks have so long to end by themselves."""
_ACTIONS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}


@dataclass(slots=True)
class _Waiting:
    """A request in the engine."""

    layout: Layout
    num_tokens: int
    submitted: float
    chosen: bool  # the router chooses the routes
    future: asyncio.Future[ipc.Done]


@dataclass(slots=True)
class _Rank:
    identity: bytes
    pid: int
    pidfd: int
    alive_at: float


@dataclass
class _Group:
    """One start of the ranks."""

    id: str
    num_ranks: int
    ranks: dict[int, _Rank] = field(default_factory=dict)
    layer: LayerInfo | None = None
    arena: Arena | None = None
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    progress_at: float = 0.0
    stepping: bool = False  # at least one step ended
    last_step: int = 0


class RemoteEngine:
    """``engine.Engine`` over a group of rank processes. Lives on one event loop.

    Args:
        config: limits of the queue.
        run_dir: private directory of the socket.
        on_drain: called when a rank asks for a drain (SIGTERM to torchrun's ranks).
        on_fatal: called when no restart can help.
    """

    def __init__(
        self,
        config: ServiceConfig,
        run_dir: Path,
        on_drain: Callable[[], None] = lambda: None,
        on_fatal: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.observers = Observers()
        self._on_drain = on_drain
        self._on_fatal = on_fatal
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = ipc.bind(self._context, ipc.engine_address(run_dir))
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._pump)
        self._group: _Group | None = None
        self._retired: set[str] = set()
        self._generation = 0
        self._draining = False
        self._reason = "waiting for the ranks to start"
        self._failed = False
        self._last_fault: EngineFault | None = None
        self._next_request = 0
        self._layer: LayerInfo | None = None
        self._watch = self._loop.create_task(self._watchdog())

    # -------------------------------------------------------------- Engine

    @property
    def layer(self) -> LayerInfo | None:
        """The layer of the present or the last group."""
        return self._layer

    def status(self) -> EngineStatus:
        """The present state."""
        group = self._group
        waiting = group.waiting.values() if group else ()
        state: State = "ready"
        reason = ""
        if self._draining:
            state, reason = "draining", "the service is shutting down"
        elif group is None:
            state, reason = "failed" if self._failed else "starting", self._reason
        elif not group.stepping:
            state, reason = "starting", self._reason
        elif time.monotonic() - group.progress_at > self.config.progress_timeout_s:
            state, reason = "failed", "no step ended lately"
        return EngineStatus(
            state=state,
            reason=reason,
            generation=self._generation,
            num_requests=len(waiting),
            num_tokens=sum(w.num_tokens for w in waiting),
            last_fault=self._last_fault,
        )

    async def run_moe(self, request: MoERequest) -> MoEResult:
        """Executes one request; see ``Engine``."""
        status = self.status()
        group = self._group
        if status.state != "ready" or group is None or group.arena is None or group.layer is None:
            raise EngineUnavailable(f"not ready ({status.state}): {status.reason}")
        if status.num_requests >= self.config.queue_requests:
            raise EngineBusy(f"{status.num_requests} requests wait already: retry later")
        limit = self._queue_tokens(group.layer)
        if status.num_tokens + request.num_tokens > limit:
            raise EngineBusy(
                f"{status.num_tokens} tokens wait already and this request has "
                f"{request.num_tokens}, at most {limit} may wait: retry later"
            )
        layout = layout_of(request, group.layer)
        begin = group.arena.allocate(layout.nbytes)
        if begin is None:
            raise EngineBusy(f"no room for {layout.nbytes} bytes of tensors: retry later")
        layout = moved(layout, begin)
        self._write(group.arena, layout, request)
        now = time.monotonic()
        self._next_request += 1
        number = self._next_request
        waiting = _Waiting(
            layout, request.num_tokens, now, request.topk_ids is None, self._loop.create_future()
        )
        group.waiting[number] = waiting
        submit = ipc.Submit(
            request=number,
            num_tokens=request.num_tokens,
            fp8=request.scales is not None,
            routed=request.topk_ids is not None,
            layout=layout,
            submitted=now,
            deadline=request.deadline,
        )
        self._send(group, 0, submit)
        try:
            done = await waiting.future
        except asyncio.CancelledError:
            if number in group.waiting:
                # The ranks may be writing into the block: it is freed when they have answered.
                self._send(group, 0, ipc.Cancel(number))
            elif not waiting.future.cancelled() and waiting.future.exception() is None:
                self._free(group, waiting)  # answered in the moment in which its client left
            raise
        return self._result(group, waiting, done, request.routes)

    def begin_drain(self) -> None:
        """Refuses new requests from now on."""
        self._draining = True

    @property
    def num_waiting(self) -> int:
        """Requests in flight."""
        return len(self._group.waiting) if self._group else 0

    def inject_fault(self, rank: int, action: str) -> None:
        """Sends a rank the signal of ``action``."""
        if action not in _ACTIONS:
            raise ValueError(f"action = {action!r}: must be one of {', '.join(_ACTIONS)}")
        if self._group is None:
            raise EngineUnavailable(f"no group of ranks: {self._reason}")
        if rank not in self._group.ranks:
            raise ValueError(f"rank = {rank}: must be in 0..{self._group.num_ranks - 1}")
        signal.pidfd_send_signal(self._group.ranks[rank].pidfd, _ACTIONS[action])

    async def close(self, limit_s: float) -> None:
        """Tells the ranks to stop, waits for their exit, and frees everything."""
        self._draining = True
        group = self._group
        if group is not None:
            self._send(group, 0, ipc.Stop())
            if self._group is not group:
                self._kill(group)  # rank 0 is gone already
            deadline = self._loop.time() + limit_s
            while self._group is group and self._loop.time() < deadline:
                await asyncio.sleep(0.02)
            if self._group is group:
                self._end_group("the service is shutting down")
                self._kill(group)
        self._watch.cancel()
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()

    # -------------------------------------------------------------- requests

    def _queue_tokens(self, layer: LayerInfo) -> int:
        chosen = self.config.queue_tokens or 4 * layer.capacity
        return max(chosen, layer.capacity)

    @staticmethod
    def _write(arena: Arena, layout: Layout, request: MoERequest) -> None:
        end = layout.hidden + request.hidden.nbytes
        request.hidden.copy_to(arena.view[layout.hidden : end])
        for offset, data in (
            (layout.scales, request.scales),
            (layout.topk_ids, request.topk_ids),
            (layout.topk_weights, request.topk_weights),
        ):
            if data is not None:
                arena.view[offset : offset + data.nbytes] = data

    def _result(self, group: _Group, waiting: _Waiting, done: ipc.Done, routes: bool) -> MoEResult:
        layer = group.layer
        assert layer is not None
        total = time.monotonic() - waiting.submitted
        queue = max(0.0, done.started - waiting.submitted)
        arena, layout, rows = group.arena, waiting.layout, waiting.num_tokens
        if arena is None:  # the group ended between its answer and this line
            raise EngineUnavailable("the group of ranks ended while the answer was being read")

        def view(offset: int, nbytes: int) -> memoryview:
            return arena.view[offset : offset + nbytes]

        ids = weights = None
        if routes and waiting.chosen:
            ids = bytes(view(layout.topk_ids, rows * layer.topk * 4))
            weights = bytes(view(layout.topk_weights, rows * layer.topk * 4))
        return MoEResult(
            output=view(layout.output, rows * layer.hidden * 2),
            topk_ids=ids,
            topk_weights=weights,
            queue_s=queue,
            kernel_s=done.kernel_s,
            host_s=max(0.0, total - queue - done.kernel_s),
            step=done.step,
            step_tokens=done.step_tokens,
            high_water=tuple(done.high_water),
            release=lambda: self._free(group, waiting),
        )

    # -------------------------------------------------------------- messages

    def _send(self, group: _Group, rank: int, message: ipc.ToRank) -> None:
        """Sends; a rank that takes no messages any more is lost, and so is its group."""
        try:
            self._socket.send_multipart(
                [group.ranks[rank].identity, ipc.encode(message)], flags=zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            # A connection ends a moment before the word of its process's death is here.
            if self._group is group:
                said = "died" if error.errno == zmq.EHOSTUNREACH else f"takes no messages: {error}"
                fault = EngineFault(kind="died", rank=rank, message=f"rank {rank} {said}")
                self._on_fault(group, fault)
            return
        # The descriptor is edge-triggered: a send may have swallowed the edge of an arrival.
        self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        if self._socket.closed:
            return
        while True:
            try:
                identity, payload = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                self._refuse("malformed")
                continue
            try:
                message = ipc.decode_from_rank(payload)
            except msgspec.DecodeError:
                self._refuse("malformed")
                continue
            self._on_message(identity, message)

    def _refuse(self, reason: str) -> None:
        _log.warning("refused a message on the engine socket: %s", reason)
        for observe in self.observers.ipc_rejected:
            observe(reason)

    def _on_message(self, identity: bytes, message: ipc.FromRank) -> None:
        if isinstance(message, ipc.Hello):
            self._on_hello(identity, message)
            return
        if isinstance(message, ipc.CannotStart):
            self._reason, self._failed = message.message, True
            if self._generation == 0:  # a later group may have lost a peer: torchrun tries again
                self._on_fatal(message.message)
            return
        group = self._group
        if group is None or message.group != group.id:
            self._refuse("other group")
        elif isinstance(message, ipc.SignOfLife):
            if message.rank in group.ranks:
                group.ranks[message.rank].alive_at = time.monotonic()
                for on_sample in self.observers.telemetry:
                    on_sample(message.sample)
        elif isinstance(message, ipc.Stepped):
            self._on_stepped(group, message)
        elif isinstance(message, ipc.Done):
            waiting = group.waiting.pop(message.request, None)
            if waiting is None:
                self._refuse("unknown request")
            elif waiting.future.done():  # its client left while it ran
                self._free(group, waiting)
            else:
                waiting.future.set_result(message)
        elif isinstance(message, ipc.Dropped):
            waiting = group.waiting.pop(message.request, None)
            if waiting is None:
                self._refuse("unknown request")
                return
            self._free(group, waiting)
            if not waiting.future.done():
                why = "its deadline passed" if message.expired else "it was withdrawn"
                waiting.future.set_exception(RequestExpired(f"the request did not run: {why}"))
        elif isinstance(message, ipc.Fault):
            self._on_fault(group, self._blame(group, message.fault))
        else:
            self._on_drain()

    @staticmethod
    def _free(group: _Group, waiting: _Waiting) -> None:
        if group.arena is not None:
            group.arena.release(waiting.layout.begin, waiting.layout.nbytes)

    def _on_stepped(self, group: _Group, message: ipc.Stepped) -> None:
        if message.record.step <= group.last_step:
            self._refuse("replayed step")
            return
        group.last_step = message.record.step
        group.progress_at = time.monotonic()
        if not group.stepping:
            group.stepping = True
            self._failed = False
            _log.info("group %s serves with %d ranks", group.id, group.num_ranks)
        for observe in self.observers.step:
            observe(message.record)

    # -------------------------------------------------------------- groups

    def _on_hello(self, identity: bytes, hello: ipc.Hello) -> None:
        if hello.group in self._retired or not 0 <= hello.rank < hello.num_ranks:
            self._refuse("other group")
            return
        group = self._group
        if group is None:
            group = self._group = _Group(hello.group, hello.num_ranks)
            self._generation += 1
            self._reason = "the ranks are loading the layer"
        if group.id != hello.group or hello.rank in group.ranks:
            self._refuse("other group")
            return
        try:
            pidfd = os.pidfd_open(hello.pid)
        except OSError:
            self._refuse("unknown process")
            return
        group.ranks[hello.rank] = _Rank(identity, hello.pid, pidfd, time.monotonic())
        self._loop.add_reader(pidfd, self._on_exit, group, hello.rank)
        if hello.layer is not None:
            group.layer = hello.layer
        if len(group.ranks) == group.num_ranks:
            self._admit(group)

    def _admit(self, group: _Group) -> None:
        layer = group.layer
        if layer is None:
            self._on_fault(
                group, EngineFault(kind="error", rank=0, message="rank 0 did not say its layer")
            )
            return
        nbytes = arena_bytes(layer, self._queue_tokens(layer), self.config.queue_requests)
        try:
            group.arena = Arena.create(nbytes)
        except ArenaError as error:
            self._on_fault(group, EngineFault(kind="error", rank=0, message=str(error)))
            self._on_fatal(str(error))
            return
        self._layer = layer
        group.progress_at = time.monotonic()
        pids = [group.ranks[rank].pid for rank in range(group.num_ranks)]
        welcome = ipc.Welcome(group.id, group.arena.ref, pids)
        for rank in group.ranks:
            self._send(group, rank, welcome)

    def _on_exit(self, group: _Group, rank: int) -> None:
        """A rank's process ended."""
        if self._group is not group:
            return
        if self._draining and not group.waiting:
            self._end_group("the ranks have stopped")
            return
        # What it said last may name the cause better than its death does.
        self._pump()
        if self._group is group:
            fault = EngineFault(kind="died", rank=rank, message=f"rank {rank} died")
            self._on_fault(group, fault)

    def _on_fault(self, group: _Group, fault: EngineFault) -> None:
        _log.error("fault (%s) of rank %d: %s", fault.kind, fault.rank, fault.message)
        self._last_fault = fault
        self._failed = True
        self._end_group(fault.message)
        for observe in self.observers.fault:
            observe(fault)
        self._loop.call_later(GRACE_S, self._kill, group)

    def _end_group(self, reason: str) -> None:
        """Answers every request in flight, and forgets the group."""
        group = self._group
        if group is None:
            return
        self._group = None
        self._retired.add(group.id)
        self._reason = reason
        for rank in group.ranks.values():
            self._loop.remove_reader(rank.pidfd)
        for waiting in group.waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(EngineUnavailable(reason))
        group.waiting.clear()
        if group.arena is not None:
            arena, group.arena = group.arena, None
            arena.close()

    @staticmethod
    def _kill(group: _Group) -> None:
        """Ends what is left of a group; a stopped rank cannot end itself."""
        for rank in group.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
            os.close(rank.pidfd)
        group.ranks.clear()

    @staticmethod
    def _silent(group: _Group) -> tuple[int, float] | None:
        """The rank that has been silent longest, and for how long; None when all are alive."""
        now = time.monotonic()
        silence, rank = max((now - r.alive_at, number) for number, r in group.ranks.items())
        return (rank, silence) if silence > SILENCE_S else None

    def _blame(self, group: _Group, fault: EngineFault) -> EngineFault:
        """A wait names whom it waited for; a rank without any sign of life is the better answer."""
        silent = self._silent(group)
        if fault.kind != "timeout" or silent is None or silent[0] == fault.rank:
            return fault
        rank, since = silent
        message = f"rank {rank} gave no sign of life for {since:.1f} s; {fault.message}"
        return EngineFault(kind="timeout", rank=rank, message=message, record=fault.record)

    async def _watchdog(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            group = self._group
            if group is None or group.arena is None:
                continue
            now = time.monotonic()
            limit = self.config.progress_timeout_s
            if now - group.progress_at <= limit:
                continue
            silent = self._silent(group)
            if silent is not None:
                rank, since = silent
                message = f"rank {rank} gave no sign of life for {since:.1f} s"
            else:
                rank = 0
                message = f"rank 0 ended no step for {limit:g} s, though every rank is alive"
            self._on_fault(group, EngineFault(kind="stuck", rank=rank, message=message))
