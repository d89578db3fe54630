"""``megamoe plan``: what a shape will need, before anything is allocated.

``plan moe`` prints the symmetric bytes of a rank by region and by EP size, with the recommended
rings, the smallest ones, and rings that hold everything a rank could receive in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from launcher.checked import Command
from launcher.console import (
    DebugFlag,
    JsonFlag,
    WeightDtypeOption,
    errors_to_exit,
    human_bytes,
    print_json,
    report,
    stdout,
    table,
)
from launcher.models import published_layer
from megamoe.errors import SpecError
from megamoe.spec import (
    ATTENTION_MODELS,
    MAX_RANKS,
    MAX_WORKERS,
    MODELS,
    EpConfig,
    MoESpec,
    WeightDtype,
)

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["app", "expert_bytes", "peer_window", "plan_moe"]

app = typer.Typer(
    help="What a shape needs: memory by region, rings, instruction plans.", no_args_is_help=True
)

_LARGE: Final = (
    "route",
    "input",
    "input_scale",
    "l1_ring",
    "l1_scale",
    "l2_ring",
    "l2_scale",
    "combine",
)
"""Regions with a row of their own; all others are signals."""

_MOST_ROWS: Final = 4096
_MOST_KEYS: Final = 1 << 24
"""Of a plan of attention-pre, whose time and memory grow with both; far over any decode step."""
_PEER_MIB: Final = {"v4-flash": 700, "v4-pro": 1113}
_PEER_RANKS: Final = 8
_PEER_TOKENS: Final = 8192
_PEER_SOURCE: Final = (
    "a fused SM90 kernel with a ring, deepseek-ai/DeepGEMM pull request 440: 700 MiB (Flash) and "
    "1113 MiB (Pro) per rank at EP8 and 8192 tokens"
)


@app.command("moe", cls=Command)
def moe(
    model: Annotated[
        str | None, typer.Option(help=f"A published layer: {', '.join(MODELS)}.")
    ] = None,
    hidden: Annotated[int | None, typer.Option(help="H; without --model.")] = None,
    inter: Annotated[int | None, typer.Option(help="I; without --model.")] = None,
    experts: Annotated[int | None, typer.Option(help="E; without --model.")] = None,
    topk: Annotated[int | None, typer.Option(help="K; without --model.")] = None,
    shared: Annotated[int | None, typer.Option(help="Shared experts.")] = None,
    weight_dtype: WeightDtypeOption = "fp8",
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens per rank and call.")] = 8192,
    ranks: Annotated[str, typer.Option(help="EP sizes, like 1,2,4,8.")] = "1,2,4,8",
    block_m: Annotated[int, typer.Option(help="Rows of a ring block.")] = 128,
    backend: Annotated[
        str, typer.Option(help="Whose recommendations fill the zeros: cpu or cuda.")
    ] = "cuda",
    ring_l1: Annotated[int, typer.Option(min=0, help="Blocks of the L1 ring; 0: recommended.")] = 0,
    ring_l2: Annotated[int, typer.Option(min=0, help="Blocks of the L2 ring; 0: recommended.")] = 0,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Symmetric memory of an MoE layer by region and EP size.

    Signals grow a little with the SMs or threads that a session finds; all else is exact.
    """
    with errors_to_exit(debug=debug):
        spec = _spec(model, hidden, inter, experts, topk, shared, weight_dtype)
        sizes = _sizes(ranks)
        plans = []
        for size in sizes:
            config = EpConfig(
                num_ranks=size,
                max_tokens=tokens,
                block_m=block_m,
                ring_l1_blocks=ring_l1,
                ring_l2_blocks=ring_l2,
            )
            plans.append(plan_moe(spec, config, backend) | peer_window(model, spec, size, tokens))
        if as_json:
            print_json({"model": model, "tokens": tokens, "block_m": block_m, "plans": plans})
            return
        name = model or f"H {spec.hidden}, I {spec.inter}, E {spec.num_experts}, K {spec.topk}"
        stdout.print(_table(f"{name}, at most {tokens} tokens per rank", plans))
        if plans[0]["peer_ring_bytes"] is not None:
            report(f"peer: {_PEER_SOURCE}; scaled: {_SCALING}", style="dim")


