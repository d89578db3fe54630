"""``megamoe run``: one MoE layer of a checkpoint on real hidden states, over any number of ranks.

megamoe run --checkpoint DIR --layer 3 --input x.safetensors --output y.safetensors --ranks 2
torchrun --nproc-per-node 2 -m launcher.run --checkpoint DIR …
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from launcher.console import (
    BackendOption,
    DebugFlag,
    JsonFlag,
    RanksOption,
    RingBlocksOption,
    StoredDtypeOption,
    WorkersOption,
    counted,
    human_bytes,
    make_folder_for,
    print_json,
    progress,
    stdout,
    table,
)
from launcher.ranks import Group, run_in_group
from megamoe.errors import InputError, SpecError

if TYPE_CHECKING:
    from torch import Tensor

    from megamoe.checkpoint import Checkpoint
    from megamoe.layer import Backend, MoELayer
    from megamoe.spec import EpConfig, MoESpec, WeightDtype

__all__ = ["command"]


@dataclass(frozen=True)
class _Options:
    checkpoint: Path
    layer: int
    input: Path
    output: Path
    weight_dtype: WeightDtype | None
    split: str | None
    max_tokens: int
    ring_blocks: int
    workers: int
    backend: Backend
    timeout: float
    json: bool


def command(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Option(help="Folder with config.json and safetensors.")],
    layer: Annotated[int, typer.Option(help="Number of the layer; it must be an MoE layer.")],
    input_file: Annotated[
        Path,
        typer.Option(
            "--input",
            help="safetensors: hidden_states BF16 [T,H]; optionally topk_idx [T,K] and "
            "topk_weight [T,K], else the checkpoint's router decides.",
        ),
    ],
    output: Annotated[Path, typer.Option(help="safetensors to write: hidden_states BF16 [T,H].")],
    ranks: RanksOption = None,
    weight_dtype: StoredDtypeOption = None,
    split: Annotated[
        str | None,
        typer.Option(help="Tokens of each rank, like 100,28. Default: an even split."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="The most tokens per rank and call; more makes more calls.")
    ] = 4096,
    ring_blocks: RingBlocksOption = 0,
    workers: WorkersOption = 0,
    backend: BackendOption = "auto",
    timeout: Annotated[float, typer.Option(help="Limit of each wait inside a call, seconds.")] = 30,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Run an MoE layer of a checkpoint on hidden states from a file."""
    options = _Options(
        checkpoint,
        layer,
        input_file,
        output,
        cast("WeightDtype | None", weight_dtype),
        split,
        max_tokens,
        ring_blocks,
        workers,
        cast("Backend", backend),
        timeout,
        as_json,
    )
    run_in_group(
        context,
        "launcher.run",
        ranks,
        lambda num_ranks, device: _prepare(options, num_ranks, device),
        lambda group, found: _run(group, options, found),
        default_ranks=1,
        backend=backend,
        debug=debug,
    )


@dataclass(frozen=True)
class _Prepared:
    """What files and options come to: tokens of each rank, the layer, how the group runs it."""

    start: float
    checkpoint: Checkpoint
    spec: MoESpec
    counts: list[int]
    config: EpConfig


def _prepare(options: _Options, num_ranks: int, device: str | None) -> _Prepared:
    """Reads no tensor."""
    from launcher.beforehand import need_layer
    from megamoe.checkpoint import Checkpoint
    from megamoe.spec import EpConfig

    start = time.perf_counter()
    checkpoint = Checkpoint.open(options.checkpoint)
    spec = checkpoint.moe_spec(options.layer, options.weight_dtype)
    counts = _split(options, spec, num_ranks)
    config = EpConfig(
        num_ranks=num_ranks,
        max_tokens=min(options.max_tokens, max(1, *counts)),
        ring_l1_blocks=options.ring_blocks,
        ring_l2_blocks=options.ring_blocks,
        num_workers=options.workers,
        timeout_s=options.timeout,
    )
    need_layer(spec, config, device)
    return _Prepared(start, checkpoint, spec, counts, config)


