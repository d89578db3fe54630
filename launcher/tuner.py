"""The ranks' part of ``megamoe tune``: a search over rings, waves and lags of one layer.

Each candidate runs beside the best configuration so far, call by call in turns, on the same inputs,
and must give the same bits. It replaces the best if it is faster by more than a margin, over all
token counts together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from launcher.ranks import Group
from launcher.sessions import enqueue, open_session
from launcher.timing import Times, take_turns
from launcher.workloads import random_activations, route
from megamoe.backends.base import Session, device_name
from megamoe.errors import CapacityError, SpecError
from megamoe.layer import Backend, choose_backend
from megamoe.spec import TAILED_BLOCK_M, EpConfig, MoESpec
from megamoe.tuning import TUNABLE
from megamoe.weights import ExpertWeights, random_experts

__all__ = ["Timer", "Trial", "TuneOptions", "neighbours", "other_blocks", "search", "tune"]

_BLOCKS: Final = {"cpu": (16, 32, 64, 128), "cuda": (32, 64, 128, TAILED_BLOCK_M)}
_FULL_BLOCK_M: Final = 128
"""Rows of a block with room for a tail that has none."""
_STEPS: Final = (
    ("ring_l1_blocks", "ring_l2_blocks"),
    ("wave_blocks",),
    ("l2_lag_blocks",),
    ("ring_l1_blocks",),
    ("ring_l2_blocks",),
)
"""Fields that a step halves or doubles together."""


@dataclass(frozen=True)
class TuneOptions:
    """What to search.

    Attributes:
        spec: the layer.
        max_tokens: of the group.
        tokens: token counts per rank that matter, each as much as the others.
        routing: as ``route`` reads it.
        workers: CPU threads per rank; 0 shares out the cores.
        backend: of the layer.
        margin: a candidate must be faster by this part.
        rounds: turns of each candidate.
        calls: timed calls in a turn.
        seed: of weights, activations and routes.

    Raises:
        SpecError: token counts beyond ``max_tokens``.
    """

    spec: MoESpec
    max_tokens: int
    tokens: Sequence[int]
    routing: str
    workers: int
    backend: Backend
    margin: float
    rounds: int
    calls: int
    seed: int

    def __post_init__(self) -> None:
        if max(self.tokens) > self.max_tokens:
            raise SpecError(
                f"--tokens {max(self.tokens)} exceeds --max-tokens {self.max_tokens}: a group "
                "takes no more in one call"
            )

    def config(self, num_ranks: int) -> EpConfig:
        """What layers are opened with: all that a search chooses is 0.

        Raises:
            SpecError: an option is out of its range.
        """
        return EpConfig(num_ranks=num_ranks, max_tokens=self.max_tokens, num_workers=self.workers)


@dataclass(frozen=True)
class Trial:
    """A configuration beside the best so far.

    Attributes:
        config: all fields set.
        us: per token count, µs: the median on GPUs; on CPUs, where other programs disturb, the
            fastest call.
        best_us: of the best so far, in the same turns.
        ratio: geometric mean of ``us / best_us``; below 1: faster.
        bitwise_equal: whether all results had the recommendation's bits.
        window_bytes: symmetric memory of a rank.
        taken: whether it became the best.
    """

    config: EpConfig
    us: dict[int, float]
    best_us: dict[int, float]
    ratio: float
    bitwise_equal: bool
    window_bytes: int
    taken: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            **{name: getattr(self.config, name) for name in TUNABLE},
            "us": {str(t): round(us, 1) for t, us in self.us.items()},
            "best_us": {str(t): round(us, 1) for t, us in self.best_us.items()},
            "ratio": round(self.ratio, 4),
            "bitwise_equal": self.bitwise_equal,
            "window_bytes": self.window_bytes,
            "taken": self.taken,
        }


Timer = Callable[[dict[str, Callable[[], object]]], dict[str, Times]]
"""Collective: times of calls that take turns, by name."""


def neighbours(
    best: EpConfig, fields: Sequence[str], spec: MoESpec, resolve: Callable[[EpConfig], EpConfig]
) -> Iterator[EpConfig]:
    """Configurations with ``fields`` halved, then doubled, where a group could run them."""
    for factor in (0.5, 2.0):
        changed = {f: max(1, int(getattr(best, f) * factor)) for f in fields}
        for name in ("ring_l1_blocks", "ring_l2_blocks"):
            if name in changed:
                changed[name] = min(changed[name], best.max_blocks(spec))
        try:
            candidate = resolve(replace(best, **changed))
        except (CapacityError, SpecError):
            continue
        if candidate != best:
            yield candidate


def search(
    start: EpConfig,
    blocks: Sequence[EpConfig],
    spec: MoESpec,
    resolve: Callable[[EpConfig], EpConfig],
    measure: Callable[[EpConfig, EpConfig], Trial],
    margin: float,
    on_trial: Callable[[Trial], object] = lambda trial: None,
) -> tuple[EpConfig, list[Trial]]:
    """Coordinate descent: each step halves or doubles one thing and follows what is faster.

    Args:
        start: the recommendation.
        blocks: recommendations for other block sizes, tried first.
        spec: the layer.
        resolve: completes a configuration, or raises.
        measure: runs a candidate beside the best.
        margin: a candidate must be faster by this part.
        on_trial: called after each trial.

    Returns:
        The best configuration and all trials, in order; the last is the best beside the start.
    """
    best, trials, seen = start, [], {start}

    def try_one(candidate: EpConfig) -> bool:
        nonlocal best
        if candidate in seen:
            return False
        seen.add(candidate)
        trial = measure(candidate, best)
        faster = trial.bitwise_equal and trial.ratio < 1 - margin
        trial = replace(trial, taken=faster)
        trials.append(trial)
        on_trial(trial)
        if faster:
            best = candidate
        return faster

    for candidate in blocks:
        try_one(candidate)
    for fields in _STEPS:
        going = True
        while going:
            going = any(try_one(c) for c in neighbours(best, fields, spec, resolve))
    if best != start:
        # Many small steps may each be noise: what they led to must hold against the start.
        last = measure(best, start)
        holds = last.bitwise_equal and last.ratio < 1 - margin
        trials.append(replace(last, taken=holds))
        on_trial(trials[-1])
        best = best if holds else start
    return best, trials


# ---------------------------------------------------------------- on ranks


def tune(
    group: Group, options: TuneOptions, on_trial: Callable[[Trial], object] = lambda trial: None
) -> dict[str, Any]:
    """Collective: searches, and returns ``{"device", "start", "chosen", "trials"}``.

    Raises:
        SpecError: ranks do not divide the experts.
    """
    backend = choose_backend(options.backend)
    open_config = options.config(group.num_ranks)
    resolve = _resolver(options.spec, backend)
    start = group.together(lambda: resolve(open_config))
    blocks = other_blocks(backend, open_config, start, resolve)
    runner = _Runner(group, options, start)
    try:
        best, trials = search(
            start, blocks, options.spec, resolve, runner.measure, options.margin, on_trial
        )
    finally:
        runner.close()
    return {
        "device": device_name(backend),
        "open": open_config,
        "start": start,
        "chosen": best,
        "trials": trials,
    }


def other_blocks(
    backend: str, config: EpConfig, start: EpConfig, resolve: Callable[[EpConfig], EpConfig]
) -> list[EpConfig]:
    """Recommendations for block sizes that the recommendation has not.

    Args:
        backend: ``"cpu"`` or ``"cuda"``.
        config: what layers are opened with.
        start: the recommendation.
        resolve: completes a configuration.
    """
    found = []
    for size in _BLOCKS[backend]:
        candidate = replace(config, block_m=size)
        # A token's routes are of different experts: none has more rows than the group has tokens,
        # and blocks with tails, a build of their own, are others only where one exceeds a block.
        tailed = candidate.tail_rows == 0 or config.num_ranks * config.max_tokens > _FULL_BLOCK_M
        if size != start.block_m and tailed:
            found.append(resolve(candidate))
    return found


def _resolver(spec: MoESpec, backend: str) -> Callable[[EpConfig], EpConfig]:
    if backend == "cuda":
        from megamoe.backends.cuda import cuda_config

        return lambda config: cuda_config(spec, config)
    return lambda config: config.resolved(spec)


def _timer(group: Group, options: TuneOptions) -> Timer:
    rounds, calls = options.rounds, options.calls
    if group.device != "cpu":
        from launcher.gpu_timing import GpuTimer

        gpu = GpuTimer(group)
        return lambda todo: gpu.bursts(todo, rounds, calls)
    return lambda todo: take_turns(group, todo, rounds=rounds, calls_per_round=calls)


class _Batch:
    """Inputs of a call on this rank, and where its result goes."""

    def __init__(self, group: Group, options: TuneOptions, tokens: int) -> None:
        spec, seed, device = options.spec, options.seed, group.device
        idx, weight = route(options.routing, spec, group.num_ranks, group.rank, tokens, seed)
        self.x = random_activations(spec, group.rank, tokens, seed).to(device)
        self.idx = idx.int().contiguous().to(device)
        self.weight = weight.contiguous().to(device)
        self.out = torch.empty_like(self.x)

    def enqueue(self, session: Session) -> None:
        """One call, staging included; on a GPU without waiting for it."""
        enqueue(session, self.x, self.idx, self.weight, self.out)

    def result(self, session: Session) -> Tensor:
        """One call's output as int16 bits [T, H], on the CPU."""
        self.out.fill_(float("nan"))
        self.enqueue(session)
        session.check()
        return self.out.view(torch.int16).cpu().clone()


