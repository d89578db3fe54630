"""``megamoe bench attention-pre``: the resident kernel on one Hopper GPU, against its byte floor.

Every shape's scores are compared with the oracle before they are timed. The figures' method is said
in ``launcher/bench_attention_pre.py``; ``--contender`` adds the public kernels in one serial graph
(``launcher/attention_contender.py``), in the same process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.console import (
    DebugFlag,
    JsonFlag,
    errors_to_exit,
    make_folder_for,
    print_json,
    stdout,
    table,
)
from megamoe.errors import BackendUnavailable, SpecError
from megamoe.spec import ATTENTION_MODELS

__all__ = ["command"]


def command(
    model: Annotated[str, typer.Option(help="glm-5 or glm-5.2.")] = "glm-5.2",
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Token rows, 16 unless given. Repeatable.")
    ] = None,
    kv: Annotated[
        list[int] | None, typer.Option(min=1, help="Keys of a request, 8192 unless given.")
    ] = None,
    queue: Annotated[
        str, typer.Option(help="auto, round_robin, list or dynamic: how tasks are placed.")
    ] = "auto",
    splits: Annotated[str, typer.Option(help='Split-K by stage, e.g. "D1=1,B0=3".')] = "",
    input_pages: Annotated[
        int, typer.Option(help="2 or 3 pages of 16 KiB for inputs, up to 32 rows.")
    ] = 3,
    copies: Annotated[
        int, typer.Option(min=1, help="Of weights and caches; 6 are seven times L2.")
    ] = 6,
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="Also A0, A0 C0, ... to the whole graph.")
    ] = False,
    contender: Annotated[
        bool, typer.Option("--contender", help="Also the public kernels; needs deep_gemm.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Chrome trace of one cold run; a picture and a table beside it."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON results file.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Folder for a report: JSON and one HTML file.")
    ] = None,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Time attention-pre as one resident kernel, cold and warm, against its byte floor."""
    with errors_to_exit(debug=debug):
        if model not in ATTENTION_MODELS:
            raise SpecError(f"--model {model}: must be one of {', '.join(ATTENTION_MODELS)}")
        kinds = ("auto", "round_robin", "list", "dynamic")
        if queue not in kinds:
            raise SpecError(f"--queue {queue}: must be one of {', '.join(kinds)}")
        if input_pages not in (2, 3):
            raise SpecError(f"--input-pages {input_pages}: must be 2 or 3")
        from launcher.attention_rows import batch_of
        from megamoe.backends.base import hopper_available

        for rows in tokens or (16,):
            for keys in kv or (8192,):
                batch_of(rows, keys)  # refuses what no batch is made of
        if not hopper_available():
            raise BackendUnavailable(
                "bench attention-pre needs a Hopper GPU (compute capability 9.0)"
            )
        from launcher.bench_attention_pre import Options, measure

        options = Options(
            model=model,
            rows=tuple(tokens or (16,)),
            kv=tuple(kv or (8192,)),
            queue=queue,
            splits=splits,
            copies=copies,
            input_pages=input_pages,
            prefixes=prefixes,
            trace=trace,
        )
        for path in (output, trace):
            if path:
                make_folder_for(path)
        found = measure(options, output, quiet=True).results()
        if contender:
            from launcher.attention_contender import contender_rows

            found["rows"] += contender_rows(options.rows, options.kv, found["rows"])
            if output:
                from launcher.bench_attention_pre import add_rows

                add_rows(output, found["rows"])
        if report:
            from launcher.meta import run_meta
            from launcher.report import build_report, write_report

            write_report(report, build_report({"meta": run_meta()} | found, kind="attention-pre"))
        if as_json:
            print_json(found)
            return
        _show(found)


def _show(found: dict[str, list[dict[str, Any]]]) -> None:
    shown = table(
        "attention-pre, one kernel",
        "variant",
        "M",
        "keys",
        "L2",
        "us",
        "p99 us",
        "floor us",
        "of it",
    )
    for row in (*found["rows"], *found["prefixes"]):
        name = " ".join(filter(None, (row["variant"], row.get("stages"))))
        cells = (row.get(c) for c in ("m", "kv", "l2", "us", "p99_us", "floor_us"))
        fraction = row.get("fraction_of_floor")
        shown.add_row(
            name,
            *("-" if v is None else str(v) for v in cells),
            "-" if fraction is None else f"{fraction:.2f}",
        )
    stdout.print(shown)
    host = table(
        "host, ms", "M", "keys", "plan", "next length", "known", "encode", "bind", "rebind"
    )
    names = ("plan", "plan_next_length", "plan_known", "encode", "bind", "rebind")
    for row in found["host"]:
        host.add_row(str(row["m"]), str(row["kv"]), *(f"{row[f'{n}_ms']:.3f}" for n in names))
    stdout.print(host)