def _run(group: Group, options: _Options, prepared: _Prepared) -> int:
    from megamoe.layer import open_layer
    from megamoe.weights import iter_local_experts

    checkpoint, spec, counts = prepared.checkpoint, prepared.spec, prepared.counts
    first = sum(counts[: group.rank])
    rows = slice(first, first + counts[group.rank])

    def routed() -> tuple[Tensor, Tensor, Tensor]:
        x, idx, weight = _read_input(options.input, rows, spec.num_experts)
        if idx is None or weight is None:
            idx, weight = checkpoint.router(options.layer)(x)
        return x.to(group.device), idx.to(group.device), weight.to(group.device)

    x, idx, weight = group.together(routed)
    most = prepared.config.max_tokens
    layer = group.together(lambda: open_layer(spec, prepared.config, backend=options.backend))
    with layer, progress(shown=group.first and not options.json) as bar:
        local = spec.experts_per_rank(group.num_ranks) + spec.num_shared
        experts = iter_local_experts(
            checkpoint, options.layer, group.rank, group.num_ranks, options.weight_dtype
        )
        loading = bar.track(experts, total=local, description="experts")
        group.together(lambda: layer.load_weights(loading))
        loaded = time.perf_counter()
        num_calls = -(-max(counts) // most)
        parts = []
        for call in bar.track(range(num_calls), description="calls"):
            part = slice(call * most, (call + 1) * most)
            parts.append(layer.run(x[part], idx[part], weight[part]))
        ran = time.perf_counter()
        figures = group.gather(_figures(layer, idx))

    import torch

    y = torch.cat(parts) if parts else x
    everything = group.collect_rows(y, counts)
    group.together(lambda: _write_output(options.output, everything))
    summary = {
        "checkpoint": str(options.checkpoint),
        "layer": options.layer,
        "output": str(options.output),
        "tokens": sum(counts),
        "calls": num_calls,
        "load_s": round(loaded - prepared.start, 3),
        "run_s": round(ran - loaded, 4),
        "ranks": [{"rank": r, "tokens": counts[r], **f} for r, f in enumerate(figures)],
    }
    if group.first:
        _print(summary, as_json=options.json)
    return 0


def _split(options: _Options, spec: MoESpec, num_ranks: int) -> list[int]:
    """Tokens of each rank."""
    from launcher.workloads import tokens_per_rank

    total, hidden = _input_shape(options.input, spec)
    if hidden != spec.hidden:
        raise InputError(
            f"hidden_states in {options.input} has {hidden} columns: layer {options.layer} of "
            f"{options.checkpoint} has {spec.hidden}"
        )
    spec.experts_per_rank(num_ranks)
    if options.split is None:
        return [total * (r + 1) // num_ranks - total * r // num_ranks for r in range(num_ranks)]
    counts = tokens_per_rank(options.split, num_ranks, option="--split")
    if sum(counts) != total:
        raise SpecError(
            f"--split {options.split} is {sum(counts)} tokens, but {options.input} holds {total}"
        )
    return counts


def _open_input(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InputError(f"no file {path}: --input takes a safetensors file")
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from error


_ROUTE_DTYPES = {"topk_idx": ("I32", "I64"), "topk_weight": ("F32", "F16", "BF16", "F64")}


def _input_shape(path: Path, spec: MoESpec) -> tuple[int, int]:
    """Rows and columns of the hidden states, after a look at all that the file should hold."""
    with _open_input(path) as opened:
        names = sorted(opened.keys())
        if "hidden_states" not in names:
            has = ", ".join(names) or "none"
            raise InputError(f"{path} has no tensor hidden_states; it has {has}")
        x = opened.get_slice("hidden_states")
        shape = x.get_shape()
        if len(shape) != 2:
            raise InputError(f"hidden_states in {path} has shape {shape}: must be [T, H]")
        if x.get_dtype() != "BF16":
            raise InputError(f"hidden_states in {path} is {x.get_dtype()}: must be BF16")
        given = {"topk_idx", "topk_weight"} & set(names)
        if len(given) == 1:
            missing = ({"topk_idx", "topk_weight"} - given).pop()
            raise InputError(f"{path} has {given.pop()} without {missing}: give both or none")
        for name in sorted(given):
            routes = opened.get_slice(name)
            of_routes, want = routes.get_shape(), [shape[0], spec.topk]
            if of_routes != want:
                raise InputError(f"{name} in {path} has shape {of_routes}: must be {want}")
            if routes.get_dtype() not in _ROUTE_DTYPES[name]:
                raise InputError(
                    f"{name} in {path} is {routes.get_dtype()}: must be "
                    f"{' or '.join(_ROUTE_DTYPES[name])}"
                )
    return shape[0], shape[1]


def _read_input(
    path: Path, rows: slice, num_experts: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """This rank's rows: hidden states, and routes if the file has them."""
    with _open_input(path) as opened:
        x = opened.get_slice("hidden_states")[rows]
        if "topk_idx" not in opened.keys():  # noqa: SIM118 - it is no dict
            return x, None, None
        idx, weight = opened.get_slice("topk_idx")[rows], opened.get_slice("topk_weight")[rows]
    wrong = ((idx < -1) | (idx >= num_experts)).nonzero()
    if len(wrong):
        row, slot = wrong[0].tolist()
        raise InputError(
            f"topk_idx[{rows.start + row}, {slot}] in {path} is {int(idx[row, slot])}: must be an "
            f"expert 0..{num_experts - 1}, or -1 for none"
        )
    return x, idx, weight.float()


def _write_output(path: Path, y: Tensor | None) -> None:
    if y is None:
        return
    from safetensors.torch import save

    make_folder_for(path)
    # Not save_file, which replaces what it is given, a device or a link as well.
    path.write_bytes(save({"hidden_states": y}))


def _figures(layer: MoELayer, idx: Tensor) -> dict[str, Any]:
    found = layer.counters().to_dict()
    return {"routes": int((idx >= 0).sum()), **found}


def _print(summary: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(summary)
        return
    shown = table(
        f"layer {summary['layer']} of {summary['checkpoint']}",
        "rank",
        "tokens",
        "routes",
        "L1 ring",
        "L2 ring",
        "back-pressure",
        "window",
    )
    for rank in summary["ranks"]:
        shown.add_row(
            str(rank["rank"]),
            str(rank["tokens"]),
            str(rank["routes"]),
            f"{counted(rank['high_water_l1'])}/{rank['ring_l1_blocks']}",
            f"{counted(rank['high_water_l2'])}/{rank['ring_l2_blocks']}",
            counted(rank["backpressure_events"]),
            human_bytes(rank["window_bytes"]),
        )
    stdout.print(shown)
    stdout.print(
        f"{summary['tokens']} tokens in {summary['run_s'] * 1e3:.1f} ms "
        f"({summary['calls']} calls), loaded in {summary['load_s']:.1f} s → {summary['output']}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(command)