class _Runner:
    """Opens candidates, holds the best one's session, compares bits and times."""

    def __init__(self, group: Group, options: TuneOptions, start: EpConfig) -> None:
        self._group, self._options = group, options
        self._timer = _timer(group, options)
        spec, rank, seed = options.spec, group.rank, options.seed
        self._experts: list[ExpertWeights] = group.together(
            lambda: list(random_experts(spec, rank, group.num_ranks, seed, device=group.device))
        )
        self._batches = group.together(
            lambda: {t: _Batch(group, options, t) for t in options.tokens}
        )
        self._sessions = {start: self._open(start)}
        self._expected = {t: b.result(self._sessions[start]) for t, b in self._batches.items()}

    def _open(self, config: EpConfig) -> Session:
        spec = self._options.spec
        session = self._group.together(lambda: open_session(self._group, spec, config))
        self._group.together(lambda: session.load_weights(self._experts))
        return session

    def measure(self, candidate: EpConfig, best: EpConfig) -> Trial:
        """Collective: both configurations on every batch."""
        for config in [c for c in self._sessions if c not in (candidate, best)]:
            self._sessions.pop(config).close()
        for config in (best, candidate):
            if config not in self._sessions:
                self._sessions[config] = self._open(config)
        new, old = self._sessions[candidate], self._sessions[best]
        same, us, best_us = True, {}, {}
        for tokens, batch in self._batches.items():
            same = same and torch.equal(batch.result(new), self._expected[tokens])
            times = self._timer(
                {"best": partial(batch.enqueue, old), "candidate": partial(batch.enqueue, new)}
            )
            old.check()
            new.check()
            us[tokens], best_us[tokens] = (self._figure(times[n]) for n in ("candidate", "best"))
        logs = [math.log(us[t] / best_us[t]) for t in us]
        return Trial(
            config=candidate,
            us=us,
            best_us=best_us,
            ratio=math.exp(sum(logs) / len(logs)),
            bitwise_equal=all(self._group.gather(same)),
            window_bytes=new.counters().window_bytes,
        )

    def _figure(self, times: Times) -> float:
        return times.best_us if self._group.device == "cpu" else times.median_us

    def close(self) -> None:
        """Frees sessions."""
        for session in self._sessions.values():
            session.close()
        self._sessions = {}
