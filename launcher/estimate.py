"""``megamoe estimate``: what a machine could do, from formulas whose sources are printed with them.

Everything here is a model. Measured times are in ``benchmarks/results`` and come from
``megamoe bench``; ``estimate moe --against`` prints the model's error on such rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from launcher.checked import Command, given
from launcher.console import (
    DebugFlag,
    JsonFlag,
    errors_to_exit,
    print_json,
    report,
    stdout,
    table,
)
from launcher.models import published_layer
from launcher.results import rows_of_gpus
from megamoe.errors import SpecError
from megamoe.spec import MAX_RANKS, MODELS

if TYPE_CHECKING:
    from launcher.estimates import Figure, Machine

__all__ = ["app"]

app = typer.Typer(
    help="Models of time: kernel gaps, overlap bound, roofline, a layer at any EP size.",
    no_args_is_help=True,
)

_MOST: Final = 1 << 24
_LABEL: Final = "a model, not a measurement"
_Model = Annotated[str, typer.Option(help=f"A published layer: {', '.join(MODELS)}.")]
_Experts = Annotated[
    int,
    typer.Option(min=0, help="Experts, copies included, so that R divides them; 0: the model's."),
]
_Ranks = Annotated[str, typer.Option(help=f"EP sizes of 1..{MAX_RANKS}, like 1,2,8.")]
_Tokens = Annotated[str, typer.Option(help="Tokens per rank, like 8,64,512.")]
_Link = Annotated[float, typer.Option(help="Link GB/s into a GPU, and out, at once; 0: H200's.")]
_Tflops = Annotated[float, typer.Option(help="TFLOPS of FP8 grouped GEMMs; 0: H200's.")]
_Read = Annotated[float, typer.Option(help="TB/s read from memory; 0: H200's.")]


@app.command("gaps", cls=Command)
def gaps(
    typed: typer.Context,
    model: Annotated[
        str, typer.Option(help="A dense decoder: qwen3-0.6b or qwen3-8b; or give --kernels.")
    ] = "qwen3-0.6b",
    kernels: Annotated[
        Path | None,
        typer.Option(help="JSON or CSV of kernels: name, bytes or us, count."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=_MOST, help="Sequences of the decode step.")] = 1,
    context: Annotated[int, typer.Option(min=1, max=_MOST, help="Keys per sequence.")] = 1024,
    bandwidth: Annotated[
        float,
        typer.Option(min=0, max=1e9, help="TB/s that a kernel of the list reaches; 0: H200's."),
    ] = 0.0,
    gap: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1e9, help="Other gaps in µs, as in a graph. May be repeated."),
    ] = None,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """The part of a decode step that lies between its kernels, by the way they are launched."""
    with errors_to_exit(debug=debug):
        from launcher.estimate_gaps import (
            DECODERS,
            WAYS,
            Way,
            decode_kernels,
            gap_estimate,
            own_time_us,
            read_kernels,
        )
        from launcher.estimates import H200

        shapes = [f"--{n}" for n in ("model", "batch", "context") if given(typed, n)]
        if kernels is not None and shapes:
            raise SpecError(f"--kernels lists the work itself: leave {', '.join(shapes)} out")
        if kernels is not None:
            name, work = str(kernels), read_kernels(kernels)
        elif model in DECODERS:
            name = f"{model}, batch {batch}, {context} keys"
            work = decode_kernels(DECODERS[model], batch, context)
        else:
            raise SpecError(
                f"--model {model}: must be one of {', '.join(DECODERS)}; or give --kernels FILE"
            )
        rate = bandwidth * 1e12 or H200.read
        ways = [*WAYS, *(Way(f"gap {us:g} µs", us, 0.0, "--gap") for us in gap or [])]
        found = [gap_estimate(work, rate, way) for way in ways]
        short = sum(k.count for k in work if own_time_us(k, rate) < 1.0)
        formula = "total = max(sum of bytes / bandwidth + n·gap, n·launch)"
        if as_json:
            print_json(
                {
                    "label": _LABEL,
                    "name": name,
                    "bandwidth_tbs": rate / 1e12,
                    "kernels_under_1_us": short,
                    "formula": formula,
                    "ways": [e.to_dict() for e in found],
                }
            )
            return
        shown = table(
            f"{name}: {found[0].kernels} kernels, {short} of them under 1 µs ({_LABEL})",
            "launched",
            "kernels µs",
            "gaps µs",
            "host µs",
            "step µs",
            "not kernels",
            "bound by",
        )
        for e in found:
            values = (e.data_us, e.gaps_us, e.host_us, e.total_us)
            shown.add_row(e.way, *(f"{v:.0f}" for v in values), f"{e.share:.0%}", e.bound)
        stdout.print(shown)
        report(f"{formula}; {rate / 1e12:.2f} TB/s")
        for source in dict.fromkeys(e.source for e in found):
            ways_of = ", ".join(e.way for e in found if e.source == source)
            report(f"{ways_of}: {source}", style="dim")


@app.command("overlap", cls=Command)
def overlap(
    model: _Model = "v4-pro",
    ranks: _Ranks = "2,8,72",
    link_gbs: _Link = 0.0,
    tflops: _Tflops = 0.0,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Whether a layer's communication can hide behind its arithmetic: C/B against V_comp/V_comm."""
    with errors_to_exit(debug=debug):
        from launcher.estimates import overlap as bound

        spec, machine = published_layer(model), _machine(link_gbs, tflops, 0.0)
        sizes = _numbers("--ranks", ranks, MAX_RANKS)
        columns = {r: bound(spec, r, machine) for r in sizes}
        _show(f"{model} on {machine.name}", "EP", columns, as_json=as_json)


