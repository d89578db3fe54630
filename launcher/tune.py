"""``megamoe tune``: searches ring, wave, lag and block sizes of a layer on this machine.

The result goes to the cache folder, and ``open_layer`` takes it from there. Every candidate must
give the recommendation's results to the bit; one that does not is an error of the program.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from launcher.checked import need_writable
from launcher.console import (
    EXIT_WRONG,
    BackendOption,
    DebugFlag,
    ExpertsOption,
    JsonFlag,
    ModelOption,
    RanksOption,
    SeedOption,
    WeightDtypeOption,
    WorkersOption,
    human_bytes,
    make_folder_for,
    print_json,
    progress,
    report,
    stdout,
    table,
)
from launcher.models import published_layer
from launcher.ranks import Group, run_in_group

if TYPE_CHECKING:
    from launcher.tuner import TuneOptions
    from megamoe.layer import Backend

__all__ = ["command"]


def command(
    context: typer.Context,
    model: ModelOption = "qwen3-30b",
    ranks: RanksOption = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="What layers are opened for; the result belongs to it.")
    ] = 512,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Tokens per rank that matter, each as much as the others; by default a 64th of "
            "--max-tokens and all of them. May be repeated.",
        ),
    ] = None,
    routing: Annotated[str, typer.Option(help="As of bench moe, like zipf:1.2.")] = "uniform",
    experts: ExpertsOption = None,
    shared: Annotated[
        int | None, typer.Option(min=0, help="Shared experts; by default the model's.")
    ] = None,
    weight_dtype: WeightDtypeOption = "fp8",
    workers: WorkersOption = 0,
    margin: Annotated[
        float, typer.Option(min=0, help="A candidate must be faster by this part.")
    ] = 0.02,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each candidate.")] = 3,
    calls: Annotated[int, typer.Option(min=1, help="Timed calls in a turn.")] = 5,
    seed: SeedOption = 1,
    backend: BackendOption = "auto",
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Whether open_layer shall use the result.")
    ] = True,
    output: Annotated[Path | None, typer.Option(help="JSON file to write all trials to.")] = None,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Find the fastest rings, wave and lag of a layer here; open_layer uses them from then on."""

    def options(num_ranks: int, device: str | None) -> TuneOptions:
        from launcher.beforehand import need_cases
        from launcher.tuner import TuneOptions
        from megamoe.jit import cache_dir

        found = TuneOptions(
            spec=published_layer(model, experts=experts, shared=shared, weight_dtype=weight_dtype),
            max_tokens=max_tokens,
            tokens=sorted(set(tokens or [max(1, max_tokens // 64), max_tokens])),
            routing=routing,
            workers=workers,
            backend=cast("Backend", backend),
            margin=margin,
            rounds=rounds,
            calls=calls,
            seed=seed,
        )
        need_cases(found.spec, found.config(num_ranks), [(str(max_tokens), routing)], seed, device)
        if keep:
            need_writable("cache folder (MEGAMOE_CACHE)", cache_dir(), folder=True)
        return found

    run_in_group(
        context,
        "launcher.tune",
        ranks,
        options,
        lambda group, found: _tune(group, model, found, output, keep=keep, as_json=as_json),
        default_ranks=2,
        backend=backend,
        debug=debug,
    )


def _tune(
    group: Group,
    model: str,
    options: TuneOptions,
    output: Path | None,
    *,
    keep: bool,
    as_json: bool,
) -> int:
    from launcher.meta import run_meta, typed_command
    from launcher.tuner import tune
    from megamoe.tuning import save

    with progress(shown=group.first and not as_json) as bar:
        task = bar.add_task("candidates", total=None)
        found = tune(group, options, lambda trial: bar.advance(task))
    trials, chosen = found["trials"], found["chosen"]
    wrong = [t for t in trials if not t.bitwise_equal]
    typed = typed_command("tune", group.num_ranks)
    result = {
        "meta": run_meta(command=typed, device=found["device"]),
        "model": model,
        "spec": asdict(options.spec),
        "ranks": group.num_ranks,
        "max_tokens": options.max_tokens,
        "tokens": list(options.tokens),
        "routing": options.routing,
        "margin": options.margin,
        "recommended": asdict(found["start"]),
        "chosen": asdict(chosen),
        "trials": [t.to_dict() for t in trials],
        "file": None,
    }
    if group.first:
        lost: OSError | None = None
        try:  # whatever becomes of the files, what was found is shown
            if keep and not wrong:
                evidence = {"meta": result["meta"], "trials": result["trials"]}
                path = save(options.spec, found["open"], found["device"], chosen, evidence)
                result["file"] = str(path)
            if output is not None:
                make_folder_for(output)
                output.write_text(json.dumps(result, indent=1) + "\n")
        except OSError as error:
            lost = error
        if as_json:
            print_json(result)
        else:
            _print(result)
        if lost is not None:
            raise lost
    return EXIT_WRONG if wrong else 0


def _print(result: dict[str, Any]) -> None:
    from megamoe.tuning import TUNABLE

    counts = result["tokens"]
    shown = table(
        f"{result['model']}, EP{result['ranks']}, at most {result['max_tokens']} tokens, on "
        f"{result['meta']['device']}",
        "block",
        "rings L1 / L2",
        "wave",
        "lag",
        *(f"µs, {t} tokens (best)" for t in counts),
        "to the best",
        "window",
        "",
    )
    for t in result["trials"]:
        verdict = "taken" if t["taken"] else "" if t["bitwise_equal"] else "OTHER BITS"
        shown.add_row(
            str(t["block_m"]),
            f"{t['ring_l1_blocks']} / {t['ring_l2_blocks']}",
            str(t["wave_blocks"]),
            str(t["l2_lag_blocks"]),
            *(f"{t['us'][str(n)]:.0f} ({t['best_us'][str(n)]:.0f})" for n in counts),
            f"{t['ratio']:.3f}",
            human_bytes(t["window_bytes"]),
            verdict,
        )
    stdout.print(shown)

    def text(config: dict[str, Any]) -> str:
        return ", ".join(f"{name} {config[name]}" for name in TUNABLE)

    report(f"recommended: {text(result['recommended'])}")
    report(f"chosen:      {text(result['chosen'])}")
    if result["file"]:
        report(f"open_layer takes it from {result['file']}; MEGAMOE_TUNED=0 does without")


if __name__ == "__main__":
    typer.run(command)
