"""A rank process of the service: the main thread looks after it while the worker runs steps.

Signals, signs of life with the GPU's telemetry, and the death of a peer or of the HTTP process:
none of these may wait until a step ends.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from typing import Final, NoReturn

import torch
import zmq

from launcher.ranks import device_of, sampler_of
from launcher.serving.worker import RankOptions, Shared, Worker
from megamoe.telemetry import Reading
from service import ipc
from service.reports import TelemetrySample

__all__ = ["run_rank"]

_log = logging.getLogger("megamoe.rank")
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
BLIND, SEE = signal.SIGUSR1, signal.SIGUSR2
"""Fault injection: from now on no sensor is read; the sensors are there again."""
HEARD: Final = (*SIGNALS, BLIND, SEE)
TICK_S: Final = 0.1
LIFE_S: Final = 1.0
STOP_SKEW_S: Final = 0.3
STOP_LIMIT_S: Final = 28.0
"""torchrun kills its ranks 30 s after SIGTERM."""


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


class _Watch:
    """The main thread: signals, peers, the HTTP process, signs of life."""

    def __init__(
        self, options: RankOptions, rank: int, shared: Shared, http_pid: int | None
    ) -> None:
        self.options = options
        self.rank = rank
        self.shared = shared
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link: zmq.Socket[bytes] | None = None
        self.poller = select.poll()
        self.peers: dict[int, str] = {}
        if http_pid is not None:
            self._watch(http_pid, "the HTTP process")
        self.sampler = sampler_of(device_of(_local_rank(), options.backend))
        self.off = "" if options.telemetry_s else "--telemetry-interval is 0"
        self.unread = self.off  # why no sensor is read
        self.came: deque[int] = deque()
        # Handlers, not ``sigtimedwait``: a signal may find a thread that is older than the mask, as
        # a driver's may be; and interrupted by SIGCONT at its end, CPython's returns stale bytes.
        for number in HEARD:
            signal.signal(number, lambda number, _: self.came.append(number))
        self.told_at: float | None = None
        self.life_at = 0.0
        self.read_at = 0.0

    def _watch(self, pid: int, who: str) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._end(1, f"{who} is gone")
        self.peers[fd] = who
        self.poller.register(fd, select.POLLIN)

    def _end(self, code: int, why: str) -> NoReturn:
        print(f"megamoe serve: rank {self.rank} ends: {why}", file=sys.stderr, flush=True)
        os._exit(code)  # the worker may sit in a wait that nobody will end

    def run(self, worker: threading.Thread) -> None:
        """Returns when the worker has ended."""
        watching = False
        while worker.is_alive():
            time.sleep(min(TICK_S, self.options.telemetry_s or TICK_S))
            if self.shared.pids and not watching:
                watching = True
                for rank, pid in enumerate(self.shared.pids):
                    if rank != self.rank:
                        self._watch(pid, f"rank {rank}")
            if not worker.is_alive():
                break
            gone = self.poller.poll(0)
            if gone and not self.shared.stopping:
                # torchrun's SIGTERM after a peer's death means restart, not drain. A peer that was
                # told to stop may be gone a moment before this rank hears the same.
                worker.join(STOP_SKEW_S)
                if worker.is_alive() and not self.shared.stopping:
                    self._end(1, f"{self.peers[gone[0][0]]} died")
            while self.came:
                number = self.came.popleft()
                if number in (BLIND, SEE):
                    self.unread = "told not to look" if number == BLIND else self.off
                    self.read_at = 0.0  # to be said at once
                else:
                    self._told_to_stop()
            if self.told_at is not None and time.monotonic() - self.told_at > STOP_LIMIT_S:
                self._end(1, "the drain took too long")
            self._live()

    def _told_to_stop(self) -> None:
        if not self.shared.serving:
            self._end(128 + signal.SIGTERM, "told to stop before serving")
        if self.told_at is not None:
            self._end(128 + signal.SIGTERM, "told to stop twice")
        self.told_at = time.monotonic()
        self._send(ipc.DrainWanted(self.shared.group))

    def _live(self) -> None:
        now = time.monotonic()
        period_s = LIFE_S if self.unread else self.options.telemetry_s
        due = now - self.read_at >= period_s
        if not self.shared.group or not (due or now - self.life_at >= LIFE_S):
            return
        sample = None
        if due:
            self.read_at = now
            reading = Reading(unavailable=self.unread) if self.unread else self.sampler.read()
            sample = _sample(self.rank, reading)
        self.life_at = now
        self._send(ipc.SignOfLife(self.shared.group, self.rank, sample))

    def _send(self, message: ipc.SignOfLife | ipc.DrainWanted) -> None:
        if self.link is None:
            name = f"{self.shared.group}:{self.rank}:life"
            self.link = ipc.connect(self.context, ipc.engine_address(self.options.run_dir), name)
        try:
            self.link.send(ipc.encode(message), flags=zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("the HTTP process does not take messages")


def _sample(rank: int, reading: Reading) -> TelemetrySample:
    return TelemetrySample(
        rank=rank,
        device=reading.device,
        unavailable=reading.unavailable,
        values=reading.values,
        clocks_events=reading.clocks_events,
    )


def run_rank(options: RankOptions, http_pid: int | None) -> int:
    """Serves as one rank of torchrun's group until told to stop.

    Args:
        options: what to serve.
        http_pid: the HTTP process, whose end ends the rank, if this side started it.

    Returns:
        The exit status: 0 only after a stop that was asked for.
    """
    # Before any thread exists, and only this one takes them again: no step is interrupted.
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    shared = Shared()
    worker = Worker(options, rank, num_ranks, shared)
    watch = _Watch(options, rank, shared, http_pid)
    thread = threading.Thread(target=worker.work, name="worker", daemon=True)
    thread.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    watch.run(thread)
    return shared.code