@app.command("roofline", cls=Command)
def roofline(
    model: _Model = "v4-pro",
    experts: _Experts = 0,
    ranks: Annotated[int, typer.Option(help="EP size.")] = 8,
    tokens: _Tokens = "8,64,512,1024,4096,8192",
    link_gbs: _Link = 0.0,
    tflops: _Tflops = 0.0,
    read_tbs: _Read = 0.0,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Three lower bounds of a call (arithmetic, weights, link) and the largest of them."""
    with errors_to_exit(debug=debug):
        from launcher.estimates import load
        from launcher.estimates import roofline as bounds

        spec, machine = (
            published_layer(model, experts=experts, copies=True),
            _machine(link_gbs, tflops, read_tbs),
        )
        counts = _numbers("--tokens", tokens, _MOST)
        columns = {t: bounds(load(spec, ranks, t), machine) for t in counts}
        _show(f"{model}, EP{ranks} on {machine.name}", "T", columns, as_json=as_json)


@app.command("moe", cls=Command)
def moe(
    context: typer.Context,
    model: _Model = "v4-pro",
    experts: _Experts = 0,
    ranks: _Ranks = "1,2,4,8,16,32,64",
    tokens: _Tokens = "8,64,512,1024,4096,8192",
    imbalance: Annotated[
        float, typer.Option(help="Rows of the busiest rank over the mean of ranks.")
    ] = 1.0,
    link_gbs: _Link = 0.0,
    tflops: _Tflops = 0.0,
    read_tbs: _Read = 0.0,
    against: Annotated[
        Path | None,
        typer.Option(
            help="A result file: print the model beside its rows, of which --model, --experts, "
            "--ranks and --tokens choose."
        ),
    ] = None,
    refit: Annotated[
        bool, typer.Option("--refit", help="Fit the coefficients to --against first.")
    ] = False,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Modelled time of an MoE layer for any EP size and link speed, phase by phase."""
    with errors_to_exit(debug=debug):
        from launcher.estimate_layer import FITTED, fit, predict
        from launcher.estimate_once import FORMULA, SOURCE, once_cells, once_per_rank

        machine = _machine(link_gbs, tflops, read_tbs)
        rows = None if against is None else rows_of_gpus(against)
        if refit and rows is None:
            raise SpecError("--refit needs --against FILE to fit to")
        coefficients = fit(rows, machine) if refit and rows is not None else FITTED
        if rows is not None:
            if given(context, "imbalance"):
                raise SpecError("--imbalance: rows that the model is compared with are uniform")
            chosen = {
                "model": [model] if given(context, "model") else None,
                "experts": [experts] if experts else None,
                "ranks": _numbers("--ranks", ranks, MAX_RANKS) if given(context, "ranks") else None,
                "tokens": _numbers("--tokens", tokens, _MOST) if given(context, "tokens") else None,
            }
            _show_error(rows, chosen, machine, coefficients, str(against), as_json=as_json)
            return
        spec = published_layer(model, experts=experts, copies=True)
        sizes = _numbers("--ranks", ranks, MAX_RANKS)
        counts = _numbers("--tokens", tokens, _MOST)
        found = {
            r: {t: predict(spec, r, t, machine, coefficients, imbalance) for t in counts}
            for r in sizes
        }
        once = {
            r: {t: once_per_rank(spec, r, t, machine, coefficients) for t in counts} for r in sizes
        }
        if as_json:
            print_json(
                {
                    "label": _LABEL,
                    "model": model,
                    "machine": vars(machine),
                    "coefficients": vars(coefficients),
                    "imbalance": imbalance,
                    "rows": [
                        {"ranks": r, "tokens": t, **p.to_dict()}
                        for r, of_size in found.items()
                        for t, p in of_size.items()
                    ],
                    "once_per_rank": {
                        "formula": FORMULA,
                        "source": SOURCE,
                        "rows": [once[r][t].to_dict() for r in sizes for t in counts],
                    },
                }
            )
            return
        shown = table(
            f"{model} on {machine.name}, µs a call and fraction of the floor ({_LABEL})",
            "tokens per rank",
            *(f"EP{r}" for r in sizes),
        )
        for t in counts:
            cells = (found[r][t] for r in sizes)
            shown.add_row(
                str(t), *(f"{p.total_us:.0f} ({p.floor_us / p.total_us:.2f})" for p in cells)
            )
        stdout.print(shown)
        shown = table(
            f"{model}, at most, if rows crossed once to a rank / and came back summed ({_LABEL})",
            "tokens per rank",
            *(f"EP{r}" for r in sizes),
        )
        for line in once_cells(once):
            shown.add_row(*line)
        stdout.print(shown)
        _print_sources(found[sizes[0]][counts[0]].phases)
        report(f"{FORMULA}; uniform routes, whatever --imbalance says")
        report(f"ranks per token: {SOURCE}", style="dim")
        report(f"fitted: {coefficients}; --against FILE prints its error on measured rows")


# ---------------------------------------------------------------- helpers


def _machine(link_gbs: float, tflops: float, read_tbs: float) -> Machine:
    """The H200 with what the user knows better."""
    from launcher.estimates import H200

    given = {"link-gbs": link_gbs * 1e9, "tflops": tflops * 1e12, "read-tbs": read_tbs * 1e12}
    for option, value in given.items():
        if value and not 1 <= value <= 1e24:
            raise SpecError(
                f"--{option}: {value:g} a second; a rate must be positive, at most 1e24, or 0 for "
                "the H200's"
            )
    changed = {k: v for k, v in zip(("link", "flops", "read"), given.values(), strict=True) if v}
    if not changed:
        return H200
    options = ", ".join(f"{k} {v:.3g}/s" for k, v in changed.items())
    return replace(
        H200, name=f"H200 with {options}", source=f"given: {options}; else {H200.source}", **changed
    )


def _numbers(option: str, text: str, most: int) -> list[int]:
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isascii() and p.isdigit() and 1 <= int(p) <= most for p in parts):
        raise SpecError(f"{option} {text}: write numbers of 1..{most}, like 1,2,8")
    return [int(p) for p in parts]


