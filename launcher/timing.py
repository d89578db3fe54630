"""Times and memory of ranks: what is measured, and how figures of several ranks become one.

A call's time is that of its slowest rank: ranks meet before each call, and the maximum over ranks
is taken call by call, before the median. Contenders take turns, so that a busy moment of the
machine hits all of them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from launcher.ranks import Group

__all__ = ["Memory", "MemoryMeter", "Times", "memory_now", "take_turns", "times"]


@dataclass(frozen=True)
class Times:
    """Durations of repeated calls in microseconds: max over ranks per call, then these.

    Attributes:
        median_us: of the calls.
        p99_us: 99th percentile; with fewer than 100 calls, the slowest.
        best_us: the fastest call.
        cpu_us: median of the processor time of all ranks together; what a busy machine cannot
            stretch, where ``median_us`` is stretched.
        calls: how many.
    """

    median_us: float
    p99_us: float
    best_us: float
    cpu_us: float
    calls: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def times(seconds: Sequence[float], cpu_seconds: Sequence[float]) -> Times:
    """Statistics of calls: duration and processor time of each, in seconds."""
    ordered = sorted(s * 1e6 for s in seconds)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    cpu = statistics.median(cpu_seconds) * 1e6
    return Times(statistics.median(ordered), p99, ordered[0], cpu, len(ordered))


def take_turns(
    group: Group,
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls_per_round: int,
    warmup: int = 1,
    turn_s: float = math.inf,
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Collective: times every contender, turn by turn.

    Args:
        group: the ranks; each of them has the same names in the same order.
        calls: a call of each contender, by name. A rank without a part in it passes a no-op.
        rounds: turns of each contender.
        calls_per_round: calls in one turn.
        warmup: calls before each turn that are not counted.
        turn_s: a turn ends early once its counted calls took so many seconds.
        on_round: called after each turn, for progress.

    Returns:
        Times by name, equal on every rank.
    """
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            spent = 0.0
            for i in range(warmup + calls_per_round):
                # Ranks meet, and agree whether to go on.
                if max(group.gather(spent)) > turn_s:
                    break
                start, cpu_start = time.perf_counter(), time.process_time()
                call()
                if i >= warmup:
                    took = time.perf_counter() - start
                    measured[name].append((took, time.process_time() - cpu_start))
                    spent += took
            on_round()
    by_rank = group.gather(measured)
    found = {}
    for name in calls:
        of_call = list(zip(*(m[name] for m in by_rank), strict=True))
        found[name] = times(
            [max(wall for wall, _ in ranks) for ranks in of_call],
            [sum(cpu for _, cpu in ranks) for ranks in of_call],
        )
    return found


# ---------------------------------------------------------------- memory

_ROLLUP: Final = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class Memory:
    """Memory of this process in bytes.

    Attributes:
        rss: resident pages, shared ones in full.
        pss: the same with each shared page divided by the processes that map it, so that the sum
            over ranks counts windows once.
    """

    rss: int
    pss: int

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.rss - other.rss, self.pss - other.pss)


def memory_now() -> Memory:
    """Reads ``/proc/self/smaps_rollup``."""
    found = {}
    for line in _ROLLUP.read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) * 1024
    return Memory(found["Rss"], found["Pss"])


class MemoryMeter:
    """Growth of this process's memory since the meter was made, and its peak over the samples."""

    def __init__(self) -> None:
        self._base = memory_now()
        self.now = Memory(0, 0)
        self.peak = Memory(0, 0)

    def sample(self) -> None:
        """Takes a sample; costs a few milliseconds where much memory is mapped."""
        self.now = memory_now() - self._base
        self.peak = Memory(max(self.peak.rss, self.now.rss), max(self.peak.pss, self.now.pss))
