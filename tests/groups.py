"""Groups of ranks for tests: as threads of this process (``run_group``)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from megamoe.symmetric.local import LocalGroup, LocalRendezvous

T = TypeVar("T")


def run_group(num_ranks: int, body: Callable[[LocalRendezvous], T]) -> list[T]:
    """Runs ``body`` once per rank, each in a thread; returns results by rank.

    The first exception of any rank is raised here, after all ranks have ended.
    """
    group = LocalGroup(num_ranks)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def rank_body(rank: int) -> None:
        try:
            results[rank] = body(group.rendezvous(rank))
        except BaseException as e:  # noqa: BLE001 - carried to the test's thread
            errors[rank] = e
            group.abort()

    threads = [threading.Thread(target=rank_body, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    # A rank that left makes the others break at the next exchange: show the cause, not the echo.
    causes = [e for e in errors.values() if not isinstance(e, threading.BrokenBarrierError)]
    for error in (*causes, *errors.values()):
        raise error
    assert len(results) == num_ranks, f"only ranks {sorted(results)} ended within 100 s"
    return [results[r] for r in range(num_ranks)]
