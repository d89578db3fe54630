"""Traced and phased builds on GPUs: sound traces, and the bits of the plain build."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.moe_trace import trace_figures, trace_problems
from tests.compare import assert_bitwise
from tests.gpu.moe_runs import BIG, LARGE, MINIMUM, by_name, gpu, opened, run_case
from tests.groups import run_group

pytestmark = pytest.mark.gpu

NAMES = ("fp8-shared", "fp8-zipf", "fp8-empty-source", "bf16-unequal")


def run_traced(case, config):
    config = replace(config, num_ranks=case.num_ranks, timeout_s=5)

    def body(rendezvous):
        with opened(case.spec, config, rendezvous) as layer:
            layer.load_weights(case.experts(rendezvous.rank))
            inputs = [gpu(v) for v in case.inputs(rendezvous.rank)]
            for _ in range(2):
                y = layer.run(*inputs)
            return y.cpu(), layer.trace()

    return run_group(case.num_ranks, body)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", [MINIMUM, LARGE, BIG], ids=["minimum", "large", "big"])
def test_traces_are_sound_and_change_no_bit(name, config, monkeypatch):
    case = by_name(2)[name]
    plain = run_case(case, config)
    monkeypatch.setenv("MEGAMOE_TRACE", "1")
    rows = 0
    for rank, (y, trace) in enumerate(run_traced(case, config)):
        assert trace_problems(trace) == [], f"rank {rank}"
        assert_bitwise(y, plain[rank], f"{name} rank {rank}")
        rows += len(trace.of("rows"))
        staged = trace.of("stage")
        assert len(staged) == trace.num_units or not trace.num_tokens, f"rank {rank}"
        figures = trace_figures(trace)
        assert len(trace.of("rows")) == figures["rows_local"] + figures["rows_remote"]
    inputs = [case.inputs(rank)[1] for rank in range(2)]
    shared = case.spec.num_shared * sum(len(ids) for ids in inputs)
    assert rows == sum(int((ids >= 0).sum()) for ids in inputs) + shared


@pytest.mark.parametrize("name", NAMES)
def test_phase_by_phase_gives_the_same_bits(name, monkeypatch):
    case = by_name(2)[name]
    plain = run_case(case, LARGE)
    blocks = replace(LARGE, num_ranks=2).resolved(case.spec).max_blocks(case.spec) + 32
    rings = {"ring_l1_blocks": blocks, "ring_l2_blocks": blocks, "l2_lag_blocks": blocks}
    monkeypatch.setenv("MEGAMOE_DEFINES", "MEGAMOE_PHASED=1")
    for rank, y in enumerate(run_case(case, replace(LARGE, **rings), calls=2)):
        assert_bitwise(y, plain[rank], f"{name} rank {rank}")
