"""Groups whose ranks are threads of one process, on GPUs or on CPUs.

Processes that share a GPU take turns on it, many milliseconds each. Threads share it: each has a
stream and its part of the SMs, so that kernels of all ranks run at the same time, and thousands of
calls take seconds. Windows are then plain device memory, not the symmetric memory of processes.
Rank r has GPU r mod N. Several groups of a process know nothing of each other but the GPUs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from launcher.console import stderr
from launcher.ranks import GRACE_S, Group, Part, RankFailed, device_of
from megamoe.errors import SpecError
from megamoe.symmetric.base import Rendezvous
from megamoe.symmetric.local import LocalGroup

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ThreadGroup", "run_in_threads"]

T = TypeVar("T")
_LOOK_S: Final = 0.2


@dataclass(frozen=True)
class ThreadGroup(Group):
    """A thread's view of its group; ``members`` is the ``LocalGroup``.

    Attributes:
        groups: how many groups this process has.
        meeting: of the threads of all groups.
    """

    groups: int = 1
    meeting: threading.Barrier | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Collective over all groups of this process, which take turns inside."""
        for turn in range(self.groups):
            if self.meeting is not None:
                self.meeting.wait()
            if turn == self.which:
                yield
        if self.meeting is not None:
            self.meeting.wait()

    def gather(self, value: T) -> list[T]:
        """Collective: every rank's value itself, by rank: none is copied."""
        return [v["value"] for v in self.members.exchange(self.rank, {"value": value})]

    def part(self, size: int) -> Part | None:
        """Collective: the group of the first ``size`` ranks; None on the others.

        One group only: on a GPU each would take all SMs, and wait for those that the other has.
        """
        made = self.gather(LocalGroup(size) if self.first else None)[0]
        if self.rank >= size:
            return None
        return ThreadGroup(self.rank, size, self.device, made), 0, 1

    def rendezvous(self) -> Rendezvous:
        """What ``open_layer`` gets."""
        found: Rendezvous = self.members.rendezvous(self.rank)
        return found

    def collect_rows(self, rows: Tensor, counts: list[int]) -> Tensor | None:
        """As of processes."""
        import torch

        parts = self.gather(rows.cpu())
        return torch.cat(parts) if self.first else None


def run_in_threads(
    num_ranks: int, backend: str, work: Callable[[Group], int], *, groups: int = 1
) -> int:
    """Runs ``work`` once per rank, each in a thread with a stream of its own.

    Args:
        num_ranks: R of a group.
        backend: ``"cpu"`` keeps ranks off the GPUs.
        work: gets the group; returns the exit code.
        groups: how many groups run at once.

    Returns:
        The largest code.

    Raises:
        SpecError: this process is a rank of torchrun already.
        Exception: the first that a rank raised, after all threads have ended.
    """
    if "RANK" in os.environ:
        raise SpecError("--threads, but torchrun started this process: leave one of them out")
    # A kernel that is loaded at its first use may wait for those of other ranks, and streams that
    # share a queue wait for each other; both would wait for a rank that waits for them.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    members = [LocalGroup(num_ranks) for _ in range(groups)]
    meeting = threading.Barrier(num_ranks * groups)
    codes: list[int] = []
    errors: list[BaseException] = []
    ended = [threading.Event() for _ in range(num_ranks * groups)]

    def body(which: int, rank: int) -> None:
        try:
            device = device_of(rank, backend)
            own = ThreadGroup(rank, num_ranks, device, members[which], which, groups, meeting)
            with _stream(device):
                codes.append(work(own))
        except BaseException as e:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(e)
            break_all()
        finally:
            ended[which * num_ranks + rank].set()

    def break_all() -> None:
        """Ranks that wait for others in Python hear that these do not come."""
        meeting.abort()
        for group in members:
            group.abort()

    threads = [
        threading.Thread(target=body, args=(g, r), daemon=True)
        for g in range(groups)
        for r in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread_ended in ended:  # a join that is interrupted takes its thread for ended
            while not thread_ended.wait(_LOOK_S):  # a signal may reach another thread, and wake it
                pass
    except KeyboardInterrupt:
        break_all()
        _end_within_grace(ended)
        raise
    for thread in threads:
        thread.join()
    # Ranks that another one has left find the group broken: show the cause, not the echo.
    causes = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    for error in (*causes, *errors):
        if isinstance(error, RankFailed):
            error.printed_elsewhere = False  # no other process does
        raise error
    return max(codes)


def _end_within_grace(ended: list[threading.Event]) -> None:
    """Ends this process where ranks stay inside a call, which waits for its limit.

    The interpreter must not end before them: a thread that comes out of native code then is ended
    there, which C++ answers with an abort.
    """
    limit, over = time.monotonic() + GRACE_S, False
    with suppress(KeyboardInterrupt):  # the second one
        over = all(e.wait(max(0.0, limit - time.monotonic())) for e in ended)
    if not over:
        stderr.show_cursor()
        os._exit(128 + signal.SIGINT)


def _stream(device: str) -> Any:
    """A stream of one's own; nothing on CPUs."""
    if device == "cpu":
        return nullcontext()
    import torch

    torch.cuda.set_device(device)
    return torch.cuda.stream(torch.cuda.Stream())
