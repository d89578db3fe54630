"""``megamoe stress``: skewed routings over every ring size from the smallest up.

    megamoe stress --ranks 4 --output stress.json
    megamoe stress --ranks 2 --backend cuda --calls 10000 --output stress.json
    megamoe stress --ranks 4 --backend cuda --threads     # all on one GPU
    torchrun --nproc-per-node 4 -m launcher.stress

Every case (routing, tokens of each rank, EP size, rows of a block, ring capacity) is compared bit
for bit with the largest ring, and that with the oracle, row by row. One group of ranks serves all
cases; for an EP size below their number it splits, and each part takes some. Ranks are processes,
or threads of one process, which is how four of them run at once on one GPU. With ``--calls`` or
``--soak`` it makes calls without end instead (``launcher/soak.py``). Exit code 1 when any differs.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from launcher.checked import refuse_void
from launcher.console import (
    EXIT_WRONG,
    BackendOption,
    DebugFlag,
    JsonFlag,
    RanksOption,
    WeightDtypeOption,
    counted,
    errors_to_exit,
    print_json,
    progress,
    stderr,
    stdout,
    table,
)
from launcher.meta import run_meta
from launcher.ranks import Group, run_in_group
from launcher.soak import SoakOptions, soak
from launcher.stress_cases import (
    RINGS,
    ROUTINGS,
    StressOptions,
    config_of,
    folded,
    loads_of,
    numbers,
    possible,
    rows_of,
    sizes_of,
)
from launcher.stress_file import read_results, save_cases, write_results
from megamoe.errors import SpecError
from megamoe.spec import MoESpec

if TYPE_CHECKING:
    from megamoe.layer import Backend

__all__ = ["command"]

_RANKS: Final = 4
_OF_CASES: Final = ("sizes", "seeds", "block_m", "replay")
_OF_SOAKS: Final = ("layers", "rounds", "misses", "seed")


def command(
    context: typer.Context,
    ranks: RanksOption = None,
    sizes: Annotated[
        str, typer.Option(help="EP sizes, like 1,2,4; those above --ranks are left out.")
    ] = "1,2,4",
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens of a rank.")] = 24,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per routing.")] = 1,
    hidden: Annotated[int, typer.Option(help="H.")] = 256,
    inter: Annotated[int, typer.Option(help="I.")] = 256,
    experts: Annotated[int, typer.Option(help="E.")] = 16,
    topk: Annotated[int, typer.Option(help="K.")] = 4,
    shared: Annotated[int, typer.Option(help="Shared experts.")] = 1,
    weight_dtype: WeightDtypeOption = "fp8",
    block_m: Annotated[str, typer.Option(help="Rows of a ring block, like 8,128.")] = "8",
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="CPU worker threads per rank, 0 shares cores; on GPUs CTAs, 0 takes every SM.",
            show_default="2 on CPUs, 0 on GPUs",
        ),
    ] = None,
    calls: Annotated[
        int, typer.Option(min=0, help="Instead: so many calls in a row under random skew.")
    ] = 0,
    soak_s: Annotated[
        float, typer.Option("--soak", min=0, help="Instead: such calls for so many s, once open.")
    ] = 0.0,
    layers: Annotated[int, typer.Option(min=1, max=64, help="Layers open at once in a soak.")] = 6,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, max=1000, help="Parts of a soak, each with rings and inputs of its own."
        ),
    ] = 1,
    misses: Annotated[
        int, typer.Option(min=0, help="Calls of a soak that a rank misses: timeout and reset.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of a soak's plan.")] = 1,
    replay: Annotated[
        Path | None,
        typer.Option(help="Also a recorded routing: ids [N,K] or loads [E], .safetensors or .pt."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write every case to this JSON file.")] = None,
    backend: BackendOption = "auto",
    timeout: Annotated[float, typer.Option(help="Limit of each wait inside a call, s.")] = 30,
    threads: Annotated[
        bool,
        typer.Option("--threads", help="Ranks are threads that share a GPU, not processes."),
    ] = False,
    groups: Annotated[
        int, typer.Option(min=1, help="Soaks at once, each of --ranks threads; see --threads.")
    ] = 1,
    traced: Annotated[
        bool,
        typer.Option("--traced", help="On GPUs a build that records waits for free blocks."),
    ] = False,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Compare every ring size, routing and EP size bit for bit with the largest ring."""
    if traced:
        os.environ["MEGAMOE_TRACE"] = "1"

    endless = bool(calls or soak_s)

    def prepare(num_ranks: int, device: str | None) -> StressOptions:
        if calls and soak_s:
            raise SpecError(
                f"--calls {calls} and --soak {soak_s:g} both say how long a soak is: give one"
            )
        if calls and rounds > calls:
            raise SpecError(f"--rounds {rounds}: a part has a call at least; give {calls} or less")
        if groups > 1 and not (threads and endless):
            raise SpecError("--groups is for soaks (--calls, --soak) of --threads")
        spec = MoESpec(
            hidden=hidden,
            inter=inter,
            num_experts=experts,
            topk=topk,
            num_shared=shared,
            weight_dtype=cast("Any", weight_dtype),
        )
        found = StressOptions(
            spec,
            tokens,
            seeds,
            sizes_of(sizes, num_ranks, spec, endless=endless),
            numbers("--block-m", block_m),
            workers if workers is not None else 2 if device == "cpu" else 0,
            cast("Backend", backend),
            timeout,
            replay,
            output,
            as_json,
        )
        _need_all(found, (num_ranks,) if endless else found.sizes, device)
        if output is not None:
            read_results(output)  # before the work whose result it would lose
        return found

    def work(group: Group, options: StressOptions) -> int:
        if group.first and not threads and group.device != "cpu":
            _say_if_shared(group.num_ranks)
        if group.first and not endless:
            _say_if_idle(options.sizes, group.num_ranks, threads=threads)
        if endless:
            return _soak(
                group,
                options,
                SoakOptions(
                    spec=options.spec,
                    tokens=tokens,
                    routings=tuple(r for r in ROUTINGS if possible(r, group.num_ranks)),
                    calls=calls,
                    seconds=soak_s,
                    misses=misses,
                    layers=layers,
                    rounds=rounds,
                    seed=seed + group.which,
                    backend=options.backend,
                    timeout_s=timeout,
                    workers=options.workers or _share_of_sms(group, groups),
                    # Of several groups the last, so that the plain build has its soaks, too.
                    traced=traced and group.which == groups - 1,
                ),
            )
        return _stress(group, options)

    with errors_to_exit(debug=debug):
        if endless:
            refuse_void(context, _OF_CASES, "for cases, without --calls and --soak")
        else:
            refuse_void(context, _OF_SOAKS, "in soaks, with --calls or --soak")
    if threads:
        from launcher.thread_ranks import run_in_threads

        with errors_to_exit(debug=debug):
            code = run_in_threads(
                ranks or _RANKS,
                backend,
                lambda group: work(
                    group, group.together(lambda: prepare(group.num_ranks, group.device))
                ),
                groups=groups,
            )
        raise typer.Exit(code)
    run_in_group(
        context,
        "launcher.stress",
        ranks,
        prepare,
        work,
        default_ranks=_RANKS,
        backend=backend,
        debug=debug,
    )


