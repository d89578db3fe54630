"""The console script ``megamoe``: one command per module of this package.

Modules of commands import torch inside functions only, so that ``--help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from launcher import (
    bench_attention,
    bench_cmp,
    bench_moe,
    bench_pdl_chain,
    bench_power,
    demo,
    doctor,
    estimate,
    plan,
    report_file,
    run,
    serve,
    stress,
    trace_moe,
    tune,
)
from launcher.checked import add

__all__ = ["app"]

app = typer.Typer(
    name="megamoe",
    help="An expert-parallel MoE layer as one persistent kernel per rank, on GPUs or on CPU ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from megamoe import __version__

        typer.echo(f"megamoe {__version__}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of the program itself."""


add(app, "run", run.command)
add(app, "demo", demo.command)
add(app, "serve", serve.command)
add(app, "stress", stress.command)
add(app, "doctor", doctor.command)
add(app, "tune", tune.command)
app.add_typer(plan.app, name="plan")
app.add_typer(estimate.app, name="estimate")

bench = typer.Typer(help="Time layers beside what runs the same work.", no_args_is_help=True)
add(bench, "moe", bench_moe.command)
add(bench, "attention-pre", bench_attention.command)
add(bench, "cmp", bench_cmp.command)
add(bench, "pdl-chain", bench_pdl_chain.command)
add(bench, "power", bench_power.command)
app.add_typer(bench, name="bench")

trace = typer.Typer(help="Record what happens inside a call.", no_args_is_help=True)
add(trace, "moe", trace_moe.command)
app.add_typer(trace, name="trace")
add(app, "report", report_file.command)

if __name__ == "__main__":
    app()
