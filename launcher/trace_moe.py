"""``megamoe trace moe``: one call of a layer, as a Chrome trace, a picture and a few figures.

Opens the layer with ``MEGAMOE_TRACE=1`` (on GPUs a build of its own), warms up, and keeps the last
of many calls. Sensors are read from before the first of them to after the last.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from launcher.console import (
    EXIT_WRONG,
    BackendOption,
    BlockRowsOption,
    DebugFlag,
    ExpertsOption,
    JsonFlag,
    ModelOption,
    RanksOption,
    RingBlocksOption,
    SeedOption,
    SizeOption,
    WeightDtypeOption,
    WorkersOption,
    make_folder_for,
    print_json,
    stderr,
    stdout,
    table,
)
from launcher.models import published_layer
from launcher.ranks import Group, run_in_group, sampler_of
from megamoe.spec import EpConfig, MoESpec

if TYPE_CHECKING:
    from launcher.moe_perfetto import MeteredSample
    from megamoe.backends.trace import LayerTrace
    from megamoe.layer import Backend
    from megamoe.telemetry import Reading

__all__ = ["command", "trace_call", "write_trace"]

_PERIOD_S: Final = 0.02


def command(
    context: typer.Context,
    model: ModelOption = "qwen3-30b",
    ranks: RanksOption = None,
    tokens: Annotated[str, typer.Option(help="Tokens per rank: T, T0,T1,… or PATTERN:T.")] = "64",
    routing: Annotated[str, typer.Option(help="Routing, like zipf:1.2.")] = "uniform",
    experts: ExpertsOption = None,
    hidden: SizeOption = None,
    inter: SizeOption = None,
    weight_dtype: WeightDtypeOption = "fp8",
    block_m: BlockRowsOption = 0,
    ring_blocks: RingBlocksOption = 0,
    workers: WorkersOption = 0,
    calls: Annotated[int, typer.Option(min=1, help="Calls, of which the last is kept.")] = 3,
    seed: SeedOption = 1,
    backend: BackendOption = "auto",
    seconds: Annotated[
        float, typer.Option(min=0, help="Calls go on for so long, for power and clocks.")
    ] = 0.0,
    output: Annotated[
        Path, typer.Option(help="Chrome trace to write; compressed where it ends in .gz.")
    ] = Path("moe_trace.json.gz"),
    svg: Annotated[Path | None, typer.Option(help="Picture of rank 0 to write.")] = None,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Record what every role of every unit does in one call."""
    os.environ["MEGAMOE_TRACE"] = "1"

    def options(num_ranks: int, device: str | None) -> tuple[MoESpec, EpConfig]:
        from launcher.beforehand import need_cases

        spec = published_layer(
            model, experts=experts, hidden=hidden, inter=inter, weight_dtype=weight_dtype
        )
        config = EpConfig(
            num_ranks=num_ranks,
            max_tokens=1,
            block_m=block_m,
            ring_l1_blocks=ring_blocks,
            ring_l2_blocks=ring_blocks,
            num_workers=workers,
        )
        need_cases(spec, config, [(tokens, routing)], seed, device)
        return spec, config

    def work(group: Group, layer: tuple[MoESpec, EpConfig]) -> int:
        spec, config = layer
        traces, samples = trace_call(
            group, spec, config, tokens, routing, calls, seconds, seed, cast("Backend", backend)
        )
        kind = {"cpu": "CPU", "cuda": "GPU"}[traces[0].backend]
        title = f"{model}, {tokens} tokens per rank, {routing}, {group.num_ranks} {kind} ranks"
        return _report(group, traces, samples, output, svg, title, as_json=as_json)

    run_in_group(
        context,
        "launcher.trace_moe",
        ranks,
        options,
        work,
        default_ranks=2,
        backend=backend,
        debug=debug,
    )


