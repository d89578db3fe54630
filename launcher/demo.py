"""``megamoe demo``: a small layer over two ranks, from a checkpoint on disk to a checked result.

It writes a small DeepSeek-V3 checkpoint with transformers, opens one of its layers over the ranks,
runs it with rings of the recommended size and with the smallest rings that there are, and compares
with the oracle (same arithmetic) and with the Hugging Face module (weights before quantisation,
FP32 arithmetic).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from launcher.console import (
    EXIT_WRONG,
    BackendOption,
    DebugFlag,
    JsonFlag,
    RanksOption,
    counted,
    print_json,
    stderr,
    stdout,
    table,
)
from launcher.ranks import Group, run_in_group
from megamoe.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

    from launcher.timing import Times
    from megamoe.checkpoint import Checkpoint
    from megamoe.layer import Backend
    from megamoe.spec import EpConfig, MoESpec

__all__ = ["command"]

_FAMILY: Final = "deepseek_v3"
_LAYER: Final = 1
_SIZES: Final[dict[str, Any]] = {"hidden": 512, "inter": 256, "num_experts": 16, "topk": 4}
_SEED: Final = 3
_CALLS: Final = 20
_MARK: Final = "made-by-megamoe-demo"
"""A file beside the checkpoint: this folder may be written again."""


@dataclass(frozen=True)
class _Result:
    """What one session gave: this rank's rows, counters as a dict, times over all ranks."""

    y: Tensor
    counters: dict[str, Any]
    times: Times


def command(
    context: typer.Context,
    ranks: RanksOption = None,
    tokens: Annotated[
        str,
        typer.Option(help="Tokens per rank: 48, one count per rank (48,17), or PATTERN:T."),
    ] = "random:64",
    backend: BackendOption = "auto",
    workdir: Annotated[
        Path | None, typer.Option(help="Keep the checkpoint here, not in a temporary folder.")
    ] = None,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Run a small layer over two ranks and check it against its oracle and Hugging Face."""
    run_in_group(
        context,
        "launcher.demo",
        ranks,
        lambda num_ranks, device: _counts(tokens, workdir, num_ranks, device),
        lambda group, counts: _demo(
            group, counts, cast("Backend", backend), workdir, as_json=as_json
        ),
        default_ranks=2,
        backend=backend,
        debug=debug,
    )


def _counts(tokens: str, workdir: Path | None, num_ranks: int, device: str | None) -> list[int]:
    """Tokens of each rank, which could run them; nothing of others' is written over."""
    from launcher.beforehand import need_layer
    from launcher.workloads import tokens_per_rank
    from megamoe.spec import MoESpec

    counts = tokens_per_rank(tokens, num_ranks, seed=_SEED)
    need_layer(MoESpec(**_SIZES), _config(num_ranks, max(1, *counts), ring_blocks=1), device)
    used = workdir is not None and workdir.is_dir() and any(workdir.iterdir())
    if used and not (cast("Path", workdir) / _MARK).exists():
        raise SpecError(
            f"--workdir {workdir} holds files that are not the demo's, which would write over "
            "them: give a new or empty folder"
        )
    return counts


def _config(num_ranks: int, max_tokens: int, ring_blocks: int) -> EpConfig:
    from megamoe.spec import EpConfig

    return EpConfig(
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        block_m=16,
        ring_l1_blocks=ring_blocks,
        ring_l2_blocks=ring_blocks,
    )


def _demo(
    group: Group, counts: list[int], backend: Backend, workdir: Path | None, *, as_json: bool
) -> int:
    import torch

    from launcher.workloads import random_activations
    from megamoe.checkpoint import Checkpoint

    start = time.perf_counter()
    with _folder(group, workdir) as folder, _status(group, as_json=as_json) as say:
        say("writing a small checkpoint")
        group.together(lambda: _write(group, folder))
        wrote = time.perf_counter()
        checkpoint = group.together(lambda: Checkpoint.open(folder))
        spec = checkpoint.moe_spec(_LAYER, "fp8")
        x = random_activations(spec, group.rank, counts[group.rank], _SEED)
        idx, weight = checkpoint.router(_LAYER)(x)
        say(f"running it over {group.num_ranks} ranks")
        inputs = tuple(t.to(group.device) for t in (x, idx, weight))
        most = max(1, *counts)
        wide = _session(group, checkpoint, spec, inputs, most, ring_blocks=0, backend=backend)
        tight = _session(group, checkpoint, spec, inputs, most, ring_blocks=1, backend=backend)
        ran = time.perf_counter()
        received = sum(group.gather(_received(idx, spec, group.num_ranks)), torch.tensor(0))
        ranks = group.gather({"counters": wide.counters, "tight": tight.counters})
        rows = [group.collect_rows(t, counts) for t in (x, idx, weight, wide.y, tight.y)]
        if not group.first:
            return group.gather(0)[0]
        say("checking")
        checks = _checks(checkpoint, spec, [r for r in rows if r is not None], inputs[0].is_cuda)
    done = time.perf_counter()
    wrong = not all(c["ok"] for c in checks.values())
    summary = {
        "ok": not wrong,
        "layer": f"{_FAMILY}, hidden {spec.hidden}, inter {spec.inter}, "
        f"{spec.num_experts} experts top-{spec.topk} + {spec.num_shared} shared, FP8",
        "backend": wide.counters["backend"],
        "device": wide.counters["device"],
        "ranks": [
            {
                "rank": r,
                "tokens": counts[r],
                "routes_sent": counts[r] * spec.topk,
                "routes_received": int(received[r]),
                "recommended_rings": found["counters"],
                "smallest_rings": found["tight"],
            }
            for r, found in enumerate(ranks)
        ],
        "checks": checks,
        "call_us": {
            "recommended_rings": wide.times.to_dict(),
            "smallest_rings": tight.times.to_dict(),
        },
        "seconds": {
            "write": round(wrote - start, 2),
            "run": round(ran - wrote, 2),
            "check": round(done - ran, 2),
            "total": round(done - start, 2),
        },
    }
    _print(summary, as_json=as_json)
    return group.gather(EXIT_WRONG if wrong else 0)[0]


def _write(group: Group, folder: Path) -> None:
    if group.first:
        from launcher.synthetic import write_checkpoint

        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARK).touch()
        write_checkpoint(folder, _FAMILY, seed=_SEED, **_SIZES)


