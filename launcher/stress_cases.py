"""The cases of ``megamoe stress``: which there are, and one of them on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from launcher.ranks import Group
from megamoe.errors import MegaMoeError, SpecError
from megamoe.spec import EpConfig, MoESpec

if TYPE_CHECKING:
    from torch import Tensor

    from megamoe.backends.base import Counters
    from megamoe.layer import Backend, MoELayer
    from megamoe.weights import ExpertWeights

__all__ = [
    "RINGS",
    "ROUTINGS",
    "Load",
    "StressOptions",
    "blocks_of",
    "config_of",
    "folded",
    "loads_of",
    "numbers",
    "possible",
    "pressure",
    "rows_of",
    "sizes_of",
]

ROUTINGS: Final = (
    "uniform",
    "zipf:0.8",
    "zipf:1.01",
    "zipf:1.2",
    "lognormal",
    "hot_expert",
    "hot_rank",
    "all_to_one",
    "one_expert",
    "local",
    "remote",
    "empty_rank",
    "uniform+masked:0.4",
    "zipf+duplicates:0.5",
    "hot_rank+duplicates+masked",
)
"""The distributions of a run (``launcher.workloads``)."""

RINGS: Final = ((0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 5), (8, 8))
"""Blocks of the L1 and L2 ring; (0, 0) holds a whole call and is what the others must equal."""

TOKENS: Final = ("{}", "ramp:{}", "empty:{}")
"""Tokens per rank; in a soak each has a graph of its own in each layer."""


@dataclass(frozen=True)
class StressOptions:
    """What to compare.

    Attributes:
        spec: the layer.
        tokens: the most tokens of a rank.
        seeds: how many, of each routing.
        sizes: EP sizes.
        block_m: rows of a ring block.
        workers: of a rank.
        backend: of the layers.
        timeout: limit of each wait inside a call, s.
        replay: a recorded routing, or None.
        output: where results go, or None.
        json: print one JSON object.
    """

    spec: MoESpec
    tokens: int
    seeds: int
    sizes: tuple[int, ...]
    block_m: tuple[int, ...]
    workers: int
    backend: Backend
    timeout: float
    replay: Path | None
    output: Path | None
    json: bool


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Reads ``1,2,4``; what is there twice counts once.

    Raises:
        SpecError: it is not of that form.
    """
    parts = text.split(",")
    if not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise SpecError(f"{option} {text!r}: write numbers like 1,2,4")
    return tuple(dict.fromkeys(int(p) for p in parts))


def sizes_of(text: str, num_ranks: int, spec: MoESpec, *, endless: bool) -> tuple[int, ...]:
    """EP sizes that this group can show; a soak is of all its ranks.

    Raises:
        SpecError: there is none, or one does not divide the experts.
    """
    sizes = tuple(sorted({n for n in numbers("--sizes", text) if n <= num_ranks}))
    if not sizes:
        raise SpecError(f"--sizes {text!r}: all are above the {num_ranks} ranks of this group")
    for size in (num_ranks,) if endless else sizes:
        if spec.num_experts % size:
            raise SpecError(
                f"--experts {spec.num_experts} cannot be shared by {size} ranks: give a multiple "
                f"of {size}" + ("" if endless else f", or leave {size} out of --sizes")
            )
    return sizes


@dataclass(frozen=True)
class Load:
    """A call's worth of routing: what ring sizes are varied under."""

    routing: str
    tokens: tuple[int, ...]
    seed: int


def possible(routing: str, num_ranks: int) -> bool:
    """Whether so many ranks can show it."""
    return num_ranks > 1 or not routing.startswith(("remote", "empty_rank"))


def config_of(options: StressOptions, num_ranks: int, block_m: int) -> EpConfig:
    """How a group of an EP size runs the layer, but for its rings.

    Raises:
        SpecError: an option is out of its range.
    """
    return EpConfig(
        num_ranks=num_ranks,
        max_tokens=options.tokens,
        block_m=block_m,
        num_workers=options.workers,
        timeout_s=options.timeout,
    )


