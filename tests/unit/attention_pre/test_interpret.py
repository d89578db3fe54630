"""The interpreter on encoded plans: every node equals the oracle's, in every interleaving."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megamoe.attention_pre.check import check_instructions
from megamoe.attention_pre.data import mlp_tensors
from megamoe.attention_pre.encode import encode, operand_table
from megamoe.attention_pre.graphs import attention_pre_graph, dense_mlp_graph
from megamoe.attention_pre.interpret import Interpreter
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.stages import partition, subgraph
from megamoe.attention_pre.tiling import Batch, TileConfig, Tiling, seed_tiles
from megamoe.reference.attention_pre import AttentionPreOracle, quantize, rms_norm, scaled_weight
from megamoe.reference.quant import dequantize_1x128
from megamoe.spec import ATTENTION_MODELS
from tests.attention import SMALL, AttentionCase, check_attention, poisoned

SPLIT = ("B0", "B1", "D1")
RAGGED = Batch(((4, 300), (3, 70), (1, 1), (2, 513)))


def run(planner: Planner, case: AttentionCase, *, seed: int | None, epochs: int = 1, given=None):
    """Buffers after ``epochs`` runs, all values poisoned before."""
    encoded = encode(planner.plan(case.batch))
    assert check_instructions(encoded.instructions, encoded.num_events) == []
    known = {**case.weights(), **case.inputs(), **(given or {})}
    made = poisoned(b for b in encoded.buffers.values() if b.name not in known)
    tensors = {name: made.get(name, known.get(name)) for name in encoded.buffers}
    machine = Interpreter(tensors)
    table = operand_table(encoded, machine.addresses)
    counters = encoded.new_counters()
    for epoch in range(1, epochs + 1):
        order = machine.run(encoded, table, counters, epoch=epoch, seed=seed)
        assert sorted(order) == sorted(np.ndindex(*encoded.tasks.shape)), "each place once"
    return tensors


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_every_node_matches_the_oracle(seed):
    case = AttentionCase(SMALL, RAGGED)
    got = run(Planner(attention_pre_graph(SMALL), 12), case, seed=seed)
    check_attention(case, got, case.weights())


@pytest.mark.parametrize(
    "options",
    [
        {"final": "last"},
        {"queue": "dynamic", "epochs": 3},
        {"granule": 1024},
        {"queue": "round_robin", "scope": "task"},
        {"policies": {}},
        {"tiles": TileConfig("narrow", 8, {"B0": Tiling(split_k=2), "D1": Tiling(split_k=2)})},
        {"tiles": replace(seed_tiles(), stages={"E1": Tiling(kv_tiles=2)})},
        {"tiles": TileConfig("apart", 8, {n: Tiling(split_k=2, final="all") for n in SPLIT})},
    ],
    ids=["last", "dynamic", "granule", "mpk events", "whole", "two row blocks", "unsplit", "apart"],
)
def test_other_plans_give_the_same(options):
    options = dict(options)
    epochs, granule = options.pop("epochs", 1), options.pop("granule", 256)
    case = AttentionCase(SMALL, replace(RAGGED, granule=granule), seed=7)
    planner = Planner(attention_pre_graph(SMALL), 7, **options)
    got = run(planner, case, seed=3, epochs=epochs)
    check_attention(case, got, case.weights())


def test_power_of_two_scales():
    spec = replace(SMALL, scale_pow2=True)
    case = AttentionCase(spec, Batch(((5, 200),)))
    got = run(Planner(attention_pre_graph(spec), 5), case, seed=0)
    for name in ("A0.quant.scales", "B0.quant.scales"):
        assert (torch.frexp(got[name]).mantissa == 0.5).all(), name
    inputs = case.inputs()
    oracle = AttentionPreOracle(spec, case.weights()).run(inputs, [5])
    found, expected = got["E1.paged_logits.out"][:, :200].double(), oracle.scores[0]
    seen = ~expected.isinf()
    # One code in some thousands rounds the other way: an error of a few 2^-4 in a mean of many.
    error = (found - expected)[seen].square().mean().sqrt()
    assert error < 2**-8 * expected[seen].square().mean().sqrt()


def test_counters_are_never_cleared_between_runs():
    case = AttentionCase(SMALL, Batch(((2, 90),)))
    planner = Planner(attention_pre_graph(SMALL), 6)
    got = run(planner, case, seed=1, epochs=3)
    check_attention(case, got, case.weights())


def test_counters_may_wrap():
    """Thresholds are compared modulo 2^32, so a plan may run for months."""
    case = AttentionCase(SMALL, Batch(((2, 90),)))
    encoded = encode(Planner(attention_pre_graph(SMALL), 6).plan(case.batch))
    known = {**case.weights(), **case.inputs()}
    made = poisoned(b for b in encoded.buffers.values() if b.name not in known)
    tensors = {name: made.get(name, known.get(name)) for name in encoded.buffers}
    machine = Interpreter(tensors)
    table = operand_table(encoded, machine.addresses)
    first = encoded.new_counters()
    machine.run(encoded, table, first)
    epoch = (1 << 32) // int(first.max()) + 2
    counters = (first.astype("uint64") * (epoch - 1)).astype("uint32")
    machine.run(encoded, table, counters, epoch=epoch, seed=4)
    check_attention(case, tensors, case.weights())


PREFIXES = ["A0", "A0 C0", "A0 C0 B1", "A0 C0 B1 B0", "A0 C0 B1 B0 D0", "A0 C0 B1 B0 D0 D1 D2"]


@pytest.mark.parametrize("names", PREFIXES)
def test_prefixes(names):
    case = AttentionCase(SMALL, RAGGED)
    graph = subgraph(partition(attention_pre_graph(SMALL)), names.split())
    got = run(Planner(graph, 8), case, seed=5)
    assert "E1.paged_logits.out" not in got
    check_attention(case, got, case.weights())


@pytest.mark.parametrize("names", [["D1", "E1"], ["D0", "D2"], ["E1"], ["B1", "E1"]])
def test_inner_subgraphs_take_what_dropped_stages_made(names):
    """Their inputs are the values of a run of the full graph."""
    case = AttentionCase(SMALL, RAGGED)
    full = partition(attention_pre_graph(SMALL))
    first = run(Planner(full, 8), case, seed=None)
    graph = subgraph(full, names)
    given = {t.name: first[t.name] for t in graph.tensors.values() if t.kind == "input"}
    if "C0.gemm.out" in given:
        given["C0.gemm.out"] = given["C0.gemm.out"].sum(1, keepdim=True)
    if "B1" not in names:
        given["index_cache"] = first["index_cache"]
    got = run(Planner(graph, 8), case, seed=6, given=given)
    check_attention(case, {**first, **got}, case.weights())


def test_dense_mlp_block():
    """Another model's graph, captured without labels: RMSNorm, GEMM, SwiGLU, GEMM, add."""
    hidden, inter, rows = 384, 256, 13
    known = mlp_tensors(hidden, inter, rows, seed=1)
    planner = Planner(dense_mlp_graph(hidden, inter), 6)
    encoded = encode(planner.plan(Batch(((rows, rows),))))
    made = poisoned(b for b in encoded.buffers.values() if b.name not in known)
    tensors = {name: made.get(name, known.get(name)) for name in encoded.buffers}
    machine = Interpreter(tensors)
    table = operand_table(encoded, machine.addresses)
    machine.run(encoded, table, encoded.new_counters(), seed=2)

    x = known["x"].double()
    normed = rms_norm(x, known["norm"], 1e-5).bfloat16()
    codes, scales = quantize(normed)
    value = dequantize_1x128(codes, scales).double()
    out = value @ scaled_weight(known["w1"], known["w1_scales"]).T
    gate, up = out.split(inter, 1)
    inner = gate * torch.sigmoid(gate) * up
    # The second GEMM on the codes that the first one stored.
    stored = dequantize_1x128(tensors["quant2.codes"], tensors["quant2.scales"]).double()
    limit = 2**-4 * inner.abs() + inner.abs().amax() * (2**-18 + 8 * hidden**0.5 * 2**-24)
    assert ((stored - inner).abs() <= limit).all()
    expected = stored @ scaled_weight(known["w2"], known["w2_scales"]).T + x
    error = (tensors["add.out"].double() - expected).abs()
    assert (error <= 2**-8 * expected.abs() + 1e-5).all(), error.max()


@pytest.mark.slow
def test_full_dimensions_of_the_published_plan():
    spec = ATTENTION_MODELS["glm-5.2"]
    case = AttentionCase(spec, Batch(((8, 8192), (8, 8100))))
    planner = Planner(attention_pre_graph(spec), 148, tiles=seed_tiles(), queue="round_robin")
    got = run(planner, case, seed=0)
    check_attention(case, got, case.weights())
