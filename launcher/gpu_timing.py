"""Times on GPUs by the rules of ``docs/performance.md``: bursts, sustained load, host time.

A burst call is timed alone: L2 is flushed, ranks meet on the stream, the GPU is kept busy while the
host enqueues, events stand around the call, and the call's time is the slowest rank's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from launcher.gpm import Gpm, mean_rates
from launcher.ranks import Group, sampler_of
from launcher.timing import Times, times
from megamoe.telemetry import Reading

__all__ = ["GpuTimer", "Sustained"]

_FLUSH_BYTES = 256 << 20
_BUSY_CYCLES = 2_000_000  # about 1 ms: the host runs ahead
_LEAST_COUNTED_S = 0.3  # the GPU's counters lag by 0.1 s: of shorter runs they saw time before


@dataclass(frozen=True)
class Sustained:
    """Calls back to back for a while.

    Attributes:
        us: per call, of the slowest rank.
        joules: per call, all ranks; None where the energy counter cannot be read.
        sm_mhz: in the middle of the run, the slowest rank's; None where it cannot be read.
        watts: the sum over ranks, then.
        throttle: reasons for which any rank's clocks were held back, then.
        counters: rates of the second half of the run (``gpm.RATES``), means over ranks; None where
            the GPU does not give them, and of runs shorter than 0.3 s.
    """

    us: float
    joules: float | None
    sm_mhz: float | None
    watts: float | None
    throttle: list[str] | None
    counters: dict[str, float] | None = None


class GpuTimer:
    """Times calls of a group of ranks, one GPU each. All methods are collective."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._one = torch.zeros(1, device="cuda")
        self.sampler = sampler_of(group.device)
        uuid = torch.cuda.get_device_properties(group.device).uuid
        self._gpm = Gpm(f"GPU-{uuid}")

    def _meet(self) -> None:
        """On the stream."""
        if self._group.num_ranks > 1:
            dist.all_reduce(self._one)

    def bursts(
        self, calls: Mapping[str, Callable[[], object]], rounds: int, per_round: int
    ) -> dict[str, Times]:
        """Contenders take turns, so that clocks and temperature are alike for all."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
        for round_ in range(rounds):
            for name, call in calls.items():
                warmup = 1 if round_ else 2
                for i in range(warmup + per_round):
                    self._flush.zero_()
                    torch.cuda._sleep(_BUSY_CYCLES)
                    self._meet()  # after the sleep, which takes longer at a lower clock
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    call()
                    end.record()
                    torch.cuda.synchronize()
                    if i >= warmup:
                        events[name].append((begin, end))
        mine = {
            name: [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]
            for name, pairs in events.items()
        }
        every = self._group.gather(mine)
        found = {}
        for name in calls:
            slowest = [max(of_call) for of_call in zip(*(m[name] for m in every), strict=True)]
            found[name] = times(slowest, [0.0] * len(slowest))
        return found

    def sustained(self, call: Callable[[], object], seconds: float) -> Sustained:
        """Back to back for about so many seconds, with clocks and power on the way."""
        call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            call()
        end.record()
        torch.cuda.synchronize()
        one = max(self._group.gather(begin.elapsed_time(end) / 3)) * 1e-3
        count = max(4, int(seconds / one))
        before = self.sampler.read()
        start = time.perf_counter()
        begin.record()
        # The GPU's counters lag by a tenth of a second: both samples are taken well inside the run.
        sampled = False
        for _ in range(count):
            call()
            if not sampled and time.perf_counter() - start > 0.4 * seconds:
                self._gpm.begin()
                sampled = True
        end.record()
        if not sampled:
            _sleep_until(start + 0.4 * seconds)
            self._gpm.begin()
        _sleep_until(start + 0.6 * seconds)
        during = self.sampler.read()
        _sleep_until(start + 0.9 * seconds)
        rates = self._gpm.end()
        torch.cuda.synchronize()
        after = self.sampler.read()
        mine = (begin.elapsed_time(end) * 1e3 / count, before, during, after, rates)
        every = self._group.gather(mine)
        counters = mean_rates([r for *_, r in every]) if seconds >= _LEAST_COUNTED_S else {}
        return Sustained(
            us=max(us for us, *_ in every),
            joules=_per_call([_energy(b, a) for _, b, _, a, _ in every], count),
            sm_mhz=_least([d.values.get("sm_clock_hertz") for _, _, d, _, _ in every], 1e-6),
            watts=_per_call([d.values.get("power_watts") for _, _, d, _, _ in every], 1),
            throttle=_reasons([d for _, _, d, _, _ in every]),
            counters=counters or None,
        )

    def host_us(self, call: Callable[[], object], calls: int = 40) -> float:
        """Median time of the host for a call, on the slowest rank.

        The GPU is kept busy, so that nothing waits for it.
        """
        torch.cuda.synchronize()
        torch.cuda._sleep(20 * _BUSY_CYCLES)
        spent = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return max(self._group.gather(statistics.median(spent))) * 1e6


def _sleep_until(when: float) -> None:
    """Until ``time.perf_counter`` says so."""
    time.sleep(max(0.0, when - time.perf_counter()))


def _energy(before: Reading, after: Reading) -> float | None:
    name = "energy_joules_total"
    if name not in before.values or name not in after.values:
        return None
    return after.values[name] - before.values[name]


def _per_call(of_ranks: list[float | None], count: int) -> float | None:
    known = [v for v in of_ranks if v is not None]
    return sum(known) / count if len(known) == len(of_ranks) else None


def _least(of_ranks: list[float | None], scale: float) -> float | None:
    known = [v for v in of_ranks if v is not None]
    return min(known) * scale if len(known) == len(of_ranks) else None


def _reasons(readings: list[Reading]) -> list[str] | None:
    """Names of what held clocks back on any rank; None where a rank could not say."""
    found: set[str] = set()
    for reading in readings:
        if reading.clocks_events is None:
            return None
        found |= {name for name, on in reading.clocks_events.items() if on and name != "gpu_idle"}
    return sorted(found)
