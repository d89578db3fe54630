"""The layer on CPU ranks against the oracle, and bit for bit against itself in every configuration.

The GPU's counterpart is ``tests/gpu/test_moe.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe.backends.base import Counters
from megamoe.layer import open_layer
from megamoe.spec import EpConfig
from tests.cases import Case, cases
from tests.compare import assert_bitwise, assert_matches_oracle
from tests.groups import run_group

MINIMUM = EpConfig(num_ranks=1, max_tokens=96, block_m=8, ring_l1_blocks=1, ring_l2_blocks=1)
LARGE = EpConfig(num_ranks=1, max_tokens=96, block_m=32)


def run_case(
    case: Case, config: EpConfig, calls: int = 1
) -> tuple[list[torch.Tensor], list[Counters]]:
    """Outputs and counters by rank; every call but the last is only there to leave state behind."""
    config = replace(config, num_ranks=case.num_ranks, timeout_s=20)

    def body(rendezvous):
        with open_layer(case.spec, config, backend="cpu", rendezvous=rendezvous) as layer:
            layer.load_weights(case.experts(rendezvous.rank))
            for _ in range(calls):
                y = layer.run(*case.inputs(rendezvous.rank))
            return y, layer.counters()

    results = run_group(case.num_ranks, body)
    return [y for y, _ in results], [c for _, c in results]


def by_name(num_ranks: int) -> dict[str, Case]:
    return {c.name: c for c in cases(num_ranks)}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("config", [MINIMUM, LARGE], ids=["minimum_ring", "large_ring"])
def test_matches_oracle(num_ranks, config):
    for case in cases(num_ranks):
        actual, _ = run_case(case, config)
        for rank, (y, want) in enumerate(zip(actual, case.expected(), strict=True)):
            if want.shape[0]:
                what = f"{case.name} R={num_ranks} rank {rank}"
                assert_matches_oracle(y, want, case.spec, what)


RINGS = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (3, 2, 2), (5, 4, 3), (64, 64, 8)]


@pytest.mark.parametrize("name", ["fp8-shared", "fp8-all-to-one", "bf16-unequal", "fp8-zipf"])
def test_bits_do_not_depend_on_rings_or_workers(name):
    case = by_name(2)[name]
    base, _ = run_case(case, LARGE)
    for b1, b2, wave in RINGS:
        for workers, lag, block_m in ((1, 0, 8), (3, 2, 16)):
            config = replace(
                MINIMUM,
                block_m=block_m,
                ring_l1_blocks=b1,
                ring_l2_blocks=b2,
                wave_blocks=wave,
                l2_lag_blocks=lag,
                num_workers=workers,
            )
            actual, counters = run_case(case, config, calls=2)
            for rank, (y, want) in enumerate(zip(actual, base, strict=True)):
                assert_bitwise(y, want, f"{name} {config} rank {rank}")
                assert counters[rank].high_water_l1 <= b1
                assert counters[rank].high_water_l2 <= b2


@pytest.mark.parametrize("rows", [(100, 29), (200, 72), (289, 0)])
def test_blocks_with_tails_give_the_same_bits(rows):
    """One block of 129 rows, two of 144 and 128, three of 128: an expert's rows of two ranks."""
    base = by_name(2)["fp8-one-expert"]
    case = replace(base, name=f"tails-{rows}", tokens=rows, routing="one_expert")
    config = replace(LARGE, max_tokens=300, ring_l1_blocks=2, ring_l2_blocks=2, wave_blocks=2)
    small, _ = run_case(case, replace(config, block_m=8))
    tails, _ = run_case(case, replace(config, block_m=144), calls=2)
    for rank, (y, want) in enumerate(zip(tails, small, strict=True)):
        assert_bitwise(y, want, f"{case.name} rank {rank}")