def loads_of(options: StressOptions, num_ranks: int) -> Iterator[Load]:
    """Routings, tokens and seeds of an EP size."""
    from launcher.workloads import tokens_per_rank

    replay = () if options.replay is None else (f"replay:{options.replay}",)
    for seed in range(options.seeds):
        seen = set()
        for pattern in TOKENS:
            tokens = tuple(tokens_per_rank(pattern.format(options.tokens), num_ranks))
            if tokens in seen or not any(tokens):
                continue
            seen.add(tokens)
            for routing in (*ROUTINGS, *replay):
                if possible(routing, num_ranks):
                    yield Load(routing, tokens, seed)


def rows_of(
    group: Group, options: StressOptions, loads: list[Load]
) -> Iterator[list[dict[str, Any]]]:
    """All cases of one EP size, ring by ring; the first ring holds everything.

    Ranks meet once per ring, not per case: what a case finds is put together afterwards, so that
    they may drift apart meanwhile.
    """
    from megamoe.layer import open_layer
    from megamoe.weights import random_experts

    size = group.num_ranks
    inputs = {load: _inputs(group, options.spec, load) for load in loads}
    largest: dict[Load, tuple[Tensor, float, str]] = {}
    for block_m, (ring_l1, ring_l2) in product(options.block_m, RINGS):
        base = config_of(options, size, block_m)
        most = base.max_blocks(options.spec)
        config = replace(base, ring_l1_blocks=ring_l1 or most, ring_l2_blocks=ring_l2 or most)
        with open_layer(
            options.spec, config, backend=options.backend, rendezvous=group.rendezvous()
        ) as layer:
            layer.load_weights(random_experts(options.spec, group.rank, size, seed=0))
            mine = [_case(group, layer, load, inputs[load], largest) for load in loads]
            every = zip(*group.gather(mine), strict=True)
            yield [_row(options, layer, load, of) for load, of in zip(loads, every, strict=True)]


@dataclass(frozen=True)
class _Inputs:
    """x, ids and weights of this rank, on the CPU and on its device."""

    here: tuple[Tensor, Tensor, Tensor]
    there: tuple[Tensor, Tensor, Tensor]


def _inputs(group: Group, spec: MoESpec, load: Load) -> _Inputs:
    from launcher.workloads import random_activations, route

    rank, tokens, seed = group.rank, load.tokens[group.rank], load.seed
    x = random_activations(spec, rank, tokens, seed)
    idx, weight = route(load.routing, spec, group.num_ranks, rank, tokens, seed=seed)
    there = (x.to(group.device), idx.to(group.device), weight.to(group.device))
    return _Inputs((x, idx, weight), there)


def _case(
    group: Group,
    layer: MoELayer,
    load: Load,
    inputs: _Inputs,
    largest: dict[Load, tuple[Tensor, float, str]],
) -> dict[str, Any]:
    """One case on one rank: what it found there."""
    import torch

    layer.clear_counters()
    y = layer.run(*inputs.there).cpu()
    counters = layer.counters()

    # The largest ring comes first, and is compared with the oracle; what equals it need not be.
    if load not in largest:
        largest[load] = (y, *_judge(group, layer.spec, load, inputs.here, y))
    first, error, problem = largest[load]
    # Bits, not values: NaN and -0 count.
    same = torch.equal(y.view(torch.int16), first.view(torch.int16))
    if not same:
        error, problem = _judge(group, layer.spec, load, inputs.here, y)
    events, l1, l2 = pressure(layer, counters)
    return {
        "same": same,
        "error": error,
        "problem": problem,
        "events": events,
        "l1": l1,
        "l2": l2,
        "idx": inputs.here[1],
    }


