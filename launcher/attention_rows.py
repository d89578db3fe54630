"""What the benchmarks of attention-pre share: shapes, floor, copies of weights, checks, times.

Method: a CUDA graph of many runs rotates over several copies of weights and caches, together
several times L2, so that every run reads its weights from memory (cold), or stays on one copy
(warm); the time is the graph's over its runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from launcher.estimates import H200
from launcher.ranks import sampler_of
from megamoe.attention_pre.data import random_weights
from megamoe.attention_pre.plan import Buffer
from megamoe.attention_pre.tiling import Batch
from megamoe.backends.attention_operands import TORCH_DTYPES
from megamoe.errors import MegaMoeError, SpecError
from megamoe.reference.attention_pre import AttentionPreOracle
from megamoe.spec import AttentionPreSpec

__all__ = [
    "MAX_ERROR",
    "SCORES",
    "Copies",
    "Row",
    "Timing",
    "batch_of",
    "floor_us",
    "need_right",
    "score_error",
    "table_row",
    "time_graph",
    "time_replays",
]

Row = dict[str, Any]
SCORES: Final = "E1.paged_logits.out"
"""Buffer of the scores, FP32 [M, keys]."""
_NEW_TOKENS: Final = 8
MAX_ERROR: Final = 2e-2
"""Relative error of scores against the oracle's own quantised pipeline: e4m3 codes round the other
way here and there, which moves scores by 0.009–0.014 whatever the shape."""


def batch_of(rows: int, kv: int) -> Batch:
    """Requests of up to 8 new tokens with ``kv`` keys each.

    Raises:
        SpecError: rows of unlike requests, or more new tokens than keys.
    """
    new = min(rows, _NEW_TOKENS)
    if rows < 1 or rows % new:
        below = rows // _NEW_TOKENS * _NEW_TOKENS
        raise SpecError(
            f"--tokens {rows}: requests bring {_NEW_TOKENS} tokens each: give 1 to {_NEW_TOKENS}, "
            f"or a multiple of it, like {max(below, _NEW_TOKENS)} or {below + _NEW_TOKENS}"
        )
    if kv < new:
        raise SpecError(
            f"--kv {kv}: the {new} new tokens of each request are among its keys: give at least "
            f"{new}"
        )
    return Batch(((new, kv),) * (rows // new))


def floor_us(tensors: Mapping[str, Tensor], batch: Batch, spec: AttentionPreSpec) -> float:
    """Bytes that must be read, over the read ceiling: weights, keys, inputs."""
    weights = sum(t.nbytes for name, t in tensors.items() if name.startswith("w_"))
    keys = sum(keys for _, keys in batch.requests) * (128 + 4)
    inputs = 2 * batch.rows * spec.hidden * 2
    return (weights + keys + inputs) / H200.read * 1e6


@dataclass
class Copies:
    """Weights of a layer on the device, several times; and buffers of plans on each.

    Attributes:
        spec: the layer.
        host: the weights.
        weights: copies on the device, by name.
    """

    spec: AttentionPreSpec
    host: Mapping[str, Tensor]
    weights: list[dict[str, Tensor]] = field(default_factory=list)

    @staticmethod
    def make(spec: AttentionPreSpec, longest: int, count: int) -> Copies:
        """Random weights for requests of up to ``longest`` keys."""
        return Copies.of(spec, random_weights(spec, longest, seed=0), count)

    @staticmethod
    def of(spec: AttentionPreSpec, host: Mapping[str, Tensor], count: int) -> Copies:
        """Copies of given weights."""
        return Copies(spec, host, [{n: t.cuda() for n, t in host.items()} for _ in range(count)])

    def tensors(
        self, buffers: Mapping[str, Buffer], given: Mapping[str, Tensor], count: int | None = None
    ) -> list[dict[str, Tensor]]:
        """A plan's buffers beside each copy.

        Args:
            buffers: of the plan (``EncodedPlan.buffers``).
            given: inputs and caches on the host; each copy gets its own. All others hold NaN.
            count: how many copies; all of them by default.
        """
        every = []
        for weights in self.weights[:count]:
            made: dict[str, Tensor] = {}
            for name, buffer in buffers.items():
                if name in weights:
                    made[name] = weights[name]
                elif name in given:
                    made[name] = given[name].cuda()
                else:
                    shape = tuple(int(d) for d in buffer.shape)
                    made[name] = torch.empty(shape, dtype=TORCH_DTYPES[buffer.dtype], device="cuda")
                    made[name].view(torch.uint8).fill_(0xFF)
            every.append(made)
        return every


def score_error(copies: Copies, batch: Batch, given: Mapping[str, Tensor], found: Tensor) -> float:
    """Relative error of scores: norm of the difference from the oracle's over theirs.

    Args:
        copies: the weights.
        batch: the shape.
        given: inputs and caches as the run had them; left as they are.
        found: FP32 [M, keys], scores of the run.

    Returns:
        NaN where a key is scored that its token may not see.
    """
    inputs = {name: t.clone() for name, t in given.items()}
    new = [n for n, _ in batch.requests]
    scores = AttentionPreOracle(copies.spec, copies.host).run(inputs, new).scores
    got_all = found.cpu().double()
    difference = reference = 0.0
    row = 0
    for count, expected in zip(new, scores, strict=True):
        got = got_all[row : row + count, : expected.shape[1]]
        seen = ~expected.isinf()
        if not bool((got[~seen] == -torch.inf).all()):
            return math.nan
        difference += float((got - expected)[seen].square().sum())
        reference += float(expected[seen].square().sum())
        row += count
    return math.sqrt(difference / reference)


def need_right(variant: str, batch: Batch, error: float) -> None:
    """Refuses to time what is wrong.

    Raises:
        MegaMoeError: the error of the scores is above ``MAX_ERROR``, or NaN.
    """
    if not error < MAX_ERROR:
        keys = max(keys for _, keys in batch.requests)
        raise MegaMoeError(
            f"{variant}, M = {batch.rows}, {keys} keys: relative error of the scores {error}, "
            f"more than {MAX_ERROR}; not timed"
        )


@dataclass(frozen=True)
class Timing:
    """Microseconds per run, of several replays of a graph; and the GPU's state meanwhile."""

    median_us: float
    p99_us: float
    sm_mhz: float | None
    watts: float | None
    throttle: list[str] | None