def _show(title: str, head: str, columns: dict[int, list[Figure]], *, as_json: bool) -> None:
    """Figures by column: EP size or token count."""
    if as_json:
        by_column = {str(k): [f.to_dict() for f in v] for k, v in columns.items()}
        print_json({"label": _LABEL, "name": title, "by": head, "figures": by_column})
        return
    shown = table(f"{title} ({_LABEL})", "", "unit", *(f"{head} {k}" for k in columns))
    first = next(iter(columns.values()))
    for i, figure in enumerate(first):
        shown.add_row(figure.name, figure.unit, *(f"{c[i].value:,.4g}" for c in columns.values()))
    stdout.print(shown)
    _print_sources(first)


def _print_sources(figures: list[Figure]) -> None:
    for figure in figures:
        report(f"{figure.name} = {figure.formula}")
    for source in dict.fromkeys(f.source for f in figures):
        names = ", ".join(f.name for f in figures if f.source == source)
        report(f"{names}: {source}", style="dim")


def _show_error(
    rows: list[dict[str, Any]],
    chosen: dict[str, list[Any] | None],
    machine: Machine,
    coefficients: Any,
    name: str,
    *,
    as_json: bool,
) -> None:
    from launcher.estimate_layer import moe_error

    every = moe_error(rows, machine, coefficients)
    if not every:
        raise SpecError(f"{name} has no uniform rows with a time")
    wanted = {key: values for key, values in chosen.items() if values is not None}
    errors = [e for e in every if all(e[key] in values for key, values in wanted.items())]
    if not errors:
        asked = ", ".join(f"{key} {'/'.join(map(str, v))}" for key, v in wanted.items())
        there = sorted({(e["model"], e["ranks"], e["experts"]) for e in every})
        has = ", ".join(f"{m} EP{r} of {n} experts" for m, r, n in there)
        raise SpecError(f"{name} has no uniform rows of {asked}: it has {has}")
    rms = math.sqrt(sum(e["error"] ** 2 for e in errors) / len(errors))
    worst = max(errors, key=lambda e: abs(e["error"]))
    if as_json:
        print_json(
            {
                "label": _LABEL,
                "coefficients": vars(coefficients),
                "rows": errors,
                "rms_error": round(rms, 4),
                "worst_error": worst["error"],
            }
        )
        return
    shown = table(
        f"the model beside {name}",
        "layer",
        "EP",
        "experts",
        "tokens",
        "measured µs",
        "model µs",
        "error",
    )
    for e in errors:
        shown.add_row(
            e["model"],
            *(str(e[k]) for k in ("ranks", "experts", "tokens", "measured_us", "model_us")),
            f"{e['error']:+.1%}",
        )
    stdout.print(shown)
    report(f"error: {rms:.1%} root mean square, {worst['error']:+.1%} worst; {coefficients}")
