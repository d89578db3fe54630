"""How GPU tests open layers and run cases; ranks are threads that share the current GPU."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import torch

from megamoe.layer import open_layer
from megamoe.reference.tolerance import FP8_TENSOR_CORE_BITS
from megamoe.spec import EpConfig, MoESpec
from tests.cases import Case, cases
from tests.groups import run_group

MINIMUM = EpConfig(num_ranks=1, max_tokens=400, block_m=8, ring_l1_blocks=1, ring_l2_blocks=1)
LARGE = EpConfig(num_ranks=1, max_tokens=400, block_m=32)
BIG = EpConfig(num_ranks=1, max_tokens=400, block_m=144)
"""Blocks over 96 rows take the many-row path, those over 128 have a tail."""


@contextmanager
def opened(spec, config, rendezvous):
    """A layer on a stream of its own."""
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        open_layer(spec, config, backend="cuda", rendezvous=rendezvous) as layer,
    ):
        yield layer


def gpu(value):
    if isinstance(value, tuple):
        return tuple(v.cuda() for v in value)
    return value.cuda()


def run_rank(case: Case, config: EpConfig, rendezvous, calls: int = 1) -> torch.Tensor:
    """One rank's output of the last of some calls; the others are there to leave state behind."""
    config = replace(config, num_ranks=case.num_ranks, timeout_s=5)
    with opened(case.spec, config, rendezvous) as layer:
        layer.load_weights(case.experts(rendezvous.rank))
        inputs = [gpu(v) for v in case.inputs(rendezvous.rank)]
        for _ in range(calls):
            y = layer.run(*inputs)
        return y.cpu()


def run_case(case: Case, config: EpConfig, calls: int = 1) -> list[torch.Tensor]:
    """Outputs by rank."""
    return run_group(case.num_ranks, lambda r: run_rank(case, config, r, calls))


def by_name(num_ranks: int) -> dict[str, Case]:
    return {c.name: c for c in cases(num_ranks)}


def bits(spec: MoESpec) -> int:
    return FP8_TENSOR_CORE_BITS if spec.weight_dtype == "fp8" else 24