def _say_if_shared(num_ranks: int) -> None:
    """Processes that share a GPU take turns of milliseconds on it, at every wait for each other."""
    import torch

    gpus = torch.cuda.device_count()
    if num_ranks > gpus:
        stderr.print(
            f"{num_ranks} rank processes take turns on {gpus} GPU(s), which is slow: --threads "
            "makes them threads that run at once",
            style="dim",
            markup=False,
            soft_wrap=True,
        )


def _say_if_idle(sizes: tuple[int, ...], num_ranks: int, *, threads: bool) -> None:
    """Groups of an EP size are cut out of the ranks, of threads one; others have nothing to do."""
    left = {n: num_ranks - n if threads else num_ranks % n for n in sizes}
    idle = [f"{count} at EP{n}" for n, count in left.items() if count]
    if idle and not (threads and num_ranks in sizes):
        also = "" if num_ranks in sizes else f"; --sizes {num_ranks} makes a group of all"
        stderr.print(
            f"of {num_ranks} ranks {', '.join(idle)} have nothing to do{also}",
            style="dim",
            markup=False,
            soft_wrap=True,
        )


def _need_all(options: StressOptions, sizes: tuple[int, ...], device: str | None) -> None:
    """Refuses, before the first case, what a later one could not be run with."""
    from launcher.beforehand import need_cases

    for size, block_m in product(sizes, options.block_m):
        loads = loads_of(options, size)
        cases = dict.fromkeys((",".join(map(str, load.tokens)), load.routing) for load in loads)
        need_cases(options.spec, config_of(options, size, block_m), cases, 0, device)