@pytest.mark.parametrize("name", ["fp8-shared", "bf16-shared-clamp", "fp8-duplicates-masked"])
def test_bits_do_not_depend_on_ep_size(name):
    """One batch, dealt over 1, 2 and 4 ranks."""
    case = by_name(1)[name]
    x, ids, weight = case.inputs(0)
    whole = run_case(case, LARGE)[0][0]
    for tokens in ((4, x.shape[0] - 4), (0, 1, x.shape[0] - 3, 2)):
        part = replace(case, tokens=tokens)
        first = [sum(tokens[:r]) for r in range(len(tokens))]

        def body(rendezvous, part=part, first=first, tokens=tokens):
            r = rendezvous.rank
            rows = slice(first[r], first[r] + tokens[r])
            config = replace(MINIMUM, num_ranks=len(tokens), timeout_s=20)
            with open_layer(part.spec, config, backend="cpu", rendezvous=rendezvous) as layer:
                layer.load_weights(part.experts(r))
                return layer.run(x[rows], ids[rows], weight[rows])

        assert_bitwise(torch.cat(run_group(len(tokens), body)), whole, f"{name} over {tokens}")


@pytest.mark.parametrize("weight_dtype", ["fp8", "bf16"])
def test_bits_do_not_depend_on_the_batch(weight_dtype):
    """A token's row is the same alone, among others, and at any place in the batch."""
    case = by_name(1)["fp8-shared"]
    case = replace(case, spec=replace(case.spec, weight_dtype=weight_dtype), tokens=(60,))
    x, ids, weight = case.inputs(0)

    def body(rendezvous):
        config = replace(LARGE, timeout_s=20)
        with open_layer(case.spec, config, backend="cpu", rendezvous=rendezvous) as layer:
            layer.load_weights(case.experts(0))
            whole = layer.run(x, ids, weight)
            order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
            shuffled = layer.run(x[order], ids[order], weight[order])
            alone = [
                layer.run(x[t : t + 1], ids[t : t + 1], weight[t : t + 1]) for t in (0, 31, 59)
            ]
            return whole, order, shuffled, alone

    [(whole, order, shuffled, alone)] = run_group(1, body)
    assert_bitwise(shuffled, whole[order], "shuffled")
    for t, y in zip((0, 31, 59), alone, strict=True):
        assert_bitwise(y[0], whole[t], f"token {t} alone")


def test_a_bad_row_leaves_the_others_alone():
    """NaN and Inf rows do not change a bit of any other row."""
    case = by_name(2)["fp8-nan"]
    clean = replace(case, special="")
    bad, good = run_case(case, MINIMUM)[0], run_case(clean, MINIMUM)[0]
    for rank, tokens in enumerate(case.tokens):
        if tokens:
            assert not bad[rank][[0, -1]].isfinite().all()
            assert_bitwise(bad[rank][1:-1], good[rank][1:-1], f"rank {rank}")


def test_calls_follow_each_other_with_other_inputs():
    """State of one call (counts, metadata, ring positions) never reaches the next."""
    every = [c for c in cases(2) if c.spec == by_name(2)["fp8"].spec and c.seed == 1]
    assert len(every) >= 5

    def body(rendezvous):
        config = replace(MINIMUM, num_ranks=2, timeout_s=20)
        with open_layer(every[0].spec, config, backend="cpu", rendezvous=rendezvous) as layer:
            layer.load_weights(every[0].experts(rendezvous.rank))
            return [layer.run(*c.inputs(rendezvous.rank)) for _ in range(3) for c in every]

    results = run_group(2, body)
    for i, case in enumerate(every * 3):
        fresh, _ = run_case(case, LARGE)
        for rank in range(2):
            assert_bitwise(results[rank][i], fresh[rank], f"call {i} ({case.name}) rank {rank}")


def test_backpressure_is_counted_and_harmless():
    case = by_name(2)["fp8-all-to-one"]
    small, large = run_case(case, MINIMUM), run_case(case, LARGE)
    assert small[1][0].backpressure_events > 0
    assert small[1][0].high_water_l1 == 1
    assert large[1][0].backpressure_events == 0
    assert_bitwise(torch.cat(small[0]), torch.cat(large[0]))
