"""Times the attention-pre megakernel on one Hopper GPU; the command is ``bench_attention``.

The method is that of ``attention_rows``, as for the public kernels that it is compared with. Every
shape is checked against the oracle before it is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch

from launcher.attention_rows import (
    SCORES,
    Copies,
    Row,
    batch_of,
    floor_us,
    need_right,
    score_error,
    table_row,
    time_graph,
)
from launcher.attention_trace import chrome_trace, stage_table, timeline_svg
from launcher.results import write_whole
from launcher.script import need_hopper, run_script
from megamoe.attention_pre.data import random_caches, random_inputs
from megamoe.attention_pre.encode import EncodedPlan, encode, instruction_format
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.stages import partition, subgraph
from megamoe.attention_pre.tiling import Batch, TileConfig, Tiling, choose_tiles
from megamoe.backends.attention import IN_FLIGHT, AttentionKernel, BoundPlan
from megamoe.spec import ATTENTION_MODELS, AttentionPreSpec

__all__ = [
    "Bench",
    "Measurement",
    "Options",
    "add_rows",
    "empty_frame",
    "main",
    "measure",
    "with_splits",
]

PREFIXES: Final = (
    "A0",
    "A0 C0",
    "A0 C0 B1",
    "A0 C0 B1 B0",
    "A0 C0 B1 B0 D1",
    "A0 C0 B1 B0 D1 D0",
    "A0 C0 B1 B0 D1 D0 D2",
)


class Bench:
    """Weights of a layer on the device, and plans bound to copies of them."""

    def __init__(self, spec: AttentionPreSpec, longest: int, copies: int) -> None:
        self.copies = Copies.make(spec, longest, copies)
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
        **options: int,
    ) -> list[BoundPlan]:
        """The plan on every copy of the weights; caches and results are copies, too.

        ``options`` are those of ``BoundPlan``.
        """
        spec = self.copies.spec
        self.inputs = random_inputs(spec, batch, 1) | random_caches(spec, batch, 2)
        self.tensors = self.copies.tensors(encoded.buffers, self.inputs, copies)
        return [BoundPlan(kernel, encoded, t, **options) for t in self.tensors]

    def error(self, batch: Batch) -> float:
        """``score_error`` of the first copy's last run."""
        return score_error(self.copies, batch, self.inputs, self.tensors[0][SCORES])


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


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        model: of ``ATTENTION_MODELS``.
        rows: token counts.
        kv: keys of a request.
        queue: as for ``Planner``.
        splits: split-K by stage, e.g. ``"D1=1,B0=3"``; empty takes the planner's.
        copies: of weights and caches; cold rows rotate over them.
        launches: of a graph.
        replays: of that graph.
        workers: CTAs; 0 takes one per SM.
        slots: see ``compile_attention``.
        input_pages: see ``compile_attention``.
        in_flight: weight pages of a CTA on their way at once.
        prefixes: cumulative subgraphs as well.
        trace: where a Chrome trace of one cold run goes, and a picture beside it.
    """

    model: str = "glm-5.2"
    rows: tuple[int, ...] = (16,)
    kv: tuple[int, ...] = (8192,)
    queue: Any = "auto"
    splits: str = ""
    copies: int = 6
    launches: int = 60
    replays: int = 25
    workers: int = 0
    slots: int = 3
    input_pages: int = 3
    in_flight: int = IN_FLIGHT
    prefixes: bool = False
    trace: Path | None = None


class Measurement:
    """Rows of ``attention_pre_h200.json`` for one set of options.

    Args:
        options: what to measure.
        on_change: called after every row, so that a run that is cut short keeps what it has.
    """

    def __init__(self, options: Options, on_change: Callable[[Row], None]) -> None:
        self.options = options
        self.spec = ATTENTION_MODELS[options.model]
        self.workers = options.workers or torch.cuda.get_device_properties(0).multi_processor_count
        self.graph = partition(attention_pre_graph(self.spec))
        self.bench = Bench(self.spec, max(options.kv), options.copies)
        self.rows: list[Row] = []
        self.prefixes: list[Row] = []
        self.host: list[Row] = []
        self._on_change = on_change

    def run(self) -> None:
        """Every shape in turn.

        Raises:
            MegaMoeError: a kernel's scores are not the oracle's, or a run gave up.
        """
        for rows in self.options.rows:
            for kv in self.options.kv:
                self._shape(batch_of(rows, kv), kv)

    def _shape(self, batch: Batch, kv: int) -> None:
        o, bench = self.options, self.bench
        tiles = with_splits(self.graph, batch, self.workers, o.splits)
        planner = Planner(self.graph, self.workers, queue=o.queue, tiles=tiles)
        encoded = encode(planner.plan(batch))
        kernel = bench.kernel(planner, slots=o.slots, input_pages=o.input_pages)
        plans = bench.bind(kernel, encoded, batch, o.copies, in_flight=o.in_flight)
        plans[0].run()
        error = bench.error(batch)
        need_right("megakernel", batch, error)
        floor = round(floor_us(bench.tensors[0], batch, self.spec), 3)
        for l2 in ("cold", "warm"):
            row = self._row("megakernel", batch, l2, plans)
            fraction = round(floor / row["us"], 3)
            self._add(self.rows, row, floor_us=floor, max_rel_err=error, fraction_of_floor=fraction)
        frame = [BoundPlan(kernel, empty_frame(encoded), bench.tensors[0])]
        row = self._row("megakernel_empty", batch, "warm", frame)
        self._add(self.rows, row, floor_us=0.0, max_rel_err=None)
        self._add(self.host, {"m": batch.rows, "kv": kv}, **self._host_times(batch, kv, kernel))
        for names in PREFIXES if o.prefixes else ():
            part = Planner(subgraph(self.graph, names.split()), self.workers, queue=o.queue)
            less = bench.bind(
                kernel, encode(part.plan(batch)), batch, o.copies, in_flight=o.in_flight
            )
            row = self._row("megakernel_prefix", batch, "cold", less)
            self._add(self.prefixes, row, stages=names)
        if o.trace:
            traced = bench.kernel(planner, slots=o.slots, input_pages=o.input_pages, trace=True)
            plans = bench.bind(traced, encoded, batch, o.copies, in_flight=o.in_flight)
            row = self._row("megakernel_traced", batch, "cold", plans)
            self._add(self.rows, row, floor_us=None, max_rel_err=None)
            save_trace(o.trace, plans[1 % len(plans)], encoded)

    def _row(self, variant: str, batch: Batch, l2: str, plans: Sequence[BoundPlan]) -> Row:
        used = plans if l2 == "cold" else plans[:1]
        launches = [used[i % len(used)].launch for i in range(self.options.launches)]
        timing = time_graph(launches, self.options.replays)
        for plan in used:
            plan.check()
        pages = 5 if batch.rows > 32 else self.options.input_pages
        return table_row(variant, batch, l2, timing, input_pages=pages)

    def _add(self, to: list[Row], row: Row, **more: Any) -> None:
        to.append(row | more)
        self._on_change(to[-1])

    def _host_times(self, batch: Batch, kv: int, kernel: AttentionKernel) -> Row:
        """Milliseconds of the host: a first plan, the next length's, a known one; new addresses."""
        planner = Planner(self.graph, self.workers, queue=self.options.queue)
        times: Row = {}

        def timed(name: str, call: Callable[[], Any]) -> Any:
            torch.cuda.synchronize()
            begin = perf_counter()
            found = call()
            torch.cuda.synchronize()
            times[name] = round((perf_counter() - begin) * 1e3, 4)
            return found

        plan = timed("plan_ms", lambda: planner.plan(batch))
        timed("plan_next_length_ms", lambda: planner.plan(batch_of(batch.rows, kv + 256)))
        timed("plan_known_ms", lambda: planner.plan(batch))
        encoded = timed("encode_ms", lambda: encode(plan))
        tensors = self.bench.tensors
        bound = timed("bind_ms", lambda: BoundPlan(kernel, encoded, tensors[0]))
        for i in range(3):  # the last stays
            timed("rebind_ms", lambda i=i: bound.rebind(tensors[i % len(tensors)]))  # type: ignore[misc]
        return times

    def results(self) -> dict[str, Any]:
        """``rows``, ``prefixes`` and ``host`` so far."""
        return {"rows": self.rows, "prefixes": self.prefixes, "host": self.host}