def _stress(group: Group, options: StressOptions) -> int:
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    meta = run_meta(spec=asdict(options.spec)) if group.first and options.output else {}
    with progress(shown=group.first and not options.json) as bar:
        for size in options.sizes:
            part, found = group.part(size), list[dict[str, Any]]()
            if part is not None:
                some, which, number = part
                loads = list(loads_of(options, size))[which::number]
                total = len(RINGS) * len(options.block_m) * len(loads)
                task = bar.add_task(f"EP{size}", total=total)
                for of_ring in rows_of(some, options, loads):
                    found += of_ring
                    bar.advance(task, len(of_ring))
                    if group.first:  # what is there when the time is over
                        seconds = time.perf_counter() - started
                        save_cases(options, meta, rows + found, seconds, ended=False)
                if not some.first:
                    found = []
            for theirs in group.gather(found):
                rows += theirs
    wrong = [r for r in rows if not r["ok"]]
    if group.first:
        seconds = time.perf_counter() - started
        summary = save_cases(options, meta, rows, seconds, ended=True)
        _report(options, rows, wrong, summary)
    return EXIT_WRONG if wrong else 0


def _share_of_sms(group: Group, groups: int) -> int:
    """SMs of a rank where several groups run at once; 0 leaves it to the layer."""
    if groups == 1 or group.device == "cpu":
        return 0
    import torch

    per_gpu = -(-group.num_ranks // torch.cuda.device_count()) * groups
    return torch.cuda.get_device_properties(group.device).multi_processor_count // per_gpu


def _soak(group: Group, options: StressOptions, asked: SoakOptions) -> int:
    meta = run_meta(spec=asdict(options.spec)) if group.first and options.output else {}

    def keep(found: dict[str, Any]) -> None:
        """In the place of what this soak had before; soaks of other groups and runs stay."""
        if options.output is None:
            return
        before = read_results(options.output)
        of = meta["date"], found["seed"]
        others = [s for s in before.get("soaks", []) if (s["meta"].get("date"), s["seed"]) != of]
        write_results(options.output, {**before, "soaks": [*others, {"meta": meta, **found}]})

    with progress(shown=group.first and group.which == 0 and not options.json) as bar:
        found = soak(group, asked, bar, keep)
    if group.first:
        if options.json:
            print_json(found)
        else:
            for line in (*found["problems"], *found["first_wrong"]):
                stdout.print(f"[red]differs[/red]: {line}", soft_wrap=True)
            waits = found["backpressure"]
            stdout.print(
                f"{found['calls']} calls ({found['graph_replays']} replays of graphs) of "
                f"{len(found['layers'])} layers on {found['ranks']} ranks, {found['late_ranks']} "
                f"late ranks, {found['missed_calls']} missed calls, {found['reused']} calls in "
                f"which slots are used again, {counted(waits['events'])} waits for them in "
                f"{waits['of_calls']} calls, {found['wrong']} wrong, {found['seconds']:.1f} s",
                soft_wrap=True,
            )
    return 0 if found["ok"] else EXIT_WRONG


def _report(
    options: StressOptions,
    rows: list[dict[str, Any]],
    wrong: list[dict[str, Any]],
    summary: dict[str, Any],
) -> None:
    """Prints the summary and the first failures."""
    if options.json:
        print_json({**summary, "failures": wrong})
        return
    shown = table(
        "stress: every ring against the largest, bit for bit, and against the oracle",
        "ranks",
        "L1/L2 ring",
        "cases",
        "same bits",
        "reused",
        "waited",
        "most in use",
        "max/mean",
        "error",
    )
    groups: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["ranks"], row["ring_blocks_l1"], row["ring_blocks_l2"])
        groups.setdefault(key, []).append(row)
    marks = ("high_water_l1", "high_water_l2")
    for (ranks, l1, l2), some in sorted(groups.items()):
        shown.add_row(
            str(ranks),
            f"{l1}/{l2}",
            str(len(some)),
            str(sum(r["bitwise_equal"] for r in some)),
            str(sum(r["reuses_l1"] + r["reuses_l2"] for r in some)),
            counted(folded(sum, [r["backpressure_events"] for r in some])),
            "/".join(counted(folded(max, [r[name] for r in some])) for name in marks),
            f"{max(r['max_over_mean'] for r in some):.2f}",
            f"{max(r['max_rel_err'] for r in some):.1e}",
        )
    stdout.print(shown)
    for row in wrong[:10]:
        stdout.print(f"[red]differs[/red]: {row}", soft_wrap=True)
    stdout.print(
        f"{len(rows)} cases, {len(wrong)} wrong, {counted(summary['with_backpressure'])} with "
        f"back-pressure, {summary['seconds']} s"
    )


if __name__ == "__main__":
    typer.run(command)
