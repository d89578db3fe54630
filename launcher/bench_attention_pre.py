"""Times the attention-pre megakernel on one Hopper GPU: ``python -m launcher.bench_attention_pre``.

Cold: a CUDA graph of many launches that rotates over several copies of weights and caches, together
several times L2, so that every launch reads its weights from memory; the time is the graph's over
its launches, as for the public kernels that it is compared with. Warm: the same graph over one
copy. Every shape is checked against the oracle before it is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from launcher.attention_trace import chrome_trace, stage_table, timeline_svg
from megamoe.attention_pre.data import random_caches, random_inputs, random_weights
from megamoe.attention_pre.encode import EncodedPlan, encode, instruction_format
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.stages import partition, subgraph
from megamoe.attention_pre.tiling import Batch, TileConfig, Tiling, choose_tiles
from megamoe.backends.attention import IN_FLIGHT, AttentionKernel, BoundPlan
from megamoe.reference.attention_pre import AttentionPreOracle
from megamoe.spec import ATTENTION_MODELS, AttentionPreSpec
from megamoe.telemetry import Sampler

__all__ = ["Bench", "batch_of", "empty_frame", "floor_us", "main", "with_splits"]

READ_CEILING: Final = 4.70e6
"""Bytes per microsecond: an H200's measured bulk read rate."""
PREFIXES: Final = (
    "A0",
    "A0 C0",
    "A0 C0 B1",
    "A0 C0 B1 B0",
    "A0 C0 B1 B0 D1",
    "A0 C0 B1 B0 D1 D0",
    "A0 C0 B1 B0 D1 D0 D2",
)


