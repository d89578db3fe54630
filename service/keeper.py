"""Keeps one group of ranks: hears it, knows every process of it, and ends it when it fails.

It sees a rank die at once (pidfd), sees one stop (no sign of life), and sees the group stand still
(no step). Then every request in flight is answered with the reason, and what is left of the group
is killed, so that torchrun starts anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import zmq

from service import ipc
from service.arena import (
    Arena,
    ArenaError,
    arena_bytes,
)
from service.config import ServiceConfig
from service.engine import EngineUnavailable, LayerInfo, RequestExpired
from service.group import Group, Rank
from service.reports import EngineFault, EngineStatus, Observers, State

__all__ = ["GroupKeeper"]

_log = logging.getLogger("megamoe.service")
GRACE_S: Final = 1.0
"""After a fault, ranks have so long to end by themselves."""
_ACTIONS: Final = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
    "blind": signal.SIGUSR1,  # its sensors cannot be read
    "see": signal.SIGUSR2,
}


class GroupKeeper:
    """The present group of ranks, and what is known of it. Lives on one event loop.

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
        self._group: Group | None = None
        self._retired: set[str] = set()
        self._generation = 0
        self._draining = False
        self._reason = "waiting for the ranks to start"
        self._failed = False
        self._last_fault: EngineFault | None = None
        self._layer: LayerInfo | None = None
        self._watch = self._loop.create_task(self._watchdog())

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
        elif (stuck := group.stuck(self.config.progress_timeout_s)) is not None:
            state, reason = "failed", stuck.message  # the watchdog is about to say the same
        return EngineStatus(
            state=state,
            reason=reason,
            generation=self._generation,
            num_requests=len(waiting),
            num_tokens=sum(w.num_tokens for w in waiting),
            last_fault=self._last_fault,
        )

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
        try:
            signal.pidfd_send_signal(self._group.ranks[rank].pidfd, _ACTIONS[action])
        except ProcessLookupError:  # the word of its death is on its way
            raise EngineUnavailable(f"rank {rank} died") from None

    async def close(self, limit_s: float) -> None:
        """Tells the ranks to stop, waits for their exit, and frees everything."""
        self._draining = True
        group = self._group
        if group is not None:
            self._send(group, 0, ipc.Stop())
            if self._group is not group:
                group.kill()  # rank 0 is gone already
            deadline = self._loop.time() + limit_s
            while self._group is group and self._loop.time() < deadline:
                await asyncio.sleep(0.02)
            if self._group is group:
                self._end_group("the service is shutting down")
                group.kill()
        self._watch.cancel()
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()

    def _queue_tokens(self, layer: LayerInfo) -> int:
        chosen = self.config.queue_tokens or 4 * layer.capacity
        return max(chosen, layer.capacity)

    # -------------------------------------------------------------- messages

    def _send(self, group: Group, rank: int, message: ipc.ToRank) -> None:
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
                if message.sample is not None:
                    for on_sample in self.observers.telemetry:
                        on_sample(message.sample)
        elif isinstance(message, ipc.Stepped):
            self._on_stepped(group, message)
        elif isinstance(message, ipc.Done):
            waiting = group.waiting.pop(message.request, None)
            if waiting is None:
                self._refuse("unknown request")
            elif waiting.future.done():  # its client left while it ran
                group.free(waiting)
            else:
                waiting.future.set_result(message)
        elif isinstance(message, ipc.Dropped):
            waiting = group.waiting.pop(message.request, None)
            if waiting is None:
                self._refuse("unknown request")
                return
            group.free(waiting)
            if not waiting.future.done():
                why = "its deadline passed" if message.expired else "it was withdrawn"
                waiting.future.set_exception(RequestExpired(f"the request did not run: {why}"))
        elif isinstance(message, ipc.Fault):
            self._on_fault(group, group.blame(message.fault))
        else:
            self._on_drain()

    def _on_stepped(self, group: Group, message: ipc.Stepped) -> None:
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
            group = self._group = Group(hello.group, hello.num_ranks)
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
        group.ranks[hello.rank] = Rank(identity, hello.pid, pidfd, time.monotonic())
        self._loop.add_reader(pidfd, self._on_exit, group, hello.rank)
        if hello.layer is not None:
            group.layer = hello.layer
        if len(group.ranks) == group.num_ranks:
            self._admit(group)

    def _admit(self, group: Group) -> None:
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

    def _on_exit(self, group: Group, rank: int) -> None:
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

    def _on_fault(self, group: Group, fault: EngineFault) -> None:
        _log.error("fault (%s) of rank %d: %s", fault.kind, fault.rank, fault.message)
        self._last_fault = fault
        self._failed = True
        self._end_group(fault.message)
        for observe in self.observers.fault:
            observe(fault)
        self._loop.call_later(GRACE_S, group.kill)

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
        group.drop_arena()

    async def _watchdog(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            group = self._group
            if group is None or group.arena is None:
                continue
            fault = group.stuck(self.config.progress_timeout_s)
            if fault is not None:
                self._on_fault(group, fault)
