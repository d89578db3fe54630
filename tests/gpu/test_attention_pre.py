"""The attention-pre megakernel against the oracle: each stage alone, prefixes, whole layers."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context

import numpy as np
import pytest
import torch

from megamoe import jit
from megamoe.attention_pre.data import mlp_tensors, random_weights
from megamoe.attention_pre.encode import encode, instruction_format, operand_table
from megamoe.attention_pre.graphs import attention_pre_graph, dense_mlp_graph
from megamoe.attention_pre.interpret import Interpreter
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.stages import partition, subgraph
from megamoe.attention_pre.tiling import Batch, TileConfig, Tiling, choose_tiles
from megamoe.backends.attention import AttentionFault, AttentionKernel, BoundPlan, compile_attention
from megamoe.reference.attention_pre import scaled_weight
from megamoe.reference.quant import dequantize_1x128
from megamoe.reference.tolerance import FP8_TENSOR_CORE_BITS
from megamoe.spec import ATTENTION_MODELS
from tests.attention import SMALL, AttentionCase, check_attention, poisoned

pytestmark = pytest.mark.gpu

GLM = ATTENTION_MODELS["glm-5.2"]
RAGGED = Batch(((4, 300), (3, 70), (1, 1), (2, 513)))
POW2 = replace(SMALL, scale_pow2=True)
FEW = Batch(((5, 200),))
ROWS = (16, 1, 64, 128)
OTHER_SPLITS = (("D1", 1), ("B0", 3))
MLP = (1024, 768, 13)
KERNELS: list[AttentionKernel] = []
STAGES = ("A0", "B0", "C0", "B1", "D1", "D0", "D2", "E1")
NEEDS = {
    "A0": {"A0"},
    "B0": {"A0", "B0"},
    "C0": {"A0", "C0"},
    "B1": {"A0", "B1"},
    "D1": {"A0", "B0", "C0", "D1"},
    "D0": {"A0", "B0", "D0"},
    "D2": {"A0", "B0", "D0", "D2"},
    "E1": {"A0", "B0", "C0", "B1", "D1", "E1"},
}
WORKERS = 132


def halves(final):
    """Every sum in two parts, whoever adds them up."""
    stages = {name: Tiling(split_k=2, final=final) for name in ("B0", "B1", "D1")}
    return TileConfig("halves", 16, stages | {"C0": Tiling(block_n=8, split_k=4)})


def specs_of(*planned):
    """Specialisations of several (planner, batch), each once."""
    for planner, batch in planned:
        planner.plan(batch)
    return tuple(dict.fromkeys(s for planner, _ in planned for s in planner.specializations))


def small_plans():
    graph = partition(attention_pre_graph(SMALL))
    for workers in (WORKERS, 3):
        yield Planner(graph, workers), RAGGED
    for final in ("last", "rows"):
        yield Planner(graph, WORKERS, final=final), RAGGED
    for final in ("last", "all"):
        yield Planner(graph, WORKERS, tiles=halves(final)), RAGGED
    for name in STAGES:
        yield Planner(subgraph(graph, [name]), WORKERS), RAGGED
    yield Planner(attention_pre_graph(POW2), WORKERS), FEW


def glm_plans(rows):
    graph = partition(attention_pre_graph(GLM))
    batch = batch_of(rows, 8192)
    yield Planner(graph, WORKERS), batch
    if rows == 16:
        for stage, split in OTHER_SPLITS:
            yield split_planner(stage, split, batch), batch


def split_planner(stage, split, batch):
    graph = partition(attention_pre_graph(GLM))
    chosen = choose_tiles(graph, batch, WORKERS)
    stages = dict(chosen.stages) | {stage: Tiling(split_k=split, final="rows")}
    return Planner(graph, WORKERS, tiles=replace(chosen, stages=stages))


def mlp_plans():
    yield Planner(dense_mlp_graph(*MLP[:2]), WORKERS), Batch(((MLP[2], MLP[2]),))


def compile_sets():
    """What the tests run, as few kernels as there are layers and bands."""
    glm = [specs_of(*glm_plans(rows)) for rows in ROWS]
    return [*glm, specs_of(*small_plans()), specs_of(*mlp_plans())]


def compile_with(flags, specs):
    jit._FLAGS = flags
    compile_attention(specs)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Compiles all at once, in processes of their own; then they come from the cache."""
    sets = compile_sets()
    with ProcessPoolExecutor(len(sets), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_with, [jit._FLAGS] * len(sets), sets))
    return [AttentionKernel(specs) for specs in sets]


@pytest.fixture(autouse=True)
def _known(kernels):
    KERNELS[:] = kernels


def kernel_of(specs) -> AttentionKernel:
    return next(k for k in KERNELS if set(specs) <= set(k.specs))


@cache
def weights_of(spec, positions, seed):
    return random_weights(spec, positions, seed)


