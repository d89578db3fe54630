"""``megamoe report``: the report of a result file that is already there, on any machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.console import DebugFlag, errors_to_exit, report
from launcher.results import kind_of, read_results
from megamoe.errors import SpecError
from megamoe.spec import MODELS

__all__ = ["command"]


def command(
    results: Annotated[
        Path,
        typer.Argument(
            help="A file of `megamoe bench moe` or `bench attention-pre`.", dir_okay=False
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Where the report goes.", file_okay=False)],
    power: Annotated[
        Path | None, typer.Option(help="A file of `megamoe bench power`, to be shown with it.")
    ] = None,
    resources: Annotated[
        bool, typer.Option(help="Compile the kernel, to say what it takes: up to a minute.")
    ] = True,
    debug: DebugFlag = False,
) -> None:
    """Make a report (JSON and one HTML file) of a result file."""
    from launcher.report import build_report, kernel_resources, write_report

    with errors_to_exit(debug=debug):
        found = read_results(results)
        rows, kind = found["rows"], kind_of(found["rows"])
        if kind is None:
            raise SpecError(
                f"{results} holds no rows that a report shows: give a file that `megamoe bench moe`"
                " or `megamoe bench attention-pre` has written"
            )
        model = str(rows[0].get("model"))
        taken = None
        if resources and found["meta"].get("gpu") and model in MODELS:
            dtype = rows[0].get("weight_dtype", MODELS[model].weight_dtype)
            taken = kernel_resources(replace(MODELS[model], weight_dtype=dtype))
        made = build_report(
            found,
            kind=kind,
            resources=taken,
            power=_power(power) if power is not None else (),
        )
        for path in write_report(folder, made):
            report(f"written: {path}")


def _power(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_results(path)["rows"]
    if not all({"variant", "burst_us", "sustained_us", "series"} <= row.keys() for row in rows):
        raise SpecError(f"--power {path}: give a file that `megamoe bench power` has written")
    return rows