def trace_call(
    group: Group,
    spec: MoESpec,
    config: EpConfig,
    tokens: str,
    routing: str,
    calls: int,
    seconds: float,
    seed: int,
    backend: Backend,
) -> tuple[list[LayerTrace], dict[int, list[MeteredSample]]]:
    """Collective, with ``MEGAMOE_TRACE`` set: every rank's trace of the last of some calls.

    Args:
        group: of the ranks.
        spec: the layer.
        config: how it runs; ``max_tokens`` is set here.
        tokens: of every rank, as ``tokens_per_rank`` reads them.
        routing: as ``route`` reads it.
        seed: of weights, activations and routes.
        calls: how many at least.
        seconds: how long at least.
        backend: of the layer.

    Returns:
        Traces by rank, and by rank what its sensors said, in seconds after that call's end.
    """
    import torch

    from launcher.workloads import random_activations, route, tokens_per_rank
    from megamoe.layer import open_layer
    from megamoe.weights import random_experts

    counts = group.together(lambda: tokens_per_rank(tokens, group.num_ranks, seed))
    config = replace(config, max_tokens=max(1, *counts))
    device = torch.device(group.device)
    sampler = sampler_of(group.device)
    read: list[tuple[float, dict[str, float]]] = []

    def keep(reading: Reading) -> None:
        if not reading.unavailable:
            read.append((time.monotonic(), reading.values))

    layer = group.together(lambda: open_layer(spec, config, backend=backend))
    with layer:
        group.together(
            lambda: layer.load_weights(
                random_experts(spec, group.rank, group.num_ranks, seed, device=device)
            )
        )
        mine = counts[group.rank]
        x = random_activations(spec, group.rank, mine, seed).to(device)
        idx, weight = (
            t.to(device) for t in route(routing, spec, group.num_ranks, group.rank, mine, seed)
        )
        group.barrier()
        begun = time.monotonic()
        layer.run(x, idx, weight)
        took = max(group.gather(time.monotonic() - begun))
        sampler.start(keep, _PERIOD_S)
        for _ in range(max(calls - 1, int(seconds / took), 1)):
            layer.run(x, idx, weight)
        ended = time.monotonic()
        keep(sampler.read())
        sampler.stop()
        trace = layer.trace()
    samples: list[MeteredSample] = [(at - ended, values) for at, values in read]
    return group.gather(trace), dict(enumerate(group.gather(samples)))


def write_trace(path: Path, chrome: dict[str, Any]) -> None:
    """Compact JSON, compressed where the name says so."""
    make_folder_for(path)
    data = json.dumps(chrome, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _report(
    group: Group,
    traces: list[LayerTrace],
    samples: dict[int, list[MeteredSample]],
    output: Path,
    svg: Path | None,
    title: str,
    *,
    as_json: bool,
) -> int:
    from launcher.moe_perfetto import chrome_trace
    from launcher.moe_timeline import timeline_svg
    from launcher.moe_trace import trace_figures, trace_problems

    problems = [f"rank {t.rank}: {problem}" for t in traces for problem in trace_problems(t)]
    if group.first:
        write_trace(output, chrome_trace(traces, samples))
        if svg is not None:
            make_folder_for(svg)
            svg.write_text(timeline_svg(traces[0], title=title))
        figures = [trace_figures(trace) for trace in traces]
        if as_json:
            print_json({"title": title, "ranks": figures, "problems": problems})
        else:
            _print(title, figures, output)
            for problem in problems:
                stderr.print(problem, style="red", markup=False, soft_wrap=True)
    return EXIT_WRONG if problems else 0


def _print(title: str, figures: list[dict[str, Any]], output: Path) -> None:
    shown = table(title, "figure", *(f"rank {rank}" for rank in range(len(figures))))
    plain = ("call_us", "stage_us", "compute_us", "communication_us", "overlapped_us", "overlap")
    for name in (*plain, "exposed_us", "math_busy", "wave_tail_us", "rows_remote"):
        shown.add_row(name, *(f"{of_rank.get(name)}" for of_rank in figures))
    for ring in ("l1", "l2"):
        most = [f"{of_rank['high_water'][ring]}" for of_rank in figures if "high_water" in of_rank]
        shown.add_row(f"high water {ring}", *most)
    for wait in sorted({w for of_rank in figures for w in of_rank.get("wait_us", {})}):
        values = [f"{of_rank.get('wait_us', {}).get(wait, 0)}" for of_rank in figures]
        shown.add_row(f"waits, µs: {wait}", *values)
    stdout.print(shown)
    stdout.print(f"written: {output} (open it in ui.perfetto.dev)", soft_wrap=True)


if __name__ == "__main__":
    typer.run(command)
