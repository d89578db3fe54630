"""``megamoe bench moe``: the layer's time beside what runs the same work without it.

    megamoe bench moe --ranks 2 --tokens 64 --routing zipf
    megamoe bench moe --ranks 2 --backend cuda --suite required --output moe.json

On CPU ranks the contenders are Hugging Face's experts; on GPUs a public fused kernel, an unfused
pipeline over NCCL, and its grouped GEMMs alone. Every contender is checked against the oracle on a
sample of tokens before it is timed; one that is wrong gets no time, and the exit code is 1. Figures
that a machine cannot give are null, and the row's ``reasons`` say why.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
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
    RanksOption,
    RingBlocksOption,
    SeedOption,
    WeightDtypeOption,
    WorkersOption,
    make_folder_for,
    print_json,
    progress,
    stdout,
)
from launcher.models import published_layer
from launcher.moe_tables import print_cpu, print_gpu
from launcher.ranks import Group, run_in_group, sampler_of
from launcher.results import write_whole
from megamoe.errors import SpecError
from megamoe.spec import MODELS

if TYPE_CHECKING:
    from launcher.moe_rows import BenchOptions
    from megamoe.layer import Backend

__all__ = ["command"]

_MODEL: Final = "qwen3-30b"
_CPU_CONTENDERS: Final = ("hf_grouped_mm", "hf_eager", "hf_eager_fp32")
_GPU_CONTENDERS: Final = ("peer", "unfused")

_FEW: Final = ("8", "64", "512", "1024", "4096", "8192")
SUITES: Final[dict[str, list[tuple[str, list[tuple[str, str]]]]]] = {
    "required": [
        (
            "v4-flash",
            [
                *((t, "uniform") for t in _FEW),
                *((t, r) for t in ("128", "4096") for r in ("zipf", "hot_experts")),
            ],
        ),
        (
            "deepseek-v3",
            [*((t, "uniform") for t in _FEW), ("128", "all_to_one"), ("4096", "all_to_one")],
        ),
        ("v4-pro", [(t, "uniform") for t in ("64", "512", "4096", "8192")]),
    ],
}
"""What a published file of GPU figures holds, by name: cases of (tokens, routing) of each model."""


def command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(MODELS)}.", show_default=_MODEL),
    ] = None,
    ranks: RanksOption = None,
    tokens: Annotated[
        list[str] | None,
        typer.Option(help="Tokens per rank: T, T0,T1,… or PATTERN:T. May be repeated."),
    ] = None,
    routing: Annotated[
        list[str] | None,
        typer.Option(help="Routing, like zipf:1.2 or uniform+masked:0.2. May be repeated."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Contender: {', '.join(_CPU_CONTENDERS)} on CPUs, {', '.join(_GPU_CONTENDERS)} "
            "on GPUs, or none. May be repeated. Default: all.",
            show_default=False,
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help=f"Named cases instead of --model, --tokens and --routing: {', '.join(SUITES)}."
        ),
    ] = None,
    experts: ExpertsOption = None,
    share_of: Annotated[
        int,
        typer.Option(
            min=0,
            help="Ranks hold the experts that they would hold in a group of so many: what a rank "
            "of it does, without its links. 0: this group's.",
        ),
    ] = 0,
    weight_dtype: WeightDtypeOption = "fp8",
    block_m: BlockRowsOption = 0,
    ring_blocks: RingBlocksOption = 0,
    workers: WorkersOption = 0,
    sustain: Annotated[
        float,
        typer.Option(min=0, help="Seconds of calls back to back on GPUs, for power and clocks."),
    ] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 5,
    calls: Annotated[int, typer.Option(min=1, help="Timed calls in a turn.")] = 10,
    turn_s: Annotated[
        float,
        typer.Option("--turn-seconds", min=0, help="A turn ends early after so many seconds."),
    ] = 10.0,
    sample: Annotated[
        int, typer.Option(min=1, help="Tokens per rank that are compared with the oracle.")
    ] = 4,
    seed: SeedOption = 1,
    backend: BackendOption = "auto",
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Folder for a report: JSON, one HTML file, and a trace of a call."),
    ] = None,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Time an MoE layer beside its contenders, after checking all of them."""

    def options(num_ranks: int, device: str | None) -> list[BenchOptions]:
        """One for each model."""
        from launcher.beforehand import need_cases, need_own_gpus
        from launcher.moe_rows import BenchOptions

        void = {"--model": model, "--tokens": tokens, "--routing": routing}
        given = [name for name, value in void.items() if value]
        if suite is not None and suite not in SUITES:
            raise SpecError(f"--suite {suite}: must be one of {', '.join(SUITES)}")
        if suite and given:
            raise SpecError(f"--suite {suite} has cases of its own: leave {', '.join(given)} out")
        if share_of and experts:
            raise SpecError("--share-of and --experts both say how many experts there are")
        if device not in (None, "cpu"):
            need_own_gpus(num_ranks)
        found = [
            BenchOptions(
                model=name,
                spec=published_layer(
                    name,
                    experts=_share(name, share_of, num_ranks) if share_of else experts,
                    weight_dtype=weight_dtype,
                ),
                cases=cases,
                against=_against(against, device),
                block_m=block_m,
                ring_blocks=ring_blocks,
                workers=workers,
                sustain=sustain,
                rounds=rounds,
                calls=calls,
                turn_s=turn_s,
                sample=sample,
                seed=seed,
                backend=cast("Backend", backend),
            )
            for name, cases in _cases(
                suite, model or _MODEL, tokens or ["64"], routing or ["uniform"]
            )
        ]
        for one in found:
            need_cases(one.spec, one.config(num_ranks), one.cases, seed, device)
        return found

    run_in_group(
        context,
        "launcher.bench_moe",
        ranks,
        options,
        lambda group, found: _bench(group, found, output, report, as_json=as_json),
        default_ranks=2,
        backend=backend,
        debug=debug,
    )


