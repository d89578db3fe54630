"""What PDL gains on single edges of the attention-pre graph, and the graph stage by stage.

edge       three places of the consumer's wait on the edge A0 -> B0p, for several M
counter    an edge whose consumer has nothing to do before its wait
prefixes   the graph stage by stage, and each stage alone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from launcher.attention_rows import Copies, Row, batch_of, table_row
from launcher.cmp_rows import bind_all, plan_for, time_runs, time_single
from megamoe.attention_pre.data import random_caches, random_fp8_weight, random_inputs
from megamoe.attention_pre.encode import encode
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.op_graph import OpGraph
from megamoe.attention_pre.stages import partition, subgraph
from megamoe.attention_pre.tiling import Batch, TileConfig, Tiling
from megamoe.cmp.bound import BoundCmp, with_wait
from megamoe.cmp.kernels import Wait
from megamoe.cmp.modes import Mode
from megamoe.spec import AttentionPreSpec

__all__ = ["PREFIXES", "bench_counter", "bench_edge", "bench_prefixes", "counter_graph"]

PREFIXES: Final = ("A0", "C0", "B1", "B0", "D0", "D1", "D2", "E1")
"""The order in which stages join the graph in the table of prefixes."""


def _row(
    what: str,
    batch: Batch,
    bounds: Sequence[BoundCmp],
    traced: Sequence[BoundCmp],
    mode: Mode,
    programmatic: Sequence[tuple[str, str]] | None = None,
) -> Row:
    """Cold: many runs in a graph, and one run alone."""
    timing = time_runs(bounds, mode, programmatic=programmatic)
    graph_us, span = time_single(bounds, traced, mode, programmatic=programmatic)
    return table_row(
        what, batch, "cold", timing, graph_us=round(graph_us, 3), span_us=round(span, 3)
    )


def bench_edge(copies: Copies, rows_of: Sequence[int] = (16, 32, 64, 128, 256)) -> list[Row]:
    """A0 -> B0p alone: three places of the consumer's wait, the edge programmatic or not."""
    full = partition(attention_pre_graph(copies.spec))
    only = ("A0", "B0p")
    waits: tuple[Wait, ...] = ("entry", "prologue", "late")
    modes: tuple[Mode, ...] = ("branches", "branches_pdl")
    made = []
    for m in rows_of:
        batch = batch_of(m, 512)
        plan = plan_for(subgraph(full, ["A0", "B0"]), batch)
        host = random_inputs(copies.spec, batch, 1) | random_caches(copies.spec, batch, 2)
        tensors = copies.tensors(encode(plan).buffers, host)
        for wait in waits:
            tuning = with_wait({}, "B0p", wait)
            bounds = bind_all(plan, tensors, tuning=tuning, only=only)
            traced = bind_all(plan, tensors, tuning=tuning, only=only, trace=True)
            for mode in modes:
                pdl = " pdl" if mode == "branches_pdl" else ""
                made.append(_row(f"edge A0->B0p {wait}{pdl}", batch, bounds, traced, mode))
    return made


def counter_graph(inputs: int, hidden: int) -> OpGraph:
    """Attention's output projection with the residual, then the next block's RMSNorm."""
    g = OpGraph("output_projection")
    codes = g.runtime_arg("codes", ("M", inputs), "e4m3")
    scales = g.runtime_arg("scales", ("M", inputs // 128), "fp32")
    residual = g.runtime_arg("residual", ("M", hidden))
    w = g.bound_weight("w_o", (hidden, inputs), "e4m3")
    w_scales = g.bound_weight("w_o_scales", (hidden // 128, inputs // 128), "fp32")
    with g.stage("O"):
        summed = g.add(g.gemm_fp8(codes, scales, w, w_scales), residual)
    with g.stage("N"):
        out = g.quant(g.rmsnorm(summed, g.bound_weight("norm", (hidden,)), 1e-5))
    g.set_outputs(summed, *out)
    return g


def bench_counter(
    spec: AttentionPreSpec, rows_of: Sequence[int] = (16, 64, 128, 256), copies: int = 4
) -> list[Row]:
    """Output projection -> RMSNorm: the consumer has 12 KiB of weights to fetch before its wait."""
    inputs, hidden = spec.num_heads * 256, spec.hidden
    g = torch.Generator().manual_seed(0)
    w, w_scales = random_fp8_weight(hidden, inputs, g)
    host = {"w_o": w, "w_o_scales": w_scales, "norm": torch.ones(hidden).bfloat16()}
    held = Copies.of(spec, host, copies)
    made = []
    for m in rows_of:
        batch = batch_of(m, 512)
        block = min(max(8, 1 << (m - 1).bit_length()), 128)
        tiles = TileConfig("counter", block, {"O": Tiling(split_k=2), "N": Tiling()})
        plan = plan_for(partition(counter_graph(inputs, hidden)), batch, tiles)
        given = {
            "codes": torch.randn(m, inputs).to(torch.float8_e4m3fn),
            "scales": torch.ones(m, inputs // 128),
            "residual": torch.randn(m, hidden).bfloat16(),
        }
        tensors = held.tensors(encode(plan).buffers, given)
        bounds, traced = bind_all(plan, tensors), bind_all(plan, tensors, trace=True)
        always = [("Op", "Of")]
        for name, edges in (("off", always), ("pdl", [*always, ("Of", "N")])):
            what = f"counter O->RMSNorm {name}"
            made.append(_row(what, batch, bounds, traced, "branches_pdl", programmatic=edges))
    return made


def bench_prefixes(copies: Copies, batch: Batch) -> list[Row]:
    """Each stage joined to those before it, and alone; branches and programmatic edges."""
    full = partition(attention_pre_graph(copies.spec))
    host = random_inputs(copies.spec, batch, 1) | random_caches(copies.spec, batch, 2)
    made = []
    for i, name in enumerate(PREFIXES):
        for variant, names in (("prefix", PREFIXES[: i + 1]), ("alone", (name,))):
            plan = plan_for(subgraph(full, names), batch)
            bounds = bind_all(plan, copies.tensors(encode(plan).buffers, host))
            timing = time_runs(bounds, "branches_pdl")
            made.append(
                table_row(f"branches_pdl {variant} {' '.join(names)}", batch, "cold", timing)
            )
    return made
