"""``megamoe stress``: skewed routings over every ring size from the smallest up.

    megamoe stress --ranks 4 --output stress.json
    megamoe stress --ranks 2 --backend cuda --calls 10000 --output stress.json
    megamoe stress --ranks 4 --backend cuda --threads     # all on one GPU
    torchrun --nproc-per-node 4 -m launcher.stress

Every case (routing, tokens of each rank, EP size, rows of a block, ring capacity) is compared bit
for bit with the largest ring, and that with the oracle, row by row. One group of ranks serves all
cases; an EP size below their number runs on the first of them. Ranks are processes, or threads of
one process, which is how four of them run at once on one GPU. With ``--calls`` or
``--soak`` it makes calls without end instead (``launcher/soak.py``). Exit code 1 when any differs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from launcher.console import (
    EXIT_WRONG,
    BackendOption,
    DebugFlag,
    JsonFlag,
    RanksOption,
    WeightDtypeOption,
    counted,
    make_folder_for,
    print_json,
    progress,
    stdout,
    table,
)
from launcher.meta import run_meta
from launcher.ranks import Group, run_in_group
from launcher.results import read_json
from launcher.soak import SoakOptions, soak
from megamoe.errors import SpecError
from megamoe.spec import EpConfig, MoESpec

if TYPE_CHECKING:
    from torch import Tensor

    from megamoe.layer import Backend, MoELayer
    from megamoe.weights import ExpertWeights

__all__ = ["RINGS", "ROUTINGS", "command"]

ROUTINGS: Final = (
    "uniform",
    "zipf:0.8",
    "zipf:1.01",
    "zipf:1.2",
    "lognormal",
    "hot_expert",
    "hot_rank",
    "all_to_one",
    "one_expert",
    "local",
    "remote",
    "empty_rank",
    "uniform+masked:0.4",
    "zipf+duplicates:0.5",
    "hot_rank+duplicates+masked",
)
"""The distributions of a run (``launcher.workloads``)."""

RINGS: Final = ((0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 5), (8, 8))
"""Blocks of the L1 and L2 ring; (0, 0) holds a whole call and is what the others must equal."""

TOKENS: Final = ("{}", "ramp:{}", "empty:{}")


@dataclass(frozen=True)
class _Options:
    spec: MoESpec
    tokens: int
    seeds: int
    sizes: tuple[int, ...]
    block_m: tuple[int, ...]
    workers: int
    backend: Backend
    timeout: float
    replay: Path | None
    output: Path | None
    json: bool


@dataclass(frozen=True)
class _Load:
    """A call's worth of routing: what ring sizes are varied under."""

    routing: str
    tokens: tuple[int, ...]
    seed: int


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
        float, typer.Option("--soak", min=0, help="Instead: such calls for so many seconds.")
    ] = 0.0,
    layers: Annotated[int, typer.Option(min=1, help="Layers open at once in a soak.")] = 6,
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
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Compare every ring size, routing and EP size bit for bit with the largest ring."""

    def work(group: Group) -> int:
        options = group.together(
            lambda: _Options(
                MoESpec(
                    hidden=hidden,
                    inter=inter,
                    num_experts=experts,
                    topk=topk,
                    num_shared=shared,
                    weight_dtype=cast("Any", weight_dtype),
                ),
                tokens,
                seeds,
                _sizes(sizes, group.num_ranks),
                _numbers("--block-m", block_m),
                workers if workers is not None else 2 if group.device == "cpu" else 0,
                cast("Backend", backend),
                timeout,
                replay,
                output,
                as_json,
            )
        )
        if output is not None:
            group.together(lambda: _read(output))  # before the work whose result it would lose
        if calls or soak_s:
            return _soak(
                group,
                options,
                SoakOptions(
                    spec=options.spec,
                    tokens=tokens,
                    routings=tuple(r for r in ROUTINGS if _possible(r, group.num_ranks)),
                    calls=calls,
                    seconds=soak_s,
                    misses=misses,
                    layers=layers,
                    seed=seed,
                    backend=options.backend,
                    timeout_s=timeout,
                ),
            )
        return _stress(group, options)

    run_in_group(
        context,
        "launcher.stress",
        ranks,
        work,
        default_ranks=4,
        backend=backend,
        debug=debug,
        threads=threads,
    )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise SpecError(f"{option} {text!r}: write numbers like 1,2,4")
    return tuple(int(p) for p in parts)


def _sizes(text: str, num_ranks: int) -> tuple[int, ...]:
    sizes = tuple(sorted({n for n in _numbers("--sizes", text) if n <= num_ranks}))
    if not sizes:
        raise SpecError(f"--sizes {text!r}: all are above the {num_ranks} ranks of this group")
    return sizes


def _possible(routing: str, num_ranks: int) -> bool:
    """Whether so many ranks can show it."""
    return num_ranks > 1 or not routing.startswith(("remote", "empty_rank"))


def _loads(options: _Options, num_ranks: int) -> Iterator[_Load]:
    from launcher.workloads import tokens_per_rank

    replay = () if options.replay is None else (f"replay:{options.replay}",)
    for seed in range(options.seeds):
        seen = set()
        for pattern in TOKENS:
            tokens = tuple(tokens_per_rank(pattern.format(options.tokens), num_ranks))
            if tokens in seen or not any(tokens):
                continue
            seen.add(tokens)
            for routing in (*ROUTINGS, *replay):
                if _possible(routing, num_ranks):
                    yield _Load(routing, tokens, seed)


def _stress(group: Group, options: _Options) -> int:
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with progress(shown=group.first and not options.json) as bar:
        for size in options.sizes:
            part = group.part(size)
            if part is not None:
                loads = list(_loads(options, size))
                total = len(RINGS) * len(options.block_m) * len(loads)
                task = bar.add_task(f"EP{size}", total=total)
                for row in _size_rows(part, options, loads):
                    rows.append(row)
                    bar.advance(task)
            group.barrier()
    wrong = [r for r in rows if not r["ok"]]
    code = group.gather(EXIT_WRONG if wrong else 0)
    if group.first:
        _report(options, rows, wrong, time.perf_counter() - started)
    return max(code)


def _size_rows(group: Group, options: _Options, loads: list[_Load]) -> Iterator[dict[str, Any]]:
    """All cases of one EP size, ring by ring; the first ring holds everything."""
    from megamoe.layer import open_layer
    from megamoe.weights import random_experts

    size = group.num_ranks
    largest: dict[_Load, tuple[Tensor, float, str]] = {}
    for block_m, (ring_l1, ring_l2) in product(options.block_m, RINGS):
        base = EpConfig(
            num_ranks=size,
            max_tokens=options.tokens,
            block_m=block_m,
            num_workers=options.workers,
            timeout_s=options.timeout,
        )
        most = base.max_blocks(options.spec)
        config = replace(base, ring_l1_blocks=ring_l1 or most, ring_l2_blocks=ring_l2 or most)
        with open_layer(
            options.spec, config, backend=options.backend, rendezvous=group.rendezvous()
        ) as layer:
            layer.load_weights(random_experts(options.spec, group.rank, size, seed=0))
            for load in loads:
                yield _case(group, options, layer, load, largest)


def _case(
    group: Group,
    options: _Options,
    layer: MoELayer,
    load: _Load,
    largest: dict[_Load, tuple[Tensor, float, str]],
) -> dict[str, Any]:
    """One case on one rank; the row is complete on the first rank."""
    import torch

    from launcher.workloads import random_activations, route, skew

    spec, num_ranks, rank = options.spec, layer.config.num_ranks, group.rank
    tokens, seed = load.tokens[rank], load.seed
    x = random_activations(spec, rank, tokens, seed).to(group.device)
    idx, weight = route(load.routing, spec, num_ranks, rank, tokens, seed=seed)
    layer.clear_counters()
    y = layer.run(x, idx.to(group.device), weight.to(group.device)).cpu()
    counters = layer.counters()

    # The largest ring comes first, and is compared with the oracle; what equals it need not be.
    if load not in largest:
        largest[load] = (y, *_judge(group, spec, load, (x, idx, weight), y))
    first, error, problem = largest[load]
    # Bits, not values: NaN and -0 count.
    same = torch.equal(y.view(torch.int16), first.view(torch.int16))
    if not same:
        error, problem = _judge(group, spec, load, (x, idx, weight), y)
    mine: dict[str, Any] = {
        "same": same,
        "error": error,
        "problem": problem,
        "events": counters.backpressure_events,
        "l1": counters.high_water_l1,
        "l2": counters.high_water_l2,
        "idx": idx,
    }
    every = group.gather(mine)
    spread = skew([m["idx"] for m in every], spec)
    blocks = _blocks(spec, layer.config.block_m, [m["idx"] for m in every])
    return {
        "routing": load.routing,
        "ring_blocks_l1": counters.ring_l1_blocks,
        "ring_blocks_l2": counters.ring_l2_blocks,
        "block_m": layer.config.block_m,
        "ranks": num_ranks,
        "tokens_per_rank": list(load.tokens),
        "seed": seed,
        "bitwise_equal": all(m["same"] for m in every),
        "max_rel_err": max(m["error"] for m in every),
        "backpressure_events": _over(sum, [m["events"] for m in every]),
        "high_water_l1": _over(max, [m["l1"] for m in every]),
        "high_water_l2": _over(max, [m["l2"] for m in every]),
        "blocks": max(blocks),
        "reuses_l1": sum(max(0, n - counters.ring_l1_blocks) for n in blocks),
        "reuses_l2": sum(max(0, n - counters.ring_l2_blocks) for n in blocks),
        "max_over_mean": round(spread.max_over_mean, 3),
        "skew": spread.to_dict(),
        "ok": all(m["same"] and not m["problem"] for m in every),
        "problem": "; ".join(m["problem"] for m in every if m["problem"]) or None,
    }


def _blocks(spec: MoESpec, block_m: int, topk_idx: list[Tensor]) -> list[int]:
    """Blocks that each rank works on; those beyond a ring's capacity take a slot used before."""
    import torch

    rows = torch.stack(
        [torch.bincount(t[t >= 0].flatten(), minlength=spec.num_experts) for t in topk_idx]
    ).sum(0)
    routed = -(-rows.view(len(topk_idx), -1) // block_m)
    shared = [spec.num_shared * -(-t.shape[0] // block_m) for t in topk_idx]
    return [int(n) + s for n, s in zip(routed.sum(1), shared, strict=True)]


def _judge(
    group: Group, spec: MoESpec, load: _Load, inputs: tuple[Tensor, Tensor, Tensor], y: Tensor
) -> tuple[float, str]:
    """Every row of this rank against the oracle: the error, and what is wrong."""
    from launcher.verify import against_oracle, sample_rows

    tokens = y.shape[0]
    if not tokens:
        return 0.0, ""
    shared = [_expert(spec, spec.num_experts + s) for s in range(spec.num_shared)]
    verdict, _ = against_oracle(
        spec,
        sample_rows(tokens, tokens, load.seed),
        *inputs,
        y,
        lambda e: _expert(spec, e),
        shared,
        on_gpu=group.device != "cpu",
    )
    return verdict.error, verdict.problem


@cache
def _expert(spec: MoESpec, expert: int) -> ExpertWeights:
    from megamoe.weights import random_expert

    return random_expert(spec, expert, 0, seed=0)


def _over(fold: Callable[[list[int]], int], counts: list[int | None]) -> int | None:
    """Folds counters; None where a backend does not count."""
    known = [n for n in counts if n is not None]
    return fold(known) if len(known) == len(counts) else None


def _read(path: Path) -> dict[str, Any]:
    """An earlier result: cases keep its soaks, soaks its cases."""
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise SpecError(f"--output {path} holds no results: name another file, or remove it")
    return found


def _write(path: Path, result: dict[str, Any]) -> None:
    make_folder_for(path)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")


def _soak(group: Group, options: _Options, asked: SoakOptions) -> int:
    with progress(shown=group.first and not options.json) as bar:
        found = soak(group, asked, bar)
    if group.first:
        if options.output is not None:
            before = _read(options.output)
            meta = run_meta(spec=asdict(options.spec))
            soaks = [*before.get("soaks", []), {"meta": meta, **found}]
            _write(options.output, {**before, "soaks": soaks})
        if options.json:
            print_json(found)
        else:
            for line in (*found["problems"], *found["first_wrong"]):
                stdout.print(f"[red]differs[/red]: {line}", soft_wrap=True)
            stdout.print(
                f"{found['calls']} calls ({found['graph_replays']} replays of graphs) of "
                f"{len(found['layers'])} layers on {found['ranks']} ranks, {found['late_ranks']} "
                f"late ranks, {found['missed_calls']} missed calls, {found['wrong']} wrong, "
                f"{found['seconds']:.1f} s",
                soft_wrap=True,
            )
    return 0 if found["ok"] else EXIT_WRONG


def _report(
    options: _Options, rows: list[dict[str, Any]], wrong: list[dict[str, Any]], seconds: float
) -> None:
    """Prints the summary, and writes every case where asked to."""
    events = [r["backpressure_events"] for r in rows]
    pressed = None if None in events else sum(n > 0 for n in events)
    summary = {
        "cases": len(rows),
        "wrong": len(wrong),
        "bitwise_equal": sum(r["bitwise_equal"] for r in rows),
        "with_backpressure": pressed,
        "with_reused_slots": sum(r["reuses_l1"] + r["reuses_l2"] > 0 for r in rows),
        "max_rel_err": max(r["max_rel_err"] for r in rows),
        "seconds": round(seconds, 1),
    }
    if options.output is not None:
        found = {"meta": run_meta(spec=asdict(options.spec)), "summary": summary, "rows": rows}
        _write(options.output, {**_read(options.output), **found})
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
            counted(_over(sum, [r["backpressure_events"] for r in some])),
            "/".join(counted(_over(max, [r[name] for r in some])) for name in marks),
            f"{max(r['max_over_mean'] for r in some):.2f}",
            f"{max(r['max_rel_err'] for r in some):.1e}",
        )
    stdout.print(shown)
    for row in wrong[:10]:
        stdout.print(f"[red]differs[/red]: {row}", soft_wrap=True)
    stdout.print(
        f"{len(rows)} cases, {len(wrong)} wrong, {counted(pressed)} with back-pressure, "
        f"{seconds:.1f} s"
    )


if __name__ == "__main__":
    typer.run(command)
