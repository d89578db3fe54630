"""``megamoe bench cmp``: attention-pre as eleven kernels, with and without branches and PDL.

Every kind of graph is compared with the oracle before it is timed. The figures' method is said in
``launcher/cmp_rows.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from launcher.console import DebugFlag, JsonFlag, errors_to_exit, print_json, stdout, table
from launcher.results import read_results
from megamoe.cmp.modes import MODES, Mode
from megamoe.errors import BackendUnavailable, SpecError
from megamoe.spec import ATTENTION_MODELS

__all__ = ["command", "measure"]

_WHAT: Final = ("variants", "edge", "counter", "prefixes")
_L2: Final = ("cold", "warm")


def command(
    what: Annotated[
        list[str] | None,
        typer.Option(help="variants (default), edge, counter or prefixes. May be repeated."),
    ] = None,
    model: Annotated[str, typer.Option(help="glm-5 or glm-5.2.")] = "glm-5.2",
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Token rows, 16 unless given. Repeatable.")
    ] = None,
    kv: Annotated[
        list[int] | None, typer.Option(min=1, help="Keys of a request, 8192 unless given.")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="Of the variants: kinds of graph, all unless given. May be repeated."),
    ] = None,
    l2: Annotated[
        list[str] | None, typer.Option(help="cold or warm, both unless given. May be repeated.")
    ] = None,
    copies: Annotated[
        int, typer.Option(min=1, help="Of weights and caches; 6 are seven times L2.")
    ] = 6,
    output: Annotated[
        Path | None, typer.Option(help="JSON results file; rows of other variants are kept.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Perfetto trace of one run with branches and PDL; a picture beside it."),
    ] = None,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Time attention-pre as eleven kernels: one chain or branches, without and with PDL."""
    with errors_to_exit(debug=debug):
        chosen = what or ["variants"]
        if unknown := sorted(set(chosen) - set(_WHAT)):
            raise SpecError(f"--what {unknown[0]}: must be one of {', '.join(_WHAT)}")
        if unknown := sorted(set(mode or []) - set(MODES)):
            raise SpecError(f"--mode {unknown[0]}: must be one of {', '.join(MODES)}")
        if unknown := sorted(set(l2 or []) - set(_L2)):
            raise SpecError(f"--l2 {unknown[0]}: must be one of {', '.join(_L2)}")
        if model not in ATTENTION_MODELS:
            raise SpecError(f"--model {model}: must be one of {', '.join(ATTENTION_MODELS)}")
        if output and output.exists():
            read_results(output)  # rows are added to it
        modes = [m for m in MODES if not mode or m in mode]
        rows = measure(
            chosen, model, tokens or [16], kv or [8192], copies, trace, modes, l2 or list(_L2)
        )
        if output:
            from launcher.cmp_rows import merge_rows
            from launcher.meta import run_meta

            merge_rows(output, rows, run_meta(copies=copies))
        if as_json:
            print_json({"rows": rows})
            return
        shown = table(
            "attention-pre, one H200",
            "variant",
            "M",
            "keys",
            "L2",
            "us",
            "p99 us",
            "one graph us",
            "span us",
        )
        for row in rows:
            cells = ("variant", "m", "kv", "l2", "us", "p99_us", "graph_us", "span_us")
            shown.add_row(*(str(row.get(cell, "-")) for cell in cells))
        stdout.print(shown)


def measure(
    what: list[str],
    model: str,
    tokens: list[int],
    kv: list[int],
    copies: int,
    trace: Path | None = None,
    modes: Sequence[Mode] = MODES,
    l2: Sequence[str] = _L2,
) -> list[dict[str, Any]]:
    """Rows of what was asked for; see ``launcher.cmp_rows`` and ``launcher.cmp_studies``.

    Raises:
        BackendUnavailable: no Hopper GPU.
        SpecError: token or key counts that no batch has.
    """
    from launcher.attention_rows import batch_of
    from megamoe.backends.base import hopper_available

    for m in tokens:
        for keys in kv:
            batch_of(m, keys)  # refuses what no batch is made of
    if not hopper_available():
        raise BackendUnavailable("bench cmp needs a Hopper GPU (compute capability 9.0)")
    from launcher import cmp_rows, cmp_studies
    from launcher.attention_rows import Copies

    spec = ATTENTION_MODELS[model]
    held = Copies.make(spec, max(*kv, 512), copies)
    rows: list[dict[str, Any]] = []
    for m in tokens:
        for keys in kv:
            if "variants" in what:
                batch = batch_of(m, keys)
                rows += cmp_rows.bench_variants(held, batch, modes=modes, l2=l2)
                rows.append(cmp_rows.bench_megakernel(held, batch_of(m, keys)))
                rows.append(cmp_rows.bench_empty(batch))
            if "prefixes" in what:
                rows += cmp_studies.bench_prefixes(held, batch_of(m, keys))
    if "edge" in what:
        rows += cmp_studies.bench_edge(held)
    if "counter" in what:
        rows += cmp_studies.bench_counter(spec)
    if trace:
        from launcher.cmp_trace import save_trace

        save_trace(trace, held, batch_of(tokens[0], kv[0]), "branches_pdl")
    return rows