class Case(AttentionCase):
    def weights(self):
        return weights_of(self.spec, 8448, self.seed)


class FixedWeights(AttentionCase):
    """Other inputs and caches of the same layer."""

    def weights(self):
        return weights_of(self.spec, 8448, 0)


def gpu(tensors):
    return {name: t.cuda() for name, t in tensors.items()}


def bind(planner, case, given=None, kernel=None) -> tuple[BoundPlan, dict]:
    """A plan on poisoned buffers of the device, and those buffers."""
    encoded = encode(planner.plan(case.batch))
    known = {**case.weights(), **case.inputs(), **(given or {})}
    made = poisoned(b for b in encoded.buffers.values() if b.name not in known)
    tensors = gpu({name: made.get(name, known.get(name)) for name in encoded.buffers})
    return BoundPlan(kernel or kernel_of(encoded.specializations), encoded, tensors), tensors


def run(planner, case, given=None, kernel=None):
    plan, tensors = bind(planner, case, given, kernel)
    plan.run()
    return {name: t.cpu() for name, t in tensors.items()}


def check(case, got):
    check_attention(case, got, case.weights(), fp8_bits=FP8_TENSOR_CORE_BITS)


@cache
def interpreted(spec, batch):
    """Buffers of a run of the whole graph on the CPU."""
    case = Case(spec, batch)
    encoded = encode(Planner(attention_pre_graph(spec), 8).plan(batch))
    known = {**case.weights(), **case.inputs()}
    made = poisoned(b for b in encoded.buffers.values() if b.name not in known)
    tensors = {name: made.get(name, known.get(name)) for name in encoded.buffers}
    machine = Interpreter(tensors)
    machine.run(encoded, operand_table(encoded, machine.addresses), encoded.new_counters())
    return tensors


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_alone(name):
    """A stage on the values that the interpreter made for it."""
    case = Case(SMALL, RAGGED)
    full = partition(attention_pre_graph(SMALL))
    first = interpreted(SMALL, RAGGED)
    graph = subgraph(full, [name])
    given = {t.name: first[t.name] for t in graph.tensors.values() if t.kind == "input"}
    if "C0.gemm.out" in given:
        given["C0.gemm.out"] = given["C0.gemm.out"].sum(1)
    if name == "E1":
        given["index_cache"] = first["index_cache"]
    got = {**first, **run(Planner(graph, WORKERS), case, given)}
    if name != "C0":
        got["C0.gemm.out"] = first["C0.gemm.out"]
    # What later stages stored in the first run followed from other roundings.
    kept = {n: t for n, t in got.items() if n.split(".")[0] not in set(STAGES) - NEEDS[name]}
    check(case, kept)


PREFIXES = ["A0", "A0 C0", "A0 C0 B1", "A0 C0 B1 B0", "A0 C0 B1 B0 D0", "A0 C0 B1 B0 D0 D1 D2"]


@pytest.mark.parametrize("names", PREFIXES)
def test_prefixes(names):
    case = Case(SMALL, RAGGED)
    graph = subgraph(partition(attention_pre_graph(SMALL)), names.split())
    check(case, run(Planner(graph, WORKERS), case))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"final": "last"},
        {"final": "rows"},
        {"tiles": halves("last")},
        {"tiles": halves("all")},
        {"queue": "dynamic"},
        {"queue": "round_robin", "scope": "task"},
        {"policies": {}},
    ],
    ids=["default", "last", "rows", "halves, last", "halves", "dynamic", "mpk events", "whole"],
)
def test_other_plans_give_the_same(options):
    case = Case(SMALL, RAGGED, seed=7)
    check(case, run(Planner(attention_pre_graph(SMALL), WORKERS, **options), case))


def test_few_workers_with_long_queues():
    """Every page is used many times."""
    case = Case(SMALL, RAGGED)
    check(case, run(Planner(attention_pre_graph(SMALL), 3), case))


def test_two_pages_for_inputs_are_enough():
    """The wgmmas in flight span no more pages; long queues use each many times."""
    case = Case(SMALL, RAGGED)
    planner = Planner(attention_pre_graph(SMALL), 3)
    planner.plan(RAGGED)
    kernel = AttentionKernel(planner.specializations, input_pages=2)
    check(case, run(planner, case, kernel=kernel))


def test_power_of_two_scales():
    case = Case(POW2, FEW)
    got = run(Planner(attention_pre_graph(POW2), WORKERS), case)
    for name in ("A0.quant.scales", "B0.quant.scales"):
        assert (torch.frexp(got[name]).mantissa == 0.5).all(), name