@app.command("attention-pre", cls=Command)
def attention_pre(
    model: Annotated[
        str, typer.Option(help=f"A published layer: {', '.join(ATTENTION_MODELS)}.")
    ] = "glm-5.2",
    tokens: Annotated[
        int, typer.Option(min=1, max=_MOST_ROWS, help="Token rows of the batch.")
    ] = 16,
    requests: Annotated[
        int, typer.Option(min=0, help="That they belong to, alike; 0: as many as 8 tokens each.")
    ] = 0,
    kv: Annotated[
        int, typer.Option(min=1, max=_MOST_KEYS, help="Keys per request, new tokens included.")
    ] = 8192,
    workers: Annotated[
        int, typer.Option(min=1, max=MAX_WORKERS, help="Resident CTAs: SMs of the GPU.")
    ] = 132,
    tiles: Annotated[
        str, typer.Option(help="auto: cut for the workers; seed: the published cut for 148 SMs.")
    ] = "auto",
    queue: Annotated[
        str,
        typer.Option(
            help="auto (round_robin, or list where it simulates a tenth faster), round_robin, "
            "list or dynamic."
        ),
    ] = "auto",
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Instructions of the attention-pre megakernel: tasks, events, queues, metadata."""
    with errors_to_exit(debug=debug):
        if model not in ATTENTION_MODELS:
            raise SpecError(f"--model {model}: must be one of {', '.join(ATTENTION_MODELS)}")
        for option, given, allowed in (
            ("tiles", tiles, ("auto", "seed")),
            ("queue", queue, ("auto", "round_robin", "list", "dynamic")),
        ):
            if given not in allowed:
                raise SpecError(f"--{option} {given}: must be one of {', '.join(allowed)}")
        from megamoe.attention_pre.graphs import attention_pre_graph
        from megamoe.attention_pre.plan import Planner, summarize
        from megamoe.attention_pre.tiling import Batch, seed_tiles

        planner = Planner(
            attention_pre_graph(ATTENTION_MODELS[model]),
            workers,
            tiles=seed_tiles() if tiles == "seed" else None,
            queue=cast("Any", queue),
        )
        found = summarize(planner.plan(Batch(_alike(tokens, requests, kv))))
        if as_json:
            print_json({"model": model, **found})
        else:
            _print_attention_pre(model, found)


def _alike(tokens: int, requests: int, kv: int) -> tuple[tuple[int, int], ...]:
    """New tokens and keys of each request.

    Raises:
        SpecError: they cannot be alike, or have fewer keys than new tokens.
    """
    count = requests or -(-tokens // 8)
    if tokens % count:
        divisor = next(n for n in range(min(count, tokens), tokens + 1) if tokens % n == 0)
        said = f"--requests {requests}" if requests else f"{count} requests, of at most 8 each,"
        raise SpecError(
            f"--tokens {tokens}: {said} cannot have equally many: give a --requests that divides "
            f"{tokens}, like {divisor}, or --tokens that {count} divides, like "
            f"{-(-tokens // count) * count}"
        )
    if tokens // count > kv:
        raise SpecError(
            f"--kv {kv}: the {tokens // count} new tokens of each request are among its keys: give "
            f"at least {tokens // count}, or more --requests"
        )
    return ((tokens // count, kv),) * count


def plan_moe(spec: MoESpec, config: EpConfig, backend: str) -> dict[str, Any]:
    """Bytes of a rank's window by region, and totals under other rings.

    Args:
        spec: the layer.
        config: zeros are replaced by recommendations.
        backend: whose recommendations: ``"cpu"`` or ``"cuda"``.

    Raises:
        SpecError: settings that no group could run.
    """
    chosen = _recommend(backend)(spec, config)
    regions, total = _regions(spec, chosen)
    most = chosen.max_blocks(spec)
    minimum = replace(config, ring_l1_blocks=1, ring_l2_blocks=1, wave_blocks=1, l2_lag_blocks=0)
    full = replace(config, ring_l1_blocks=most, ring_l2_blocks=most, wave_blocks=0, l2_lag_blocks=0)
    local = spec.experts_per_rank(config.num_ranks) + spec.num_shared
    return {
        "ranks": config.num_ranks,
        "regions": regions,
        "window_bytes": total,
        "ring_l1_blocks": chosen.ring_l1_blocks,
        "ring_l2_blocks": chosen.ring_l2_blocks,
        "wave_blocks": chosen.wave_blocks,
        "ring_l1_tokens": chosen.ring_l1_blocks * chosen.block_m,
        "min_ring_blocks": 1,
        "window_bytes_min_rings": _regions(spec, minimum.resolved(spec))[1],
        "full_ring_blocks": most,
        "window_bytes_full_rings": _regions(spec, full.resolved(spec))[1],
        "weight_bytes": local * expert_bytes(spec),
    }


_SCALING: Final = "tokens and slots as they are, all else times R/8"


def peer_window(model: str | None, spec: MoESpec, ranks: int, tokens: int) -> dict[str, Any]:
    """Symmetric bytes of a published fused ring kernel for this layer, per rank.

    Returns:
        ``peer_ring_bytes``: scaled to R: tokens and combine slots do not depend on R; what is left
        of the published figure is taken as proportional to it. ``peer_ring_bytes_ep8``: as
        published. Both are None for layers and token counts of which nothing is published.
    """
    known = _PEER_MIB.get(model or "")
    same = known and tokens == _PEER_TOKENS and spec.num_shared == 0 and spec.weight_dtype == "fp8"
    if known is None or not same:
        return {"peer_ring_bytes": None, "peer_ring_bytes_ep8": None, "peer_source": None}
    published = known << 20
    row = spec.hidden + spec.hidden // 128 * 4
    fixed = tokens * (row + spec.topk * spec.hidden * 2)
    scaled = fixed + (published - fixed) * ranks // _PEER_RANKS
    return {
        "peer_ring_bytes": scaled,
        "peer_ring_bytes_ep8": published,
        "peer_source": f"{_PEER_SOURCE}; scaled: {_SCALING}",
    }


def _recommend(backend: str) -> Callable[[MoESpec, EpConfig], EpConfig]:
    if backend == "cuda":
        from megamoe.backends.cuda import cuda_config

        return cuda_config
    if backend == "cpu":
        return lambda spec, config: config.resolved(spec)
    raise SpecError(f"--backend {backend}: must be cpu or cuda")


def _regions(spec: MoESpec, config: EpConfig) -> tuple[dict[str, int], int]:
    """Bytes by region, signals and alignment gaps as one each; and the whole window's."""
    from megamoe.backends.cpu import cpu_shape
    from megamoe.layout import window_layout

    layout = window_layout(cpu_shape(spec, config))
    regions = {name: layout.regions[name].nbytes for name in _LARGE}
    every = sum(region.nbytes for region in layout.regions.values())
    regions["signals"] = every - sum(regions.values())
    regions["alignment"] = layout.nbytes - every
    return regions, layout.nbytes


def expert_bytes(spec: MoESpec) -> int:
    """Weights and scales of one expert."""
    weights = 3 * spec.hidden * spec.inter
    return weights + weights // 128**2 * 4 if spec.weight_dtype == "fp8" else 2 * weights


def _spec(
    model: str | None,
    hidden: int | None,
    inter: int | None,
    experts: int | None,
    topk: int | None,
    shared: int | None,
    weight_dtype: str,
) -> MoESpec:
    dtype = cast("WeightDtype", weight_dtype)
    sizes = {"hidden": hidden, "inter": inter, "experts": experts, "topk": topk}
    if model is not None:
        given = [f"--{name} {size}" for name, size in sizes.items() if size is not None]
        if given:
            raise SpecError(
                f"{', '.join(given)}: --model {model} has sizes of its own; leave --model out and "
                f"give all of {', '.join(f'--{name}' for name in sizes)}"
            )
        return published_layer(model, shared=shared, weight_dtype=weight_dtype)
    if hidden is None or inter is None or experts is None or topk is None:
        raise SpecError("give --model, or all of --hidden, --inter, --experts and --topk")
    return MoESpec(
        hidden=hidden,
        inter=inter,
        num_experts=experts,
        topk=topk,
        num_shared=shared or 0,
        weight_dtype=dtype,
    )


def _sizes(text: str) -> list[int]:
    parts = text.split(",")
    if not all(p.strip().isdigit() and 1 <= int(p) <= MAX_RANKS for p in parts):
        raise SpecError(f"--ranks {text}: write EP sizes of 1..{MAX_RANKS}, like 1,2,4,8")
    return [int(p) for p in parts]


def _table(title: str, plans: list[dict[str, Any]]) -> Table:
    shown = table(title, "bytes per rank", *(f"EP{p['ranks']}" for p in plans))

    def row(label: str, *values: str, **style: Any) -> None:
        shown.add_row(label, *values, **style)

    for name in plans[0]["regions"]:
        last = name == "alignment"
        row(name, *(human_bytes(p["regions"][name]) for p in plans), end_section=last)
    row("window", *(human_bytes(p["window_bytes"]) for p in plans), style="bold")
    row("window, smallest rings", *(human_bytes(p["window_bytes_min_rings"]) for p in plans))
    row("window, full rings", *(human_bytes(p["window_bytes_full_rings"]) for p in plans))
    if plans[0].get("peer_ring_bytes") is not None:
        row("peer's rings, scaled", *(human_bytes(p["peer_ring_bytes"]) for p in plans))
    row("weights", *(human_bytes(p["weight_bytes"]) for p in plans), end_section=True)
    row("ring blocks L1 / L2", *(f"{p['ring_l1_blocks']} / {p['ring_l2_blocks']}" for p in plans))
    row("smallest", *(str(p["min_ring_blocks"]) for p in plans))
    row("full", *(str(p["full_ring_blocks"]) for p in plans))
    row("wave blocks", *(str(p["wave_blocks"]) for p in plans))
    return shown


_STAGES: Final = {
    "A0": "add, RMSNorm, quantise",
    "B0": "both latents and the rotary key",
    "B0.final": "their norms, rotation, latent cache",
    "C0": "gate of the index heads",
    "B1": "index key",
    "B1.final": "LayerNorm, rotation, index cache",
    "D1": "index queries",
    "D1.final": "their rotation, weights of heads",
    "D0": "main queries",
    "D2": "absorbed queries",
    "E1": "index scores over the pages",
}


def _print_attention_pre(model: str, found: dict[str, Any]) -> None:
    queues = found["queues"]
    shape = " × ".join(map(str, found["instruction_tensor"]))
    tasks = table(f"{model}: {found['rows']} rows, tiles {found['tiles']}", "stage", "tasks")
    for stage, count in found["tasks_per_stage"].items():
        what = _STAGES.get(stage)
        tasks.add_row(f"{stage}  {what}" if what else stage, str(count))
    tasks.add_section()
    tasks.add_row("all", str(found["tasks"]))
    stdout.print(tasks)
    events = table("events", "label", "threshold", "producers", "consumers", "count")
    for kind in found["event_kinds"]:
        events.add_row(
            *(str(kind[k]) for k in ("label", "threshold", "producers", "consumers")),
            str(kind["count"]),
        )
    stdout.print(events)
    passes = table("passes", "pass", "figure", "before", "after", "shrink")
    for one in found["passes"]:
        for name in one["before"] | one["after"]:
            before, shrink = one["before"].get(name, ""), one["shrink"].get(name)
            passes.add_row(
                one["pass"],
                name,
                str(before),
                str(one["after"].get(name, "")),
                f"{shrink:.1f}×" if shrink else "",
            )
    stdout.print(passes)
    stdout.print(
        f"{found['events']} events, {found['counters']} counters; {queues['kind']} queues, depth "
        f"{queues['depth']}; instruction tensor [{shape}]; "
        + ", ".join(f"{name} {human_bytes(size)}" for name, size in found["bytes"].items()),
        soft_wrap=True,
    )
    estimates = ", ".join(f"{k} {us:.1f} µs" for k, us in found["estimates_us"].items())
    stdout.print(f"simulated: {estimates}", soft_wrap=True)
