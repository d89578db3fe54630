"""The standalone kernels against the oracle and the megakernel, in every kind of graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch

from megamoe.attention_layer import open_attention_pre
from megamoe.attention_pre.data import random_weights
from megamoe.attention_pre.encode import encode
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.tiling import Batch
from megamoe.backends.attention import AttentionKernel, BoundPlan, compile_attention
from megamoe.cmp.bound import BoundCmp
from megamoe.cmp.graphs import CmpGraph
from megamoe.cmp.modes import MODES
from megamoe.cmp.tuning import Tuning, tuning_of
from megamoe.reference.tolerance import FP8_TENSOR_CORE_BITS
from megamoe.spec import ATTENTION_MODELS
from tests.attention import SMALL, AttentionCase, check_attention, poisoned

pytestmark = pytest.mark.gpu

GLM = ATTENTION_MODELS["glm-5.2"]
RAGGED = Batch(((4, 300), (3, 70), (1, 1), (2, 513)))
POW2 = replace(SMALL, scale_pow2=True)
WORKERS = 132
NAMES = ("A0", "B0p", "B0f", "C0", "B1p", "B1f", "D1p", "D1f", "D0", "D2", "E1")
WHOLE = ("A0", "B0p", "B0f", "C0", "B1", "D1", "D0", "D2", "E1")
"""Of a small layer, whose index projections are not split."""


@pytest.fixture(scope="module", autouse=True)
def _megakernels():
    """Begins to compile what takes longest; whoever asks for it waits for this."""
    cases = [Case(SMALL, RAGGED), Case(GLM, glm_batch(16, 2048))]
    with ThreadPoolExecutor(2) as pool:
        for case in cases:
            pool.submit(compile_attention, planned(case).specializations)
        yield


@cache
def weights_of(spec, positions, seed):
    return random_weights(spec, positions, seed)


class Case(AttentionCase):
    """Weights of seed 0 whatever the inputs'."""

    def weights(self):
        return weights_of(self.spec, 8448, 0)


def planned(case):
    return Planner(attention_pre_graph(case.spec), WORKERS, queue="round_robin").plan(case.batch)


def buffers(case):
    """A plan, and its buffers on the device: inputs as they are, all others poisoned."""
    plan = planned(case)
    encoded = encode(plan)
    known = {**case.weights(), **case.inputs()}
    made = poisoned(b for b in encoded.buffers.values() if b.name not in known)
    tensors = {n: (made[n] if n in made else known[n]).cuda() for n in encoded.buffers}
    return plan, encoded, tensors


def poison(encoded, tensors):
    for name, buffer in encoded.buffers.items():
        if buffer.kind in ("value", "workspace"):
            tensors[name].view(torch.uint8).fill_(0xFF)


def put(case, tensors):
    for name, value in case.inputs().items():
        tensors[name].copy_(value)


def run(graph, times=1):
    for _ in range(times):
        graph.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


def check(case, tensors):
    got = {name: t.cpu() for name, t in tensors.items()}
    check_attention(case, got, case.weights(), fp8_bits=FP8_TENSOR_CORE_BITS)


def results(encoded, tensors):
    """Everything the kernels store, bit by bit."""
    kinds = ("value", "workspace", "cache")
    return {
        n: tensors[n].clone().view(torch.uint8)
        for n, b in encoded.buffers.items()
        if b.kind in kinds
    }


def assert_same_bits(got, expected):
    for name, value in expected.items():
        if not torch.equal(got[name], value):
            where = (got[name] != value).flatten().nonzero()[0].item()
            raise AssertionError(
                f"{name}: byte {where} is {got[name].flatten()[where].item()}, "
                f"not {value.flatten()[where].item()}"
            )