def _session(
    group: Group,
    checkpoint: Checkpoint,
    spec: MoESpec,
    inputs: tuple[Tensor, ...],
    max_tokens: int,
    *,
    ring_blocks: int,
    backend: Backend,
) -> _Result:
    from launcher.timing import take_turns
    from megamoe.layer import open_layer
    from megamoe.weights import iter_local_experts

    config = _config(group.num_ranks, max_tokens, ring_blocks)
    with group.together(lambda: open_layer(spec, config, backend=backend)) as layer:
        experts = iter_local_experts(checkpoint, _LAYER, group.rank, group.num_ranks, "fp8")
        group.together(lambda: layer.load_weights(experts))
        y = layer.run(*inputs)
        counters = layer.counters().to_dict()
        call = {"call": lambda: layer.run(*inputs)}
        measured = take_turns(group, call, rounds=1, calls_per_round=_CALLS)["call"]
    return _Result(y.cpu(), counters, measured)


def _received(idx: Tensor, spec: MoESpec, num_ranks: int) -> Tensor:
    """Routes of this rank's tokens by owner, [R]."""
    owner = idx[idx >= 0] // spec.experts_per_rank(num_ranks)
    return owner.bincount(minlength=num_ranks)


def _checks(
    checkpoint: Checkpoint, spec: MoESpec, rows: list[Tensor], on_gpu: bool
) -> dict[str, dict[str, Any]]:
    """Every comparison, on the whole batch."""
    import torch

    from launcher.verify import against_oracle, judge
    from megamoe.reference.tolerance import unquantised_tolerance
    from megamoe.weights import iter_local_experts

    x, idx, weight, y, y_tight = rows
    experts = list(iter_local_experts(checkpoint, _LAYER, 0, 1, "fp8"))
    everything = torch.arange(len(x))
    oracle, _ = against_oracle(
        spec,
        everything,
        x,
        idx,
        weight,
        y,
        experts.__getitem__,
        experts[spec.num_experts :],
        on_gpu=on_gpu,
    )
    expected = _hugging_face(checkpoint.path, x)
    module = judge(y, expected, unquantised_tolerance(spec, len(x)))
    differ = int((y.view(torch.int16) != y_tight.view(torch.int16)).sum())
    return {
        "oracle": oracle.to_dict(),
        "hugging_face": module.to_dict(),
        "smallest_rings": {
            "ok": differ == 0,
            "tokens": len(x),
            "problem": f"{differ} of {y.numel()} values differ" if differ else None,
        },
    }