def _row(
    options: StressOptions, layer: MoELayer, load: Load, every: tuple[dict[str, Any], ...]
) -> dict[str, Any]:
    """A case of all ranks."""
    from launcher.workloads import skew

    spec, config = options.spec, layer.config
    ring_l1, ring_l2 = config.ring_l1_blocks, config.ring_l2_blocks
    spread = skew([m["idx"] for m in every], spec)
    blocks = blocks_of(spec, config, [m["idx"] for m in every])
    return {
        "routing": load.routing,
        "ring_blocks_l1": ring_l1,
        "ring_blocks_l2": ring_l2,
        "block_m": config.block_m,
        "ranks": config.num_ranks,
        "tokens_per_rank": list(load.tokens),
        "seed": load.seed,
        "bitwise_equal": all(m["same"] for m in every),
        "max_rel_err": float(f"{max(m['error'] for m in every):.4g}"),
        "backpressure_events": folded(sum, [m["events"] for m in every]),
        "high_water_l1": folded(max, [m["l1"] for m in every]),
        "high_water_l2": folded(max, [m["l2"] for m in every]),
        "blocks": max(blocks),
        "reuses_l1": sum(max(0, n - ring_l1) for n in blocks),
        "reuses_l2": sum(max(0, n - ring_l2) for n in blocks),
        "max_over_mean": round(spread.max_over_mean, 3),
        "skew": {name: round(value, 4) for name, value in spread.to_dict().items()},
        "ok": all(m["same"] and not m["problem"] for m in every),
        "problem": "; ".join(m["problem"] for m in every if m["problem"]) or None,
    }


def pressure(layer: MoELayer, counters: Counters) -> tuple[int | None, int | None, int | None]:
    """Waits for a free block, and the most blocks in use of both rings: counted, or traced."""
    import numpy as np

    from launcher.moe_trace import ring_depth

    counted = counters.backpressure_events, counters.high_water_l1, counters.high_water_l2
    if counters.backpressure_events is not None:
        return counted
    try:
        trace = layer.trace()
    except MegaMoeError:  # not a traced build
        return counted
    free = [trace.tags.index(tag) for tag in ("l1_empty", "l2_empty")]
    waited = int(np.isin(trace.of("wait")["a"], free).sum())
    l1, l2 = (ring_depth(trace, ring)[1] for ring in ("l1", "l2"))
    return waited, int(max(l1, default=0)), int(max(l2, default=0))


def blocks_of(spec: MoESpec, config: EpConfig, topk_idx: list[Tensor]) -> list[int]:
    """Blocks that each rank works on; those beyond a ring's capacity take a slot used before."""
    import torch

    rows = torch.stack(
        [torch.bincount(t[t >= 0].flatten(), minlength=spec.num_experts) for t in topk_idx]
    ).sum(0)
    # As ExpertBlocks of schedule.hpp: a tail, where blocks have room for one, spares a last block.
    tail = config.tail_rows
    step = config.block_m - tail

    def blocks(n: Tensor) -> Tensor:
        spared = (n > step) & (n % step > 0) & (n % step <= tail)
        return -(-(n - tail * spared) // step)

    shared = torch.tensor([[t.shape[0]] for t in topk_idx]).expand(-1, spec.num_shared)
    found = torch.cat([rows.view(len(topk_idx), -1), shared], 1)
    return [int(n) for n in blocks(found).sum(1)]


def _judge(
    group: Group, spec: MoESpec, load: Load, inputs: tuple[Tensor, Tensor, Tensor], y: Tensor
) -> tuple[float, str]:
    """Every row of this rank against the oracle: the error, and what is wrong."""
    from launcher.verify import against_oracle, sample_rows

    tokens = y.shape[0]
    if not tokens:
        return 0.0, ""
    shared = [_expert(spec, spec.num_experts + s) for s in range(spec.num_shared)]
    verdict, _ = against_oracle(
        spec,
        sample_rows(tokens, tokens, load.seed),
        *inputs,
        y,
        lambda e: _expert(spec, e),
        shared,
        on_gpu=group.device != "cpu",
    )
    return verdict.error, verdict.problem


@cache
def _expert(spec: MoESpec, expert: int) -> ExpertWeights:
    from megamoe.weights import random_expert

    return random_expert(spec, expert, 0, seed=0)


def folded(fold: Callable[[list[int]], int], counts: list[int | None]) -> int | None:
    """Folds counters; None where a backend does not count."""
    known = [n for n in counts if n is not None]
    return fold(known) if len(known) == len(counts) else None
