"""One generator of MoE cases for the oracle, the CPU backend and the GPU tests.

A ``Case`` is a recipe; ``inputs(rank)`` and ``experts(rank)`` make that rank's tensors from the
seed alone, so that any process can build any part, and ``expected()`` runs the oracle on the whole
batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from launcher.workloads import random_activations, route
from megamoe.reference.moe import MoEDetail, moe_forward_detail
from megamoe.reference.quant import quantize_1x128
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights, random_experts


@dataclass(frozen=True)
class Case:
    """One call of one layer.

    Attributes:
        name: test id.
        spec: the layer.
        tokens: T of every rank; its length is the number of ranks.
        routing: see launcher/workloads.py.
        x_kind: "bf16", or "fp8" (the caller brings quantised activations).
        index_dtype: of topk_idx.
        special: "" or what is put into the activations: "zeros" (zero and tiny groups), "nan"
            (a NaN and an Inf row).
        seed: of everything.
    """

    name: str
    spec: MoESpec
    tokens: tuple[int, ...]
    routing: str = "uniform"
    x_kind: str = "bf16"
    index_dtype: torch.dtype = torch.int64
    special: str = ""
    seed: int = 1

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    def inputs(self, rank: int) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, Tensor]:
        """(x, topk_idx, topk_weight) of a rank."""
        tokens = self.tokens[rank]
        x = random_activations(self.spec, rank, tokens, self.seed)
        if tokens and self.special == "zeros":
            x[:, :128] = 0
            x[:, 128:256] *= 2.0**-120  # below the floor of a group's amax
            x[0] *= 2.0**-40  # small all over: must keep its relative precision
            x[-1] = 0
        if tokens and self.special == "nan":
            x[0, 5] = float("nan")
            x[-1, self.spec.hidden - 1] = float("inf")
        ids, weight = route(self.routing, self.spec, self.num_ranks, rank, tokens, seed=self.seed)
        # A masked route's weight must never be read: poison it.
        weight = torch.where(ids < 0, float("nan"), weight)
        ids = ids.to(self.index_dtype)
        return (quantize_1x128(x) if self.x_kind == "fp8" else x), ids, weight

    def experts(self, rank: int) -> list[ExpertWeights]:
        """Local experts of a rank."""
        local = self.spec.experts_per_rank(self.num_ranks)
        every = _all_experts(self.spec, self.seed)
        routed = every[rank * local : (rank + 1) * local]
        shared = every[self.spec.num_experts :]
        return [replace(e, index=i) for i, e in enumerate((*routed, *shared))]

    def expected_detail(self) -> MoEDetail:
        """The oracle's result for all ranks' tokens, rank 0 first."""
        parts = [self.inputs(r) for r in range(self.num_ranks)]
        if self.x_kind == "fp8":
            x = tuple(torch.cat([p[0][i].float() for p in parts]) for i in range(2))
            x = (x[0].to(torch.float8_e4m3fn), x[1])
        else:
            x = torch.cat([p[0] for p in parts])
        ids, weight = (torch.cat([p[i] for p in parts]) for i in (1, 2))
        every = _all_experts(self.spec, self.seed)
        routed, shared = every[: self.spec.num_experts], every[self.spec.num_experts :]
        return moe_forward_detail(self.spec, x, ids, weight, routed, shared)

    def expected(self) -> list[Tensor]:
        """y of every rank."""
        return list(self.expected_detail().y.split(self.tokens))


@functools.lru_cache(maxsize=8)
def _all_experts(spec: MoESpec, seed: int) -> tuple[ExpertWeights, ...]:
    return tuple(random_experts(spec, 0, 1, seed))


def _spec(hidden=256, inter=128, num_experts=8, topk=2, **more) -> MoESpec:
    return MoESpec(hidden=hidden, inter=inter, num_experts=num_experts, topk=topk, **more)


def _base() -> Iterator[Case]:
    """Cases on one rank; ``cases`` spreads them over more."""
    spec = _spec()
    bf16 = replace(spec, weight_dtype="bf16")
    shared = replace(spec, num_shared=1, topk=3)
    yield Case("fp8", spec, (13,))
    yield Case("fp8-x8", spec, (13,), x_kind="fp8")
    yield Case("fp8-int32", spec, (5,), index_dtype=torch.int32)
    yield Case("fp8-one-token", spec, (1,))
    yield Case("fp8-no-token", spec, (0,))
    yield Case("fp8-top1", _spec(topk=1), (7,))
    yield Case("fp8-shared", shared, (9,))
    yield Case("fp8-two-shared-masked", replace(shared, num_shared=2), (9,), "masked:0.5")
    yield Case("fp8-clamp", replace(spec, swiglu_clamp=0.7), (9,))
    yield Case("fp8-masked", spec, (17,), "masked:0.6")
    yield Case("fp8-all-masked", spec, (4,), "masked:1")
    yield Case("fp8-duplicates", _spec(topk=4), (17,), "duplicates:1")
    yield Case("fp8-duplicates-masked", _spec(topk=6), (9,), "duplicates:0.7+masked:0.3")
    yield Case("fp8-one-expert", spec, (70,), "one_expert")
    yield Case("fp8-hot-expert", spec, (40,), "hot_expert:0.8")
    yield Case("fp8-zipf", _spec(num_experts=16, topk=8), (40,), "zipf:1.2")
    yield Case("fp8-zeros", _spec(hidden=384), (16,), special="zeros")
    yield Case("fp8-nan", shared, (6,), special="nan")
    yield Case("fp8-wide", _spec(hidden=512, inter=384, num_experts=4), (20,))
    yield Case("fp8-narrow", _spec(hidden=128, inter=128, num_experts=4), (6,))
    yield Case("bf16", bf16, (13,))
    yield Case("bf16-shared-clamp", replace(bf16, num_shared=1, swiglu_clamp=0.7), (9,), "masked")
    yield Case("bf16-duplicates", replace(bf16, topk=4), (17,), "duplicates:1")
    yield Case("bf16-nan", bf16, (6,), special="nan")
    yield Case("bf16-wide", replace(bf16, hidden=512, inter=384), (20,))


def _spread() -> Iterator[Case]:
    """Cases that need several ranks."""
    spec = _spec()
    shared = replace(spec, num_shared=1)
    yield Case("fp8-unequal", spec, (11, 3), "uniform")
    yield Case("fp8-empty-source", spec, (9, 0), "uniform")
    yield Case("fp8-local", spec, (8, 5), "local")
    yield Case("fp8-remote", shared, (8, 5), "remote")
    yield Case("fp8-all-to-one", spec, (12, 33), "all_to_one")
    yield Case("fp8-empty-rank", spec, (8, 5), "empty_rank")
    yield Case("bf16-unequal", replace(shared, weight_dtype="bf16"), (3, 11), "masked")
    yield Case("fp8-unequal4", shared, (7, 0, 21, 2), "lognormal:1.5")
    yield Case("fp8-all-to-one4", spec, (5, 6, 7, 8), "all_to_one")
    yield Case("fp8-hot-rank4", replace(spec, topk=4), (16, 16, 16, 16), "hot_rank:0.7")
    yield Case("fp8-zipf4", _spec(num_experts=16, topk=6), (9, 17, 0, 30), "zipf+masked:0.2")
    yield Case("fp8-nobody4", shared, (0, 0, 0, 0), "uniform")


def _split(case: Case, num_ranks: int) -> Case:
    """The same amount of tokens dealt unevenly over the ranks."""
    total = case.tokens[0]
    cuts = [total * r * r // (num_ranks * num_ranks) for r in range(num_ranks + 1)]
    tokens = tuple(b - a for a, b in pairwise(cuts))
    return replace(case, tokens=tokens)


def cases(num_ranks: int) -> list[Case]:
    """All cases for a group of this size (1, 2 or 4)."""
    spread = [c for c in _spread() if c.num_ranks == num_ranks]
    return [_split(c, num_ranks) for c in _base()] + spread
