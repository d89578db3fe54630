"""``megamoe bench pdl-chain``: what lies between two kernels, and what PDL and graphs leave of it.

A chain of short dependent kernels is launched one by one and from a graph, each without and with
programmatic dependent launch. Every mode is checked against the CPU before it is timed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from launcher.console import (
    EXIT_WRONG,
    DebugFlag,
    JsonFlag,
    errors_to_exit,
    make_folder_for,
    print_json,
    stdout,
    table,
)
from megamoe.errors import SpecError

if TYPE_CHECKING:
    from launcher.pdl_chain import Trigger

__all__ = ["command", "measure"]

_TRIGGERS: Final = ("end", "start", "both")
_MOST_LAYERS: Final = 900
"""A stream queues about 1000 launches; beyond, the host could not be ahead."""


def command(
    layers: Annotated[int, typer.Option(help="Kernels of a forward, 2 to 900.")] = 200,
    elements: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Floats of an activation, 16384 unless given. May be repeated."),
    ] = None,
    trigger: Annotated[
        str, typer.Option(help="Where the next kernel is let in: end, start or both.")
    ] = "both",
    samples: Annotated[int, typer.Option(min=1, help="Timed spans of each mode.")] = 100,
    seed: Annotated[int, typer.Option(help="Of activations and weights.")] = 1,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Time the gap between kernels: streams and graphs, without and with PDL."""
    with errors_to_exit(debug=debug):
        if trigger not in _TRIGGERS:
            raise SpecError(f"--trigger {trigger}: must be one of {', '.join(_TRIGGERS)}")
        if not 2 <= layers <= _MOST_LAYERS:
            raise SpecError(f"--layers {layers}: must be in 2..{_MOST_LAYERS}")
        triggers = cast("list[Trigger]", ["end", "start"] if trigger == "both" else [trigger])
        sizes = elements or [1 << 14]
        rows = [
            row
            for size in sizes
            for early in triggers
            for row in measure(layers, size, seed, early, samples)
        ]
        from launcher.meta import run_meta

        typed = " ".join(["megamoe bench pdl-chain", *sys.argv[3:]])
        meta = run_meta(command=typed, layers=layers, seed=seed, samples=samples)
        found = {"meta": meta, "rows": rows}
        if output is not None:
            make_folder_for(output)
            output.write_text(json.dumps(found, indent=1) + "\n")
        if as_json:
            print_json(found)
        else:
            _print(found)
    if not all(row["bitwise_equal"] for row in rows):
        raise typer.Exit(EXIT_WRONG)


def measure(
    layers: int, elements: int, seed: int, trigger: Trigger, samples: int
) -> list[dict[str, Any]]:
    """Rows of all modes; a mode whose result is wrong has no times.

    Args:
        layers: kernels of a forward.
        elements: floats of an activation.
        seed: of activations and weights.
        trigger: ``"end"`` or ``"start"``.
        samples: timed spans of each mode.
    """
    import numpy as np

    from launcher.pdl_chain import MODES, Chain, Launch

    plain = Chain(layers, elements, seed, trigger=trigger)
    stamped = Chain(layers, elements, seed, trigger=trigger, stamps=True)
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        if trigger == "start" and not mode.pdl:
            continue  # nothing is launched early: the same as with the trigger at the end
        plain.poison()
        launch = Launch(plain, mode)
        launch.launch()
        got = plain.result()
        wrong = np.flatnonzero(got != plain.expected)
        row: dict[str, Any] = {
            "mode": mode.name,
            "elements": elements,
            "trigger": trigger if mode.pdl else None,
            "bitwise_equal": wrong.size == 0,
            "edges": launch.edges,
        }
        if wrong.size:
            i = int(wrong[0])
            row["reason"] = f"element {i}: {got[i]}, on the CPU {plain.expected[i]}"
        else:
            timing = launch.time(samples, 20)
            row |= {
                "span_us": round(timing.span_us, 2),
                "span_p99_us": round(timing.span_p99_us, 2),
                "per_kernel_us": round(timing.span_us / layers, 4),
                "back_to_back_us": round(timing.back_to_back_us, 2),
                "host_us": round(timing.host_us, 2),
                "stamped": Launch(stamped, mode).stamped(20).to_dict(),
                **_state(launch.launch),
            }
            again = plain.result()
            row["bitwise_equal"] = bool((again == plain.expected).all())
        rows.append(row)
    return rows


def _state(launch: Any) -> dict[str, Any]:
    """Clocks and power while forwards run."""
    import torch

    from launcher.ranks import sampler_of

    sampler = sampler_of(f"cuda:{torch.cuda.current_device()}")
    for _ in range(20):
        launch()
    reading = sampler.read()
    torch.cuda.synchronize()
    clock, events = reading.values.get("sm_clock_hertz"), reading.clocks_events
    return {
        "sm_mhz": None if clock is None else round(clock / 1e6),
        "watts": reading.values.get("power_watts"),
        "throttle": None if events is None else [name for name, on in events.items() if on],
    }


def _print(found: dict[str, Any]) -> None:
    meta, rows = found["meta"], found["rows"]
    shown = table(
        f"{meta['layers']} kernels on {meta['gpu']}, µs",
        "mode",
        "floats",
        "trigger",
        "CPU's bits",
        "GPU span",
        "per kernel",
        "gap",
        "p99",
        "body",
        "starts early by",
        "back to back",
        "host",
    )
    for row in rows:
        if "span_us" not in row:
            shown.add_row(row["mode"], str(row["elements"]), row["trigger"] or "", "no")
            continue
        stamped = row["stamped"]
        shown.add_row(
            row["mode"],
            str(row["elements"]),
            row["trigger"] or "",
            "yes" if row["bitwise_equal"] else "no",
            f"{row['span_us']:.1f}",
            f"{row['per_kernel_us']:.3f}",
            *(f"{stamped[k]:.3f}" for k in ("gap_us", "gap_p99_us", "body_us", "early_us")),
            f"{row['back_to_back_us']:.1f}",
            f"{row['host_us']:.1f}",
        )
    stdout.print(shown)
    for row in rows:
        if "reason" in row:
            stdout.print(f"{row['mode']}: {row['reason']}", markup=False, soft_wrap=True)