def batch_of(rows: int, kv: int) -> Batch:
    """Requests of up to 8 new tokens with ``kv`` keys each."""
    if rows <= 8:
        return Batch(((rows, kv),))
    return Batch(((8, kv),) * (rows // 8))


def floor_us(tensors: Mapping[str, Tensor], batch: Batch, spec: AttentionPreSpec) -> float:
    """Bytes that must be read, over the read ceiling: weights, keys, inputs."""
    weights = sum(t.nbytes for name, t in tensors.items() if name.startswith("w_"))
    keys = sum(keys for _, keys in batch.requests) * (128 + 4)
    inputs = 2 * batch.rows * spec.hidden * 2
    return (weights + keys + inputs) / READ_CEILING


@dataclass
class Timing:
    """Microseconds per launch, of several replays of a graph; and the GPU's state meanwhile."""

    median_us: float
    p99_us: float
    sm_mhz: float | None
    watts: float | None
    throttle: list[str] | None


def time_graph(launches: Sequence[Callable[[torch.cuda.Stream], None]], replays: int) -> Timing:
    """A graph of all launches on one stream."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch(stream)
    for _ in range(3):
        graph.replay()
    samples = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # the host is ahead when the first event is reached
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(launches))
    for _ in range(50):  # enough to look at the clocks meanwhile
        graph.replay()
    reading = Sampler(torch.cuda.current_device()).read()
    torch.cuda.synchronize()
    clock, events = reading.values.get("sm_clock_hertz"), reading.clocks_events
    samples.sort()
    return Timing(
        statistics.median(samples),
        samples[math.ceil(0.99 * len(samples)) - 1],
        None if clock is None else clock / 1e6,
        reading.values.get("power_watts"),
        None if events is None else [name for name, on in events.items() if on],
    )


class Bench:
    """Weights of a layer on the device, and plans bound to copies of them."""

    def __init__(self, spec: AttentionPreSpec, longest: int, copies: int) -> None:
        self.spec = spec
        self.host = random_weights(spec, longest, seed=0)
        self.copies = [
            {name: t.cuda().clone() for name, t in self.host.items()} for _ in range(copies)
        ]
        self._kernels: dict[tuple[object, ...], AttentionKernel] = {}

    def kernel(self, planner: Planner, **options: Any) -> AttentionKernel:
        """One kernel per set of specialisations."""
        key = (planner.specializations, *sorted(options.items()))
        if key not in self._kernels:
            self._kernels[key] = AttentionKernel(planner.specializations, **options)
        return self._kernels[key]

    def bind(
        self,
        kernel: AttentionKernel,
        encoded: EncodedPlan,
        batch: Batch,
        copies: int,
        in_flight: int = IN_FLIGHT,
    ) -> list[BoundPlan]:
        """The plan on every copy of the weights; caches and results are copies, too."""
        host = random_inputs(self.spec, batch, 1) | random_caches(self.spec, batch, 2)
        self.inputs = host
        plans = []
        self.tensors: list[dict[str, Tensor]] = []
        for weights in self.copies[:copies]:
            known = weights | {name: t.cuda() for name, t in host.items()}
            tensors = {}
            for name, buffer in encoded.buffers.items():
                if name in known:
                    tensors[name] = known[name]
                    continue
                dtype = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
                made = torch.empty(
                    tuple(int(d) for d in buffer.shape),
                    dtype=dtype.get(buffer.dtype, torch.float32),
                    device="cuda",
                )
                made.view(torch.uint8).fill_(0xFF)
                tensors[name] = made
            self.tensors.append(tensors)
            plans.append(BoundPlan(kernel, encoded, tensors, in_flight=in_flight))
        return plans

    def error(self, batch: Batch) -> float:
        """Relative error of the first copy's scores: norm of the difference over the norm."""
        inputs = {name: t.clone() for name, t in self.inputs.items()}
        oracle = AttentionPreOracle(self.spec, self.host)
        new = [new for new, _ in batch.requests]
        scores = oracle.run(inputs, new).scores
        found = self.tensors[0]["E1.paged_logits.out"].cpu().double()
        difference = reference = 0.0
        row = 0
        for b, expected in enumerate(scores):
            got = found[row : row + new[b], : expected.shape[1]]
            seen = ~expected.isinf()
            if not bool((got[~seen] == -torch.inf).all()):
                return math.nan
            difference += float((got - expected)[seen].square().sum())
            reference += float(expected[seen].square().sum())
            row += new[b]
        return math.sqrt(difference / reference)


def empty_frame(encoded: EncodedPlan) -> EncodedPlan:
    """The same launch with nothing to do."""
    fmt = instruction_format()
    blank = np.zeros((encoded.num_workers, 1, fmt.words), np.uint32)
    for name in ("wait_event", "signal_event"):
        first, words = fmt.fields[name]
        blank[..., first : first + words] = fmt.no_counter
    blank[..., fmt.fields["reduce_counter"][0]] = fmt.no_counter
    return replace(encoded, instructions=blank, dynamic=False)


def with_splits(graph: Any, batch: Batch, workers: int, splits: str) -> TileConfig | None:
    """``"D1=1,B0=3"`` over the chosen tiles."""
    if not splits:
        return None
    chosen = choose_tiles(graph, batch, workers)
    stages = dict(chosen.stages)
    for item in splits.split(","):
        name, _, count = item.partition("=")
        old = stages.get(name, Tiling())
        stages[name] = replace(old, split_k=int(count))
    return replace(chosen, stages=stages)


def main() -> None:
    """Parses the command line, measures, prints a table and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="glm-5.2", choices=sorted(ATTENTION_MODELS))
    parser.add_argument("--rows", default="16", help="token counts, comma separated")
    parser.add_argument("--kv", default="8192", help="key counts, comma separated")
    parser.add_argument("--copies", type=int, default=6)
    parser.add_argument("--launches", type=int, default=60, help="of a graph")
    parser.add_argument("--replays", type=int, default=25)
    parser.add_argument("--workers", type=int, default=0, help="CTAs; 0: one per SM")
    parser.add_argument("--queue", default="auto")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help="weight pages per CTA")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--splits", default="", help='split-K by stage, e.g. "D1=1,B0=3"')
    parser.add_argument("--cooperative", type=int, default=1)
    parser.add_argument("--prefixes", action="store_true", help="cumulative subgraphs as well")
    parser.add_argument(
        "--trace", type=Path, help="a Chrome trace of one cold run, and a picture beside it"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    spec = ATTENTION_MODELS[args.model]
    workers = args.workers or torch.cuda.get_device_properties(0).multi_processor_count
    kvs = [int(v) for v in args.kv.split(",")]
    bench = Bench(spec, max(kvs), args.copies)
    full = partition(attention_pre_graph(spec))
    rows: list[dict[str, Any]] = []
    from launcher.meta import run_meta

    meta = run_meta(workers=workers, slots=args.slots, splits=args.splits, copies=args.copies)

    def add(variant: str, batch: Batch, kv: int, l2: str, timing: Timing, **more: Any) -> None:
        row = {
            "variant": variant,
            "m": batch.rows,
            "requests": len(batch.requests),
            "kv": kv,
            "l2": l2,
            "us": round(timing.median_us, 3),
            "p99_us": round(timing.p99_us, 3),
            "sm_mhz": timing.sm_mhz,
            "watts": timing.watts,
            "throttle": timing.throttle,
            **more,
        }
        rows.append(row)
        if args.output:  # after every row: a run that is cut short keeps what it measured
            args.output.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
        print("| " + " | ".join(f"{k} {v}" for k, v in row.items()) + " |", flush=True)

    def measure(plans: list[BoundPlan], l2: str) -> Timing:
        used = plans if l2 == "cold" else plans[:1]
        launches = [used[i % len(used)].launch for i in range(args.launches)]
        timing = time_graph(launches, args.replays)
        for plan in used:
            plan.check()
        return timing

    for m in (int(v) for v in args.rows.split(",")):
        for kv in kvs:
            batch = batch_of(m, kv)
            tiles = with_splits(full, batch, workers, args.splits)
            planner = Planner(full, workers, queue=args.queue, tiles=tiles)
            encoded = encode(planner.plan(batch))
            kernel = bench.kernel(planner, slots=args.slots, cooperative=bool(args.cooperative))
            plans = bench.bind(kernel, encoded, batch, args.copies, args.in_flight)
            plans[0].run()
            error = bench.error(batch)
            assert error < 2e-2, f"M {m}, KV {kv}: relative error of the scores {error}"
            floor = floor_us(bench.tensors[0], batch, spec)
            for l2 in ("cold", "warm"):
                timing = measure(plans, l2)
                add("megakernel", batch, kv, l2, timing, floor_us=round(floor, 3),
                    max_rel_err=error)  # fmt: skip
            frame = [BoundPlan(kernel, empty_frame(encoded), bench.tensors[0])]
            add("megakernel_empty", batch, kv, "warm", measure(frame, "warm"), floor_us=0.0,
                max_rel_err=None)  # fmt: skip
            if args.prefixes:
                for names in PREFIXES:
                    cut = subgraph(full, names.split())
                    part = Planner(cut, workers, queue=args.queue)
                    less = encode(part.plan(batch))
                    plans = bench.bind(kernel, less, batch, args.copies)
                    add(f"megakernel {names}", batch, kv, "cold", measure(plans, "cold"),
                        floor_us=None, max_rel_err=None)  # fmt: skip
            if args.trace:
                traced = bench.bind(bench.kernel(planner, trace=True), encoded, batch, args.copies)
                for plan in traced:
                    plan.run()
                timing = measure(traced, "cold")
                add("megakernel_traced", batch, kv, "cold", timing, floor_us=None,
                    max_rel_err=None)  # fmt: skip
                save_trace(args.trace, traced[1], encoded)


def save_trace(path: Path, plan: BoundPlan, encoded: EncodedPlan) -> None:
    """A Chrome trace of the plan's last run; prints when each stage began and ended."""
    fmt = instruction_format()
    opcodes = encoded.instructions[..., fmt.fields["opcode"][0]]
    names = {number: name for name, number in fmt.opcodes.items() if name != "no_op"}
    for row in stage_table(plan.stamps(), opcodes, names):
        print(row)
    path.write_text(json.dumps(chrome_trace(plan.stamps(), opcodes, names)))
    path.with_suffix(".svg").write_text(timeline_svg(plan.stamps(), opcodes, names))


if __name__ == "__main__":
    main()
