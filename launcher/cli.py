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


app.command("run")(run.command)
app.command("demo")(demo.command)
app.command("serve")(serve.command)
app.command("stress")(stress.command)
app.command("doctor")(doctor.command)
app.command("tune")(tune.command)
app.add_typer(plan.app, name="plan")
app.add_typer(estimate.app, name="estimate")

bench = typer.Typer(help="Time layers beside what runs the same work.", no_args_is_help=True)
bench.command("moe")(bench_moe.command)
bench.command("attention-pre")(bench_attention.command)
bench.command("cmp")(bench_cmp.command)
bench.command("pdl-chain")(bench_pdl_chain.command)
bench.command("power")(bench_power.command)
app.add_typer(bench, name="bench")

trace = typer.Typer(help="Record what happens inside a call.", no_args_is_help=True)
trace.command("moe")(trace_moe.command)
app.add_typer(trace, name="trace")
app.command("report")(report_file.command)

if __name__ == "__main__":
    app()
