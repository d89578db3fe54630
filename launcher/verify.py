"""Checks a rank's output against the oracle, on all of its tokens or on a seeded sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.reference.moe import moe_forward
from megamoe.reference.tolerance import (
    FP8_TENSOR_CORE_BITS,
    FP32_BITS,
    Closeness,
    Tolerance,
    closeness,
    oracle_tolerance,
)
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["Verdict", "against_oracle", "judge", "sample_rows"]


@dataclass(frozen=True)
class Verdict:
    """A comparison, and what was allowed.

    Attributes:
        tokens: rows compared.
        error: rms error relative to the rms of the token's row.
        allowed: the bound on it.
        worst: largest error of an element, relative to its row's rms.
        problem: "" or what is wrong, with index and both values.
    """

    tokens: int
    error: float
    allowed: float
    worst: float
    problem: str

    @property
    def ok(self) -> bool:
        """Whether the comparison held."""
        return not self.problem

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "ok": self.ok,
            "tokens": self.tokens,
            "rel_err": self.error,
            "allowed": self.allowed,
            "worst": self.worst,
            "problem": self.problem or None,
        }


def judge(actual: Tensor, expected: Tensor, tolerance: Tolerance) -> Verdict:
    """Compares outputs [T, H] of any float dtype."""
    found: Closeness = closeness(actual, expected, tolerance)
    problem = found.problem
    if problem:
        problem += (
            f" at (token, column) {found.where}: {found.actual!r}, expected {found.expected!r}"
        )
    return Verdict(actual.shape[0], found.norm, tolerance.norm, found.worst, problem)


def sample_rows(num_tokens: int, most: int, seed: int) -> Tensor:
    """Ascending indices of at most ``most`` of a rank's tokens; the first and last are in it."""
    if num_tokens <= most:
        return torch.arange(num_tokens)
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randperm(num_tokens - 2, generator=generator)[: max(0, most - 2)] + 1
    ends = torch.tensor([0, num_tokens - 1][:most])
    return torch.cat([ends, inner]).sort().values


def against_oracle(
    spec: MoESpec,
    rows: Tensor,
    x: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    y: Tensor,
    expert: Callable[[int], ExpertWeights],
    shared: Sequence[ExpertWeights] = (),
    *,
    on_gpu: bool = False,
) -> tuple[Verdict, Tensor]:
    """Runs the oracle on some rows of a call.

    Args:
        spec: the layer.
        rows: int64 [N], the rows to compare.
        x: BF16 [T, H].
        topk_idx: [T, K].
        topk_weight: FP32 [T, K].
        y: BF16 [T, H], what the layer gave.
        expert: makes a routed expert from its global id.
        shared: the shared experts.
        on_gpu: allow the shorter accumulator of Hopper's FP8 tensor core.

    Returns:
        The verdict, and the oracle's BF16 [N, H].
    """
    ids = topk_idx[rows].cpu()
    needed = sorted({e for e in ids.flatten().tolist() if e >= 0})
    expected = moe_forward(
        spec,
        x[rows].cpu(),
        ids,
        topk_weight[rows].cpu(),
        {e: expert(e) for e in needed},
        shared,
    )
    bits = FP8_TENSOR_CORE_BITS if on_gpu and spec.weight_dtype == "fp8" else FP32_BITS
    return judge(y[rows].cpu(), expected, oracle_tolerance(spec, len(rows), bits)), expected