def glm_batch(rows, kv):
    if rows < 8:
        return Batch(((rows, kv),))
    return Batch(tuple((8, kv - 37 * b) for b in range(rows // 8)))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_agrees_with_the_oracle(mode):
    case = Case(SMALL, RAGGED)
    plan, _, tensors = buffers(case)
    bound = BoundCmp(plan, tensors, tuning=tuning_of(mode))
    assert tuple(b.kernel.name for b in bound.kernels) == WHOLE
    graph = CmpGraph([bound], mode)
    assert [e[1:] for e in graph.edges] == graph.expected_edges()
    run(graph)
    check(case, tensors)


def test_power_of_two_scales():
    case = Case(POW2, Batch(((5, 200),)))
    plan, _, tensors = buffers(case)
    run(CmpGraph([BoundCmp(plan, tensors)], "branches_pdl"))
    for name in ("A0.quant.scales", "B0.quant.scales"):
        assert (torch.frexp(tensors[name].cpu()).mantissa == 0.5).all(), name


@pytest.mark.parametrize("rows", [1, 16, 64, 128])
def test_published_dimensions(rows):
    case = Case(GLM, glm_batch(rows, 2048))
    plan, _, tensors = buffers(case)
    bound = BoundCmp(plan, tensors)
    assert tuple(b.kernel.name for b in bound.kernels) == NAMES
    run(CmpGraph([bound], "branches_pdl"))
    check(case, tensors)


@pytest.mark.parametrize("mode", ["single_stream_pdl", "branches_pdl", "manual_streams"])
def test_ten_thousand_replays_of_poisoned_buffers(mode):
    """Two inputs by turns: whoever reads too early finds the other's results, or NaN."""
    cases = [Case(GLM, glm_batch(16, 2048), seed=seed) for seed in (3, 4)]
    plan, encoded, tensors = buffers(cases[0])
    graph = CmpGraph([BoundCmp(plan, tensors)], mode)
    names = ("x", "residual")
    inputs = [{n: c.inputs()[n].cuda() for n in names} for c in cases]
    expected = []
    for given in inputs:
        for name, value in given.items():
            tensors[name].copy_(value)
        poison(encoded, tensors)
        run(graph)
        expected.append(results(encoded, tensors))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    for i in range(10_000):
        for name, value in inputs[i % 2].items():
            tensors[name].copy_(value)
        if i % 10 == 0:
            poison(encoded, tensors)
        graph.launch(stream)
        for name in ("E1.paged_logits.out", "D2.bmm.out"):
            wrong += (tensors[name].view(torch.uint8) != expected[i % 2][name]).any()
        if i % 500 < 2:
            assert_same_bits(results(encoded, tensors), expected[i % 2])
    assert int(wrong) == 0


EDGES = [("A0", "B0p"), ("B0p", "B0f"), ("B0f", "D1p"), ("C0", "D1f"), ("B1f", "E1"), ("D0", "D2")]


def delayed(producer, consumer, wait):
    """Results of a run in which the producer sleeps after it has let its consumers in."""
    case = Case(GLM, glm_batch(16, 2048))
    plan, encoded, tensors = buffers(case)
    run(CmpGraph([BoundCmp(plan, tensors)], "single_stream"))
    expected = results(encoded, tensors)
    put(case, tensors)
    poison(encoded, tensors)
    bound = BoundCmp(plan, tensors, tuning={consumer: Tuning(wait=wait)})
    bound.delay(producer, 300)
    run(CmpGraph([bound], "branches_pdl"))
    return results(encoded, tensors), expected


@pytest.mark.parametrize(("producer", "consumer"), EDGES)
def test_a_consumer_waits_for_a_late_producer(producer, consumer):
    assert_same_bits(*delayed(producer, consumer, "late"))


@pytest.mark.parametrize(("producer", "consumer"), EDGES)
def test_a_missing_wait_is_caught(producer, consumer):
    """The same, with a consumer that was built without its wait."""
    with pytest.raises(AssertionError, match="byte"):
        assert_same_bits(*delayed(producer, consumer, "never"))


@pytest.mark.parametrize(("spec", "batch"), [(SMALL, RAGGED), (GLM, glm_batch(16, 2048))])
def test_the_megakernel_makes_the_same_bits(spec, batch):
    """Same bodies, same tiles, same order of sums."""
    case = Case(spec, batch)
    plan, encoded, tensors = buffers(case)
    BoundPlan(AttentionKernel(plan.specializations), encoded, tensors).run()
    expected = results(encoded, tensors)
    for mode in MODES:
        put(case, tensors)
        poison(encoded, tensors)
        run(CmpGraph([BoundCmp(plan, tensors, tuning=tuning_of(mode))], mode))
        assert_same_bits(results(encoded, tensors), expected)


@pytest.mark.parametrize("engine", ["cmp", "megakernel"])
def test_the_layer_runs_on_the_device(engine):
    """Two steps of the public layer against the CPU's, caches included."""
    case = Case(SMALL, Batch(((4, 300), (1, 1))))
    layers = [
        open_attention_pre(SMALL, case.weights(), num_pages=8, engine=e) for e in (engine, "oracle")
    ]
    generator = torch.Generator().manual_seed(1)
    table = torch.tensor([[5, 1, 0, 2, 7], [3, 0, 0, 0, 0]], dtype=torch.int32)
    history = torch.randint(0, 0x78, layers[0].index_cache.shape, generator=generator).byte()
    scales = history.view(torch.float32)[:, 64 * 32 :]
    scales.copy_(torch.rand(scales.shape, generator=generator))
    for layer in layers:
        layer.index_cache.copy_(history)
    for lengths in ([300, 1], [304, 2]):
        x, residual = (torch.randn(5, SMALL.hidden, generator=generator).bfloat16() for _ in "xr")
        outs = [
            layer.run(
                x.to(layer.backend),
                residual.to(layer.backend),
                new_tokens=[4, 1],
                context_lens=lengths,
                block_table=table,
            )
            for layer in layers
        ]
        for name, got, expected in zip(outs[0]._fields, *outs, strict=True):
            got = got.cpu().double()
            expected = expected.double()
            assert torch.equal(got.isinf(), expected.isinf()), name
            seen = ~expected.isinf()
            error = (got - expected)[seen].norm() / expected[seen].norm()
            # e4m3 codes that round the other way: 2^-4 of single values, far less of the norm.
            assert error < 0.03, (name, float(error))
