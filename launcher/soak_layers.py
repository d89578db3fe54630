"""The layers, graphs and batches of a soak's round (``launcher/soak.py``)."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from launcher.ranks import Group
from launcher.stress_cases import TOKENS, blocks_of
from megamoe.spec import TAILED_BLOCK_M, EpConfig, MoESpec

if TYPE_CHECKING:
    from torch import Tensor

    from megamoe.layer import Backend, MoELayer

__all__ = ["Batch", "Opened", "SoakOptions", "capture", "make_batches", "open_layers"]


@dataclass(frozen=True)
class SoakOptions:
    """What to do.

    Attributes:
        spec: the layer.
        tokens: the most tokens of a rank.
        routings: as ``launcher.workloads.route`` reads them.
        calls: end after so many calls, if not 0.
        seconds: end after so many seconds, if not 0.
        misses: times that a rank misses its call: all ranks raise PeerTimeout, reset and go on.
        layers: how many are open at once.
        rounds: parts of equal length, each with layers and inputs of its own.
        seed: of the plan.
        backend: of the layers.
        timeout_s: limit of each wait inside a call.
        workers: of a rank; 0 takes every core or SM.
        traced: on GPUs, a build that records waits.
    """

    spec: MoESpec
    tokens: int
    routings: tuple[str, ...]
    calls: int
    seconds: float
    misses: int
    layers: int
    rounds: int
    seed: int
    backend: Backend
    timeout_s: float
    workers: int
    traced: bool


@dataclass
class Batch:
    """A call's inputs on this rank, and the output it must give."""

    routing: str
    pattern: int
    inputs: list[Tensor]
    want: Tensor
    every_idx: list[Tensor]
    """Routes of all ranks."""


@dataclass
class Opened:
    """A layer with its graphs, by token pattern; none on CPU ranks."""

    layer: MoELayer
    round: int
    graphs: list[tuple[Any, list[Tensor], Tensor]] = field(default_factory=list)
    reuses: list[bool] = field(default_factory=list)
    """By batch: whether a rank has more blocks than the ring."""
    calls: int = 0

    def figures(self) -> dict[str, int]:
        """What it was, and how often it was called."""
        config = self.layer.config
        return {
            "round": self.round,
            "ring_blocks_l1": config.ring_l1_blocks,
            "ring_blocks_l2": config.ring_l2_blocks,
            "block_m": config.block_m,
            "wave_blocks": config.wave_blocks,
            "calls": self.calls,
        }


def open_layers(
    group: Group, options: SoakOptions, plan: random.Random, number: int, stack: ExitStack
) -> list[Opened]:
    """The layers of a round; the stack closes them."""
    from megamoe.layer import open_layer
    from megamoe.weights import random_experts

    # Read as a layer opens; groups of one process open theirs one after the other.
    os.environ["MEGAMOE_TRACE"] = str(int(options.traced))
    layers = []
    for config in _configs(group, options, plan):
        layer = group.together(
            lambda config=config: open_layer(  # type: ignore[misc]
                options.spec, config, backend=options.backend, rendezvous=group.rendezvous()
            )
        )
        stack.enter_context(layer)
        layer.load_weights(random_experts(options.spec, group.rank, group.num_ranks, seed=0))
        layers.append(Opened(layer, number))
    return layers


def _configs(group: Group, options: SoakOptions, plan: random.Random) -> list[EpConfig]:
    """The largest rings first; then the smallest; then the recommendation; then random ones."""
    base = EpConfig(
        num_ranks=group.num_ranks,
        max_tokens=options.tokens,
        block_m=8,
        num_workers=options.workers,
        timeout_s=options.timeout_s,
    )
    most = base.max_blocks(options.spec)
    configs = [
        replace(base, ring_l1_blocks=most, ring_l2_blocks=most),
        replace(base, ring_l1_blocks=1, ring_l2_blocks=1, wave_blocks=1),
        replace(base, block_m=0),
    ]
    while len(configs) < options.layers:
        b1, b2 = plan.randint(1, 12), plan.randint(1, 12)
        configs.append(
            replace(
                base,
                block_m=plan.choice((8, 16, 32, 64, 128, TAILED_BLOCK_M)),
                ring_l1_blocks=b1,
                ring_l2_blocks=b2,
                wave_blocks=plan.randint(1, min(b1, b2)),
            )
        )
    return configs[: options.layers]


def make_batches(
    group: Group,
    options: SoakOptions,
    plan: random.Random,
    number: int,
    layers: list[Opened],
) -> tuple[list[Batch], float]:
    """One batch per routing; what the largest rings give, compared with the oracle.

    Returns:
        The batches, and the largest error.
    """
    from launcher.verify import against_oracle, sample_rows
    from launcher.workloads import random_activations, route, tokens_per_rank
    from megamoe.weights import random_expert

    spec, batches, layer, worst = options.spec, [], layers[0].layer, 0.0
    # A pattern's batches have the same tokens: they share a graph.
    least = options.tokens if number == 0 else max(1, options.tokens // 8)
    most = [plan.randint(least, options.tokens) for _ in TOKENS]
    experts = [random_expert(spec, e, 0, seed=0) for e in range(spec.num_experts + spec.num_shared)]
    for i, routing in enumerate(options.routings):
        pattern = (i + number) % len(TOKENS)
        counts = tokens_per_rank(TOKENS[pattern].format(most[pattern]), group.num_ranks)
        tokens, seed = counts[group.rank], 10_000 * options.seed + 100 * number + i
        x = random_activations(spec, group.rank, tokens, seed)
        idx, weight = route(routing, spec, group.num_ranks, group.rank, tokens, seed=seed)
        inputs = [t.to(group.device) for t in (x, idx.int(), weight)]
        want = layer.run(inputs[0], inputs[1], inputs[2])
        error, problem = 0.0, ""
        if tokens:
            verdict, _ = against_oracle(
                spec,
                sample_rows(tokens, 16, seed),
                x,
                idx,
                weight,
                want.cpu(),
                experts.__getitem__,
                experts[spec.num_experts :],
                on_gpu=group.device != "cpu",
            )
            error, problem = verdict.error, verdict.problem
        found = group.gather((error, idx))
        group.together(lambda problem=problem, routing=routing: _need_right(routing, problem))  # type: ignore[misc]
        worst = max(worst, *(e for e, _ in found))
        batches.append(Batch(routing, pattern, inputs, want, [i for _, i in found]))
    for opened in layers:
        config = opened.layer.config
        least_ring = min(config.ring_l1_blocks, config.ring_l2_blocks)
        opened.reuses = [max(blocks_of(spec, config, b.every_idx)) > least_ring for b in batches]
    return batches, worst


def _need_right(routing: str, problem: str) -> None:
    from megamoe.errors import MegaMoeError

    if problem:
        raise MegaMoeError(f"{routing} on the largest rings differs from the oracle: {problem}")


def capture(opened: Opened, batches: list[Batch]) -> None:
    """A graph of a call for each token pattern."""
    import torch

    for pattern in range(len(TOKENS)):
        held = [t.clone() for t in next(b for b in batches if b.pattern == pattern).inputs]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # torch's own is of the first GPU that captured
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            y = opened.layer.run(held[0], held[1], held[2])
        opened.graphs.append((graph, held, y))
