"""The ranks' part of ``bench power``: opens the builds, loads them in turns, reads the sensors."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from launcher.ranks import Group, sampler_of
from launcher.sessions import enqueue, open_session
from launcher.workloads import random_activations, route
from megamoe.backends.base import Session
from megamoe.spec import EpConfig, MoESpec
from megamoe.telemetry import Reading
from megamoe.weights import random_experts

__all__ = ["measure", "summary"]

_PERIOD_S: Final = 0.02
_BURSTS: Final = 9
_PAUSE_S: Final = 0.03
_MOST_WAVE: Final = 32


# ---------------------------------------------------------------- measuring


@dataclass
class _Variant:
    """An opened session, and what was measured of it on this rank."""

    name: str
    session: Session
    call: Callable[[], None]
    y: torch.Tensor
    burst_us: list[float] = field(default_factory=list)
    calls: int = 0
    seconds: float = 0.0
    joules: float | None = None
    readings: list[tuple[float, Reading]] = field(default_factory=list)


def measure(
    group: Group,
    spec: MoESpec,
    model: str,
    tokens: int,
    names: list[str],
    seconds: float,
    rounds: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Collective: a row per variant.

    Args:
        group: of the ranks.
        spec: the layer.
        model: its name in the rows.
        tokens: per rank.
        names: of ``bench_power.VARIANTS``.
        seconds: length of a turn.
        rounds: turns of each variant.
        seed: of weights, activations and routes.
    """
    device = torch.device(group.device)
    x = random_activations(spec, group.rank, tokens, seed).to(device)
    routes = group.together(
        lambda: route("uniform", spec, group.num_ranks, group.rank, tokens, seed)
    )
    ids, weight = (t.to(device).contiguous() for t in routes)
    sampler = sampler_of(group.device)
    opened: list[_Variant] = []
    try:
        for name in names:
            session = group.together(lambda name=name: _open(spec, group, tokens, name))  # type: ignore[misc]
            experts = random_experts(spec, group.rank, group.num_ranks, seed, device=device)
            group.together(lambda e=experts, of=session: of.load_weights(e))  # type: ignore[misc]
            opened.append(_prepared(name, session, x, ids.int(), weight))
        for of in opened:
            of.call()
            of.session.check()
        same = [torch.equal(of.y, opened[0].y) for of in opened]
        for _ in range(_BURSTS):
            for of in opened:
                group.barrier()
                time.sleep(_PAUSE_S)
                of.burst_us.append(_timed(group, of, 1) * 1e6)
        for turn in range(rounds):
            for of in opened if turn % 2 == 0 else opened[::-1]:
                _turn(group, of, sampler, seconds)
        unavailable = sampler.read().unavailable
        every = group.gather([_figures(of, ok) for of, ok in zip(opened, same, strict=True)])
    finally:
        for of in opened:
            of.session.close()
    return [
        summary(
            [of_rank[i] for of_rank in every],
            {"model": model, "experts": spec.num_experts, "ranks": group.num_ranks},
            tokens,
            unavailable,
        )
        for i in range(len(names))
    ]


def _open(spec: MoESpec, group: Group, tokens: int, name: str) -> Session:
    """The layer in a variant's build and configuration."""
    config = EpConfig(num_ranks=group.num_ranks, max_tokens=tokens, timeout_s=10)
    if group.device != "cpu":
        config = replace(config, block_m=128)
    if name in ("full_rings", "phased"):
        # So that the lag, which ends a wave before the ring does, is longer than any call.
        blocks = config.resolved(spec).max_blocks(spec) + _MOST_WAVE
        config = replace(config, ring_l1_blocks=blocks, ring_l2_blocks=blocks)
    changed = {}
    if name == "phased":
        config = replace(config, l2_lag_blocks=config.ring_l2_blocks)
        changed["MEGAMOE_DEFINES"] = "MEGAMOE_PHASED=1"
    if name == "traced":
        changed["MEGAMOE_TRACE"] = "1"
    with _environment(changed):
        return open_session(group, spec, config)