def batch_of(rows, kv):
    """Requests of 8 new tokens and ragged lengths."""
    if rows < 8:
        return Batch(((rows, kv),))
    return Batch(tuple((8, kv - 37 * b) for b in range(rows // 8)))


@pytest.mark.parametrize("kv", [2048, 8192])
@pytest.mark.parametrize("rows", ROWS)
def test_published_dimensions(rows, kv):
    case = Case(GLM, batch_of(rows, kv))
    check(case, run(Planner(attention_pre_graph(GLM), WORKERS), case))


@pytest.mark.parametrize(("stage", "split"), OTHER_SPLITS)
def test_other_splits(stage, split):
    batch = batch_of(16, 2048)
    check(Case(GLM, batch), run(split_planner(stage, split, batch), Case(GLM, batch)))


def test_replays_of_a_captured_graph_see_new_inputs():
    """Epochs advance on the device: nothing is reset between runs, and old events end no wait."""
    batch = batch_of(16, 2048)
    planner = Planner(attention_pre_graph(GLM), WORKERS)
    plan, tensors = bind(planner, Case(GLM, batch))
    plan.run()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        plan.launch(stream)
    written = [n for n, b in plan.encoded.buffers.items() if b.kind in ("value", "workspace")]
    for seed in range(3, 6):
        # Weights stay those of seed 0: the case differs in its inputs and caches.
        case = FixedWeights(GLM, batch, seed=seed)
        for name, value in case.inputs().items():
            tensors[name].copy_(value)
        for _ in range(20):
            for name in written:
                tensors[name].view(torch.uint8).fill_(0xFF)
            graph.replay()
        plan.check()
        check(case, {name: t.cpu() for name, t in tensors.items()})


def test_rebinding_moves_a_captured_graph_to_other_memory():
    case = Case(SMALL, RAGGED)
    plan, tensors = bind(Planner(attention_pre_graph(SMALL), WORKERS), case)
    plan.run()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        plan.launch(stream)
    other = Case(SMALL, RAGGED, seed=5)
    known = gpu({**other.weights(), **other.inputs()})
    moved = {n: known[n] if n in known else torch.full_like(t, -1) for n, t in tensors.items()}
    plan.rebind(moved)
    graph.replay()
    plan.check()
    check(other, {name: t.cpu() for name, t in moved.items()})


def test_a_missing_signal_ends_in_a_fault_and_a_live_context():
    case = Case(SMALL, RAGGED)
    planner = Planner(attention_pre_graph(SMALL), WORKERS)
    encoded = encode(planner.plan(case.batch))
    fmt = instruction_format()
    instructions = encoded.instructions.copy()
    first, _ = fmt.fields["signal_increment"]
    opcode = fmt.fields["opcode"][0]
    silent = np.argwhere(instructions[:, :, opcode] == fmt.opcodes["norm_quant"])[0]
    instructions[silent[0], silent[1], first] = 0
    broken = replace(encoded, instructions=instructions)
    known = {**case.weights(), **case.inputs()}
    made = poisoned(b for b in encoded.buffers.values() if b.name not in known)
    tensors = gpu({name: made.get(name, known.get(name)) for name in encoded.buffers})
    kernel = kernel_of(encoded.specializations)
    plan = BoundPlan(kernel, broken, tensors, timeout_s=0.05)
    with pytest.raises(AttentionFault, match="waited more than"):
        plan.run()
    assert float(torch.ones(4, device="cuda").sum()) == 4, "the context is alive"
    whole = BoundPlan(kernel, encoded, tensors)
    whole.run()
    check(case, {name: t.cpu() for name, t in tensors.items()})


def test_a_dense_block_of_another_model():
    """RMSNorm, GEMM, SwiGLU, GEMM, add, on the same kernel source."""
    hidden, inter, rows = MLP
    known = gpu(mlp_tensors(hidden, inter, rows, seed=1))
    encoded = encode(Planner(dense_mlp_graph(hidden, inter), WORKERS).plan(Batch(((rows, rows),))))
    made = gpu(poisoned(b for b in encoded.buffers.values() if b.name not in known))
    tensors = {name: made.get(name, known.get(name)) for name in encoded.buffers}
    BoundPlan(kernel_of(encoded.specializations), encoded, tensors).run()
    t = {name: v.cpu() for name, v in tensors.items()}
    # Each GEMM on the codes that the stage before it stored.
    hidden_in = dequantize_1x128(t["quant.codes"], t["quant.scales"]).double()
    out = hidden_in @ scaled_weight(t["w1"], t["w1_scales"]).T
    gate, up = out.split(inter, 1)
    inner = gate * torch.sigmoid(gate) * up
    stored = dequantize_1x128(t["quant2.codes"], t["quant2.scales"]).double()
    limit = 2**-4 * inner.abs() + 2**-9 * inner.abs().amax()
    assert ((stored - inner).abs() <= limit).all()
    expected = stored @ scaled_weight(t["w2"], t["w2_scales"]).T + t["x"].double()
    error = (t["add.out"].double() - expected).abs()
    assert (error <= 2**-8 * expected.abs() + 2**-11 * expected.abs().max()).all(), error.max()