def _cases(
    suite: str | None, model: str, tokens: list[str], routing: list[str]
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Models, and cases of (tokens, routing) of each."""
    if suite is None:
        return [(model, [(t, r) for t in tokens for r in routing])]
    return SUITES[suite]


def _share(model: str, ranks: int, num_ranks: int) -> int:
    """Experts of ``num_ranks`` ranks that hold what they would in a group of ``ranks``."""
    spec = published_layer(model)
    experts = spec.num_experts
    if experts % ranks:
        raise SpecError(f"--share-of {ranks}: must divide the {experts} experts of {model}")
    if ranks < num_ranks:
        raise SpecError(
            f"--share-of {ranks}: this group has {num_ranks} ranks already; give more than that, "
            "or leave it out"
        )
    held = experts // ranks * num_ranks
    if held < spec.topk:
        raise SpecError(
            f"--share-of {ranks}: leaves {held} experts of {model}, which routes a token to "
            f"{spec.topk}; give less"
        )
    return held


def _against(names: list[str] | None, device: str | None) -> list[str]:
    known: tuple[str, ...] = _CPU_CONTENDERS if device == "cpu" else _GPU_CONTENDERS
    if device is None:  # of either kind; the ranks know which
        known = (*_CPU_CONTENDERS, *_GPU_CONTENDERS)
    if names is None:
        return list(known)
    if names == ["none"]:
        return []
    for name in names:
        if name not in known:
            where = {"cpu": "on CPU ranks ", None: ""}.get(device, "on GPUs ")
            raise SpecError(
                f"--against {name}: {where}it must be one of {', '.join(known)}, or none"
            )
    return names


def _bench(
    group: Group,
    options: list[BenchOptions],
    output: Path | None,
    report: Path | None,
    *,
    as_json: bool,
) -> int:
    found: dict[str, Any] = {"meta": {}, "rows": []}
    if group.device != "cpu":
        import torch

        found["meta"] = _meta(group, "cuda", torch.cuda.get_device_name())
    with progress(shown=group.first and not as_json) as bar:
        for of_model in options:
            before = list(found["rows"])

            def keep(rows: list[dict[str, Any]], before: list[dict[str, Any]] = before) -> None:
                """Writes what there is, so that a run that is cut off leaves it."""
                found["rows"] = [*before, *rows]
                if group.first and output is not None:
                    _write(output, found)

            if group.device == "cpu":
                from launcher import moe_rows

                rows, backend, device = moe_rows.bench(group, of_model, bar)
            else:
                from launcher import gpu_rows

                rows, backend, device = gpu_rows.bench(group, of_model, bar, keep)
            found["rows"] = [*before, *rows]
        if group.device == "cpu":
            found["meta"] = _meta(group, backend, device)
    written: list[Path] = []
    if report is not None:
        from launcher.moe_report import write_moe_report

        written = write_moe_report(group, options[0], found, report)
    ok = all(row["ok"] for row in found["rows"])
    if group.first:
        if output is not None:
            _write(output, found)
        if as_json:
            print_json(found)
        elif group.device == "cpu":
            print_cpu(found, output)
        else:
            print_gpu(found, output)
        for path in [] if as_json else written:
            stdout.print(f"written: {path}", soft_wrap=True)
    return 0 if ok else EXIT_WRONG


def _meta(group: Group, backend: str, device: str) -> dict[str, Any]:
    from launcher.meta import mig_mode, run_meta, typed_command

    meta = run_meta(
        command=typed_command("bench moe", group.num_ranks),
        backend=backend,
        device=device,
        transformers=_version("transformers"),
        load_average=[round(load, 2) for load in os.getloadavg()],
    )
    if backend == "cuda":
        values = sampler_of(group.device).read().values
        meta |= {
            "num_gpus": group.num_ranks,
            "sgl_deep_gemm": _version("sgl-deep-gemm"),
            "clocks": "as found, never set; each row has the SM clock of its sustained run",
            "power": f"as found; enforced limit {values.get('power_limit_watts')} W",
            "temperature": f"{values.get('temperature_celsius')} °C before the first call",
            "mig": mig_mode(group.device),
            "notes": "times are bursts: L2 flushed and ranks aligned on the stream before each "
            "call, the slowest rank's, median and p99 of calls; staging is in total_us",
        }
    return meta


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _write(path: Path, found: dict[str, Any]) -> None:
    make_folder_for(path)
    write_whole(path, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(command)
