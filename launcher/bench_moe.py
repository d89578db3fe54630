"""``megamoe bench moe``: the layer's time beside what runs the same work without it.

Every contender is checked against the oracle on a sample of tokens before it is timed; one that is
wrong gets no time, and the exit code is 1. Figures that a machine cannot give are null, and the
row's ``reasons`` say why.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from launcher.console import (
    EXIT_WRONG,
    BackendOption,
    DebugFlag,
    JsonFlag,
    RanksOption,
    human_bytes,
    print_json,
    progress,
    stderr,
    stdout,
    table,
)
from launcher.ranks import Group, run_in_group
from megamoe.errors import SpecError
from megamoe.spec import MODELS, MoESpec, WeightDtype

if TYPE_CHECKING:
    from launcher.moe_rows import BenchOptions
    from megamoe.layer import Backend

__all__ = ["command"]

_CONTENDERS: Final = ("hf_grouped_mm", "hf_eager", "hf_eager_fp32")


def command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "qwen3-30b",
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
        typer.Option(help=f"Contender: {', '.join(_CONTENDERS)}, or none. May be repeated."),
    ] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Fewer experts than the model has.")
    ] = None,
    weight_dtype: Annotated[str, typer.Option(help="fp8 or bf16.")] = "fp8",
    block_m: Annotated[
        int, typer.Option(help="Rows of a ring block; 0 takes the backend's choice.")
    ] = 0,
    ring_blocks: Annotated[
        int, typer.Option(min=0, help="Blocks of each ring; 0 takes the recommendation.")
    ] = 0,
    workers: Annotated[
        int, typer.Option(min=0, help="CPU worker threads per rank; 0 shares out the cores.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 5,
    calls: Annotated[int, typer.Option(min=1, help="Timed calls in a turn.")] = 10,
    turn_s: Annotated[
        float, typer.Option("--turn-seconds", help="A turn ends early after so many seconds.")
    ] = 10.0,
    sample: Annotated[
        int, typer.Option(min=1, help="Tokens per rank that are compared with the oracle.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Of weights, activations and routes.")] = 1,
    backend: BackendOption = "auto",
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Time an MoE layer beside its contenders, after checking all of them."""

    def options() -> BenchOptions:
        from launcher.moe_rows import BenchOptions

        return BenchOptions(
            model=model,
            spec=_spec(model, experts, weight_dtype),
            tokens=tokens or ["64"],
            routing=routing or ["uniform"],
            against=_against(against),
            block_m=block_m,
            ring_blocks=ring_blocks,
            workers=workers,
            rounds=rounds,
            calls=calls,
            turn_s=turn_s,
            sample=sample,
            seed=seed,
            backend=cast("Backend", backend),
        )

    run_in_group(
        context,
        "launcher.bench_moe",
        ranks,
        lambda group: _bench(group, options(), output, as_json=as_json),
        default_ranks=2,
        backend=backend,
        debug=debug,
    )


def _spec(model: str, experts: int | None, weight_dtype: str) -> MoESpec:
    """The routed part of a published layer."""
    if model not in MODELS:
        raise SpecError(f"--model {model}: must be one of {', '.join(MODELS)}")
    spec = replace(MODELS[model], num_shared=0, weight_dtype=cast("WeightDtype", weight_dtype))
    return spec if experts is None else replace(spec, num_experts=experts)


def _against(names: list[str] | None) -> list[str]:
    if names is None:
        return list(_CONTENDERS)
    if names == ["none"]:
        return []
    for name in names:
        if name not in _CONTENDERS:
            raise SpecError(f"--against {name}: must be one of {', '.join(_CONTENDERS)}, or none")
    return names


def _bench(group: Group, options: BenchOptions, output: Path | None, *, as_json: bool) -> int:
    from launcher import moe_rows
    from launcher.meta import run_meta

    with progress(shown=group.first and not as_json) as bar:
        rows, backend, device = moe_rows.bench(group, options, bar)
    ok = all(row["ok"] for row in rows)
    if group.first:
        typed = " ".join(["megamoe bench moe", f"--ranks {group.num_ranks}", *sys.argv[1:]])
        meta = run_meta(
            command=typed,
            backend=backend,
            device=device,
            transformers=_version("transformers"),
            load_average=[round(load, 2) for load in os.getloadavg()],
        )
        found = {"meta": meta, "rows": rows}
        if output is not None:
            _write(output, found)
        if as_json:
            print_json(found)
        else:
            _print(found, output)
    return 0 if ok else EXIT_WRONG


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _write(path: Path, found: dict[str, Any]) -> None:
    """In one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(path)


def _print(found: dict[str, Any], output: Path | None) -> None:
    meta, rows = found["meta"], found["rows"]
    shown = table(
        f"{rows[0]['model']} on {rows[0]['ranks']} {meta['backend']} ranks ({meta['cpu']})",
        "contender",
        "tokens",
        "routing",
        "median ms",
        "p99 ms",
        "CPU ms",
        "error",
        "allowed",
        "ours is",
    )
    for row in rows:
        mine = row["contenders"]["megamoe"]["times"]
        for name, of_one in row["contenders"].items():
            check, times = of_one["check"], of_one["times"]
            ratio = times["median_us"] / mine["median_us"] if times and mine else None
            shown.add_row(
                name,
                str(row["tokens"]),
                row["routing"],
                f"{times['median_us'] / 1e3:.2f}" if times else "—",
                f"{times['p99_us'] / 1e3:.2f}" if times else "—",
                f"{times['cpu_us'] / 1e3:.2f}" if times else "—",
                f"{check['rel_err']:.1e}" if check else "—",
                f"{check['allowed']:.1e}" if check else "—",
                "" if name == "megamoe" else f"{ratio:.2f}× as fast" if ratio else "—",
            )
        shown.add_section()
    stdout.print(shown)
    for row in rows:
        for name in row["contenders"]:
            if name in row["reasons"]:
                stderr.print(f"{name}: {row['reasons'][name]}", markup=False, soft_wrap=True)
        if memory := row["memory"]:
            stdout.print(
                f"memory: {human_bytes(memory['growth_pss_peak'])} over the imports at its peak, "
                f"{memory['peak_over_needed']:.3f} of weights and windows "
                f"({human_bytes(memory['weights_and_windows'])})",
                soft_wrap=True,
            )
    if output is not None:
        stdout.print(f"written: {output}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(command)
