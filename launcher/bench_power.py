"""``megamoe bench power``: does overlap pay once the board is at its power cap?

The same work at sustained load in several builds of the kernel, in turns: ``overlapped`` as it is,
``full_rings`` with rings that hold the whole call, and ``phased``, which has such rings too and
pulls everything, then does all of Linear 1, all of Linear 2, the combine (``csrc/moe/phased.cuh``).
``traced`` is ``overlapped`` with events recorded: what a trace costs. Each is also timed in bursts:
calls with pauses between them, which the power cap does not hold back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from launcher.console import (
    EXIT_WRONG,
    BackendOption,
    DebugFlag,
    ExpertsOption,
    JsonFlag,
    ModelOption,
    RanksOption,
    SeedOption,
    SizeOption,
    make_folder_for,
    print_json,
    stdout,
    table,
)
from launcher.models import published_layer
from launcher.ranks import Group, run_in_group
from megamoe.errors import SpecError
from megamoe.spec import EpConfig, MoESpec

__all__ = ["VARIANTS", "command"]

VARIANTS: Final = ("overlapped", "full_rings", "phased", "traced")


def command(
    context: typer.Context,
    model: ModelOption = "deepseek-v3",
    ranks: RanksOption = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, max=(1 << 24) - 1, help="Tokens per rank. May be repeated."),
    ] = None,
    experts: ExpertsOption = None,
    hidden: SizeOption = None,
    inter: SizeOption = None,
    variant: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(VARIANTS)}. May be repeated.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of a turn.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each variant.")] = 2,
    seed: SeedOption = 1,
    backend: BackendOption = "auto",
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Power, clocks and energy per token of a layer under load, overlapped and phase by phase."""

    def options(num_ranks: int, device: str | None) -> tuple[MoESpec, list[str], list[int]]:
        from launcher.beforehand import need_cases

        spec = published_layer(model, experts=experts, hidden=hidden, inter=inter)
        names, counts = _variants(variant, device), _counts(tokens, device)
        config = EpConfig(num_ranks=num_ranks, max_tokens=1)
        need_cases(spec, config, [(str(count), "uniform") for count in counts], seed, device)
        return spec, names, counts

    def work(group: Group, found: tuple[MoESpec, list[str], list[int]]) -> int:
        from launcher.power import measure

        spec, names, counts = found
        rows = [
            row
            for count in counts
            for row in measure(group, spec, model, count, names, seconds, rounds, seed)
        ]
        return _report(group, rows, output, as_json=as_json)

    run_in_group(
        context,
        "launcher.bench_power",
        ranks,
        options,
        work,
        default_ranks=1,
        backend=backend,
        debug=debug,
    )


def _counts(tokens: list[int] | None, device: str | None) -> list[int]:
    """The default is for GPUs: such a call of deepseek-v3 takes CPU ranks many minutes."""
    if not tokens and device == "cpu":
        raise SpecError(
            "power is measured on GPUs; CPU ranks only show that it runs, and need --tokens: "
            "take a small layer, like --model qwen3-30b --experts 16 --tokens 16"
        )
    return tokens or [8192]


def _variants(names: list[str] | None, device: str | None) -> list[str]:
    """CPU ranks have no build that runs phase by phase."""
    known = VARIANTS if device != "cpu" else tuple(v for v in VARIANTS if v != "phased")
    for name in names or []:
        if name not in known:
            raise SpecError(f"--variant {name}: must be one of {', '.join(known)}")
    return names or list(known)


def _report(group: Group, rows: list[dict[str, Any]], output: Path | None, *, as_json: bool) -> int:
    from launcher.meta import run_meta, typed_command

    wrong = [row for row in rows if not row["same_bits"]]
    if group.first:
        typed = typed_command("bench power", group.num_ranks)
        notes = (
            "variants in turns; burst: medians of calls with pauses between them; sustained: back "
            "to back, the first fifth of a turn left out; weights stay in place, L2 is not flushed"
        )
        found = {"meta": run_meta(command=typed, notes=notes), "rows": rows}
        if output is not None:
            make_folder_for(output)
            output.write_text(json.dumps(found, separators=(",", ":")) + "\n")
        if as_json:
            print_json(found)
        else:
            _print(rows)
    return EXIT_WRONG if wrong else 0


def _print(rows: list[dict[str, Any]]) -> None:
    from launcher.report_html import shown as as_text

    columns = ("burst_us", "sustained_us", "watts", "sm_mhz", "joules_per_token", "throttle")
    shown = table("sustained load", "variant", "tokens", *columns, "same bits")
    for row in rows:
        values = [row[name] for name in columns]
        cells = ["—" if value is None else as_text(value) for value in values]
        shown.add_row(row["variant"], str(row["tokens"]), *cells, str(row["same_bits"]))
    stdout.print(shown)


if __name__ == "__main__":
    typer.run(command)