def _hugging_face(folder: Path, x: Tensor) -> Tensor:
    """FP32 [T, H] of the checkpoint's own module, its router included."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        y: Tensor = model.model.layers[_LAYER].mlp(x.float()[None])[0]
    return y


@contextmanager
def _folder(group: Group, workdir: Path | None) -> Iterator[Path]:
    """A folder that all ranks see; a temporary one goes with the first rank."""
    if workdir is not None:
        yield workdir
        return
    made = tempfile.TemporaryDirectory(prefix="megamoe-demo-") if group.first else None
    name = group.gather(made.name if made else "")[0]
    try:
        yield Path(name)
    finally:
        if made is not None:
            made.cleanup()


@contextmanager
def _status(group: Group, *, as_json: bool) -> Iterator[Callable[[str], None]]:
    """A spinner that says what is going on."""
    if not group.first or as_json or not stderr.is_terminal:
        yield lambda _: None
        return
    with stderr.status("starting") as status:
        yield status.update


def _print(summary: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(summary)
        return
    ranks = table(
        f"{summary['layer']}",
        "rank",
        "tokens",
        "routes out",
        "routes in",
        "L1 ring",
        "L2 ring",
        "smallest",
        "waits",
    )
    for rank in summary["ranks"]:
        wide, tight = rank["recommended_rings"], rank["smallest_rings"]
        ranks.add_row(
            str(rank["rank"]),
            str(rank["tokens"]),
            str(rank["routes_sent"]),
            str(rank["routes_received"]),
            f"{counted(wide['high_water_l1'])}/{wide['ring_l1_blocks']}",
            f"{counted(wide['high_water_l2'])}/{wide['ring_l2_blocks']}",
            f"{counted(tight['high_water_l1'])}/{tight['ring_l1_blocks']}",
            counted(tight["backpressure_events"]),
        )
    stdout.print(ranks)
    stdout.print(
        f"{len(summary['ranks'])} {summary['backend']} ranks ({summary['device']}). Rings: most "
        "blocks in use / blocks. Smallest: the same call with rings of one block, and how often a "
        "role had to wait for a free one.",
        style="dim",
    )
    checks = table("checks", "against", "tokens", "error", "allowed", "result")
    names = {
        "oracle": "oracle (same arithmetic)",
        "hugging_face": "Hugging Face, unquantised",
        "smallest_rings": "smallest rings, bit by bit",
    }
    for name, check in summary["checks"].items():
        checks.add_row(
            names[name],
            str(check["tokens"]),
            f"{check['rel_err']:.1e}" if "rel_err" in check else "0",
            f"{check['allowed']:.1e}" if "allowed" in check else "0",
            "[green]ok[/]" if check["ok"] else "[red]WRONG[/]",
        )
    stdout.print(checks)
    for check in summary["checks"].values():
        if check["problem"]:
            stderr.print(check["problem"], style="bold red", markup=False, soft_wrap=True)
    us, seconds = summary["call_us"], summary["seconds"]
    stdout.print(
        f"a call {us['recommended_rings']['median_us']:.0f} µs, with the smallest rings "
        f"{us['smallest_rings']['median_us']:.0f} µs; {seconds['total']} s in all (checkpoint "
        f"{seconds['write']}, run {seconds['run']}, checks {seconds['check']})",
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(command)
