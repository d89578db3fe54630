"""One start of the rank processes, as the HTTP process knows it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Final

from service import ipc
from service.arena import Arena
from service.engine import LayerInfo
from service.reports import EngineFault

__all__ = ["Group", "Rank", "Waiting"]

SILENCE_S: Final = 3.0
"""A rank that gave no sign of life for so long is stopped."""


@dataclass(slots=True)
class Waiting:
    """A request in the engine; its tensors are ``nbytes`` of the arena from ``begin``."""

    begin: int
    nbytes: int
    num_tokens: int
    submitted: float
    future: asyncio.Future[ipc.Done]


@dataclass(slots=True)
class Rank:
    """A rank's process and its address."""

    identity: bytes
    pid: int
    pidfd: int
    alive_at: float


@dataclass
class Group:
    """One start of the ranks."""

    id: str
    num_ranks: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    layer: LayerInfo | None = None
    arena: Arena | None = None
    waiting: dict[int, Waiting] = field(default_factory=dict)
    progress_at: float = 0.0
    stepping: bool = False  # at least one step ended
    last_step: int = 0

    def free(self, waiting: Waiting) -> None:
        """Returns a request's memory."""
        if self.arena is not None:
            self.arena.release(waiting.begin, waiting.nbytes)

    def drop_arena(self) -> None:
        """Unmaps the tensors; nobody reads them any more."""
        if self.arena is not None:
            arena, self.arena = self.arena, None
            arena.close()

    def kill(self) -> None:
        """Ends what is left of the processes; a stopped rank cannot end itself."""
        for rank in self.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
            os.close(rank.pidfd)
        self.ranks.clear()

    def silent(self) -> tuple[int, float] | None:
        """The rank that has been silent longest, and for how long; None when all are alive."""
        now = time.monotonic()
        silence, rank = max((now - r.alive_at, number) for number, r in self.ranks.items())
        return (rank, silence) if silence > SILENCE_S else None

    def blame(self, fault: EngineFault) -> EngineFault:
        """A wait names whom it waited for; a rank without any sign of life is the better answer."""
        silent = self.silent()
        if fault.kind != "timeout" or silent is None or silent[0] == fault.rank:
            return fault
        rank, since = silent
        message = f"rank {rank} gave no sign of life for {since:.1f} s; {fault.message}"
        return EngineFault(kind="timeout", rank=rank, message=message, record=fault.record)

    def stuck(self, limit_s: float) -> EngineFault | None:
        """Why no step ended for ``limit_s``; None when one did."""
        if time.monotonic() - self.progress_at <= limit_s:
            return None
        silent = self.silent()
        if silent is not None:
            rank, since = silent
            message = f"rank {rank} gave no sign of life for {since:.1f} s"
        else:
            rank = 0
            message = f"rank 0 ended no step for {limit_s:g} s, though every rank is alive"
        return EngineFault(kind="stuck", rank=rank, message=message)