def time_replays(
    launch: Callable[[int], object], runs: int, replays: int, *, state: bool = True
) -> Timing:
    """Times ``launch(i)``, the i-th replay of a graph of ``runs`` runs, on the current stream.

    Args:
        launch: enqueues a replay.
        runs: in the graph.
        replays: that are timed, after three that are not.
        state: whether clocks, power and throttling are read, during fifty more.
    """
    for i in range(3):
        launch(i)
    samples = []
    for i in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # the host is ahead when the first event is reached
        begin.record()
        launch(i)
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / runs)
    samples.sort()
    median, p99 = statistics.median(samples), samples[math.ceil(0.99 * len(samples)) - 1]
    if not state:
        return Timing(median, p99, None, None, None)
    for i in range(50):  # enough to look at the clocks meanwhile
        launch(i)
    reading = sampler_of(f"cuda:{torch.cuda.current_device()}").read()
    torch.cuda.synchronize()
    clock, events = reading.values.get("sm_clock_hertz"), reading.clocks_events
    return Timing(
        median,
        p99,
        None if clock is None else clock / 1e6,
        reading.values.get("power_watts"),
        None if events is None else [name for name, on in events.items() if on],
    )


def time_graph(launches: Sequence[Callable[[torch.cuda.Stream], None]], replays: int) -> Timing:
    """A graph of all launches on one stream."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch(stream)
    return time_replays(lambda _: graph.replay(), len(launches), replays)


def table_row(variant: str, batch: Batch, l2: str, timing: Timing, **more: Any) -> Row:
    """A row of ``attention_pre_h200.json``."""
    return {
        "variant": variant,
        "m": batch.rows,
        "requests": len(batch.requests),
        "kv": max(keys for _, keys in batch.requests),
        "l2": l2,
        "us": round(timing.median_us, 3),
        "p99_us": round(timing.p99_us, 3),
        "sm_mhz": timing.sm_mhz,
        "watts": timing.watts,
        "throttle": timing.throttle,
        **more,
    }