@contextmanager
def _environment(changed: dict[str, str]) -> Iterator[None]:
    """Variables that are set for a while."""
    before = {key: os.environ.get(key) for key in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _prepared(
    name: str, session: Session, x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor
) -> _Variant:
    y = torch.full_like(x, float("nan"))
    return _Variant(name, session, lambda: enqueue(session, x, ids, weight, y), y)


def _timed(group: Group, of: _Variant, calls: int) -> float:
    """Collective: seconds per call of this rank."""
    if not of.y.is_cuda:
        begun = time.perf_counter()
        for _ in range(calls):
            of.call()
        return (time.perf_counter() - begun) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # about 1 ms: the host runs ahead
    begin.record()
    for _ in range(calls):
        of.call()
    end.record()
    of.session.check()
    return float(begin.elapsed_time(end)) * 1e-3 / calls


def _turn(group: Group, of: _Variant, sampler: Any, seconds: float) -> None:
    """Collective: calls back to back for a while, sensors read on the way.

    The first fifth warms up: clocks and power settle, and none of it counts.
    """
    one = max(group.gather(_timed(group, of, 2)))
    for share in (0.2, 1.0):
        batch = max(1, int(0.1 * seconds / one))
        batches = max(1, round(share * seconds / (batch * one)))
        before = sampler.read()
        read: list[tuple[float, Reading]] = []
        started = time.monotonic()
        stop = _sampling(sampler, read, started)
        spent = sum(_timed(group, of, batch) * batch for _ in range(batches))
        stop()
        after = sampler.read()
    of.calls += batches * batch
    of.seconds += spent
    first = of.readings[-1][0] + _PERIOD_S if of.readings else 0.0
    of.readings += [(first + at, reading) for at, reading in read]
    joules = [r.values.get("energy_joules_total") for r in (before, after)]
    if joules[0] is not None and joules[1] is not None:
        of.joules = (of.joules or 0.0) + joules[1] - joules[0]


def _sampling(
    sampler: Any, read: list[tuple[float, Reading]], started: float
) -> Callable[[], None]:
    """Reads in a thread until the returned function is called."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(_PERIOD_S):
            reading = sampler.read()
            if not reading.unavailable:
                read.append((time.monotonic() - started, reading))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end


# ---------------------------------------------------------------- rows


def _figures(of: _Variant, same: bool) -> dict[str, Any]:
    """What a rank says of a variant."""
    return {
        "variant": of.name,
        "same_bits": same,
        "burst_us": statistics.median(of.burst_us),
        "us": of.seconds / of.calls * 1e6,
        "calls": of.calls,
        "joules": of.joules,
        "series": [
            [
                round(at, 3),
                reading.values.get("power_watts"),
                reading.values.get("sm_clock_hertz"),
                reading.values.get("temperature_celsius"),
                sorted(n for n, held in (reading.clocks_events or {}).items() if held),
            ]
            for at, reading in of.readings
        ],
    }


def summary(
    of_ranks: list[dict[str, Any]], about: dict[str, Any], tokens: int, unavailable: str
) -> dict[str, Any]:
    """One row: times of the slowest rank, energy of all, sensors of rank 0 over time.

    Args:
        of_ranks: by rank, what was measured of one variant.
        about: fields of the row that name the work.
        tokens: per rank.
        unavailable: why there are no sensors, or empty.
    """
    first = of_ranks[0]
    series = first["series"]
    joules = [of["joules"] for of in of_ranks]
    held: dict[str, float] = {}
    for point in series:
        for reason in point[4]:
            held[reason] = held.get(reason, 0.0) + 1 / len(series)

    def mean(column: int, scale: float, digits: int) -> float | None:
        values = [point[column] for point in series if point[column] is not None]
        return round(statistics.fmean(values) * scale, digits) if values else None

    row = about | {
        "tokens": tokens,
        "variant": first["variant"],
        "same_bits": all(of["same_bits"] for of in of_ranks),
        "burst_us": round(max(of["burst_us"] for of in of_ranks), 1),
        "sustained_us": round(max(of["us"] for of in of_ranks), 1),
        "calls": first["calls"],
        "joules_per_token": (
            sum(joules) / (first["calls"] * tokens * len(of_ranks)) if None not in joules else None
        ),
        "watts": mean(1, 1.0, 1),
        "sm_mhz": mean(2, 1e-6, 0),
        "celsius": mean(3, 1.0, 1),
        "throttle": {reason: round(share, 3) for reason, share in sorted(held.items())},
        "series": {
            "seconds": [point[0] for point in series],
            "watts": [point[1] for point in series],
            "sm_mhz": [None if point[2] is None else point[2] * 1e-6 for point in series],
            "throttle": [",".join(point[4]) for point in series],
        },
    }
    if not series:
        row["throttle"] = None
    reason = unavailable or "the sensor does not answer"
    row["reasons"] = {name: reason for name, value in row.items() if value is None}
    return row