def save_trace(path: Path, plan: BoundPlan, encoded: EncodedPlan) -> None:
    """A Chrome trace of the plan's last run; beside it a picture, and a table of the stages."""
    fmt = instruction_format()
    opcodes = encoded.instructions[..., fmt.fields["opcode"][0]]
    names = {number: name for name, number in fmt.opcodes.items() if name != "no_op"}
    stamps = plan.stamps()
    path.write_text(json.dumps(chrome_trace(stamps, opcodes, names)))
    path.with_suffix(".svg").write_text(timeline_svg(stamps, opcodes, names))
    table = stage_table(stamps, opcodes, names)
    path.with_suffix(".stages.json").write_text(json.dumps(table, indent=1) + "\n")


def main() -> None:
    """The command without typer, for machines that lack it; see ``launcher/bench_attention.py``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", dest="rows", default="16", help="token counts, comma separated")
    parser.add_argument("--kv", default="8192", help="key counts, comma separated")
    parser.add_argument("--queue", default="auto")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--input-pages", type=int, default=3)
    parser.add_argument("--splits", default="")
    parser.add_argument("--prefixes", action="store_true")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--output", type=Path)
    args = vars(parser.parse_args())
    need_hopper("bench_attention_pre")
    output = args.pop("output")
    for name in ("rows", "kv"):
        args[name] = tuple(int(v) for v in args[name].split(","))
    measure(Options(**args), output)


def measure(options: Options, output: Path | None, *, quiet: bool = False) -> Measurement:
    """Measures, prints rows as they come and writes them after each."""
    from launcher.meta import run_meta

    meta = run_meta(**{k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()})
    meta["floor"] = "bytes of weights, keys and inputs / 4.70 TB/s"

    def show(row: Row) -> None:
        if output:
            write_whole(output, json.dumps({"meta": meta} | m.results(), indent=1) + "\n")
        if not quiet:
            print("| " + " | ".join(f"{k} {v}" for k, v in row.items()) + " |", flush=True)

    m = Measurement(options, show)
    m.run()
    return m


def add_rows(output: Path, rows: Sequence[Row]) -> None:
    """Replaces the rows of a results file."""
    held = json.loads(output.read_text())
    write_whole(output, json.dumps(held | {"rows": list(rows)}, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)
