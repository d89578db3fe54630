"""The ranks' part of ``bench moe`` on GPUs: checks and times all contenders, makes rows.

Every figure of a row that is null has its reason in ``reasons``. The floor and the bytes follow the
model of ``docs/performance.md``: routed FLOPs, weights of active experts, and remote rows only.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from launcher.contenders import Unavailable
from launcher.estimates import H200, row_bytes
from launcher.gpu_contenders import (
    GpuBatch,
    GpuContender,
    GpuWeights,
    OurKernel,
    PeerKernel,
    Unfused,
)
from launcher.gpu_timing import GpuTimer
from launcher.moe_rows import BenchOptions, worst
from launcher.plan import expert_bytes
from launcher.ranks import Group
from launcher.verify import Verdict, judge, sample_rows
from launcher.workloads import route, skew, tokens_per_rank
from megamoe.layer import choose_backend, tuned_together
from megamoe.reference.moe import moe_forward
from megamoe.reference.quant import quantize_1x128
from megamoe.reference.tolerance import (
    FP8_TENSOR_CORE_BITS,
    FP32_BITS,
    oracle_tolerance,
    unquantised_tolerance,
)
from megamoe.spec import EpConfig, MoESpec
from megamoe.symmetric.base import find_rendezvous
from megamoe.weights import random_expert

__all__ = ["Floor", "bench", "floor_of"]

_FEWEST_TOKENS: Final = 128  # windows are sized for at least so many


@dataclass(frozen=True)
class Floor:
    """What the busiest rank cannot do faster, and what it moves.

    Attributes:
        us: the largest of the three times below.
        flops: routed FLOPs of the busiest rank.
        weight_bytes: of its active experts.
        link_bytes: over its link in the busier direction, dispatch and combine together.
    """

    us: float
    flops: float
    weight_bytes: float
    link_bytes: float


def floor_of(spec: MoESpec, counts: Tensor) -> Floor:
    """The floor of a batch at the ceilings of ``estimates.H200``.

    Args:
        spec: the layer.
        counts: int64 [R, E], routes that each rank sends to each expert.
    """
    ranks = counts.shape[0]
    by_owner = counts.view(ranks, ranks, spec.num_experts // ranks).double()
    h = spec.hidden
    rows = by_owner.sum((0, 2))
    active = (by_owner.sum(0) > 0).sum(1).double()
    own = torch.stack([by_owner[r, r].sum() for r in range(ranks)])
    came, went = rows - own, by_owner.sum((1, 2)) - own
    # A dispatched row is x with its scales, a returned one BF16: in, and out.
    row = row_bytes(spec, h)
    link = torch.maximum(came * row + went * 2 * h, went * row + came * 2 * h)
    flops, read = 6.0 * rows * h * spec.inter, active * expert_bytes(spec)
    most = [float(of_ranks.max()) for of_ranks in (flops, read, link)]
    seconds = max(most[0] / H200.flops, most[1] / H200.read, most[2] / H200.link)
    return Floor(seconds * 1e6, *most)


def bench(
    group: Group,
    options: BenchOptions,
    bar: Progress,
    on_row: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> tuple[list[dict[str, Any]], str, str]:
    """Collective: rows of all cases; ``on_row`` gets the rows so far.

    Returns:
        The rows (equal on every rank), the backend and the device it ran on.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    _need_process_group(group)
    spec = options.spec
    weights = GpuWeights(group, spec, options.seed)
    others, absent = _others(group, options, weights)
    timer = GpuTimer(group)
    task = bar.add_task(options.model, total=len(options.cases))
    rows: list[dict[str, Any]] = []
    for tokens, cases in groupby(options.cases, key=lambda case: case[0]):
        counts = group.together(
            lambda tokens=tokens: tokens_per_rank(tokens, group.num_ranks, options.seed)  # type: ignore[misc]
        )
        config, is_tuned = _config(group, options, counts)
        ours = OurKernel(spec, config, weights)
        counters = ours.session.counters()
        try:
            for _, routing in cases:
                batch = _batch(group, options, routing, counts)
                row = _row(group, options, timer, batch, routing, ours, others, absent)
                rows.append(row | {"tuned": is_tuned})
                bar.advance(task)
                on_row(rows)
                torch.cuda.empty_cache()
        finally:
            ours.session.close()
    return rows, counters.backend, counters.device


def _config(group: Group, options: BenchOptions, counts: list[int]) -> tuple[EpConfig, bool]:
    """Collective: what our layer is opened with, and whether ``megamoe tune`` found it."""
    asked = EpConfig(
        num_ranks=group.num_ranks,
        max_tokens=max(*counts, _FEWEST_TOKENS),
        block_m=options.block_m,
        ring_l1_blocks=options.ring_blocks,
        ring_l2_blocks=options.ring_blocks,
        timeout_s=10,
    )
    rendezvous = group.rendezvous() or find_rendezvous(group.num_ranks)
    config = tuned_together(options.spec, asked, choose_backend(options.backend), rendezvous)
    return config, config != asked


def _need_process_group(group: Group) -> None:
    """A rank alone is in none, but the peers want one."""
    if dist.is_initialized():
        return
    backend = "gloo" if group.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    # Kept for the next model: a second group would have the name of the first.
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)


def _others(
    group: Group, options: BenchOptions, weights: GpuWeights
) -> tuple[list[GpuContender], dict[str, str]]:
    """The contenders that were asked for, and why others are not there; equal on all ranks."""
    makers: dict[str, Callable[[], GpuContender]] = {
        "peer": lambda: PeerKernel(options.spec, weights),
        "unfused": lambda: Unfused(group, options.spec, weights),
    }
    found: list[GpuContender] = []
    absent = {name: "not asked for" for name in makers if name not in options.against}
    for name in options.against:
        made, why = _attempt(group, makers[name])
        if made is None:
            absent[name] = why
        else:
            found.append(made)
    return found, absent


def _attempt(group: Group, work: Callable[[], Any]) -> tuple[Any, str]:
    """The result of ``work``, or None and the first rank's reason, on every rank alike."""
    result, why = None, ""
    try:
        result = work()
    except Exception as e:  # noqa: BLE001 - a contender that cannot run is a reason in the row
        why = str(e) if isinstance(e, Unavailable) else f"{type(e).__name__}: {str(e)[:300]}"
        why = why or type(e).__name__
    reasons = [f"rank {r}: {w}" for r, w in enumerate(group.gather(why)) if w]
    if reasons:
        return None, why or reasons[0]
    return result if result is not None else True, ""


def _batch(group: Group, options: BenchOptions, routing: str, counts: list[int]) -> GpuBatch:
    spec, tokens = options.spec, counts[group.rank]
    ids, weight = group.together(
        lambda: route(routing, spec, group.num_ranks, group.rank, tokens, options.seed)
    )
    device = group.device
    generator = torch.Generator(device).manual_seed(options.seed * 1000 + group.rank)
    x = torch.randn(tokens, spec.hidden, generator=generator, device=device).bfloat16()
    values, scale = quantize_1x128(x) if spec.weight_dtype == "fp8" else (x, None)
    sample = sample_rows(tokens, options.sample, options.seed)
    on_device = (t.to(device) for t in (ids, weight, sample))
    return GpuBatch(spec, counts, x, values, scale, *on_device)


def _oracle(options: BenchOptions, batch: GpuBatch) -> Tensor:
    """``reference/moe.py`` on this rank's sample, in FP64 on the GPU."""
    rows, spec, device = batch.sample, batch.spec, batch.x.device
    needed = sorted({int(e) for e in batch.ids[rows].flatten() if e >= 0})
    with device:  # its intermediates, too
        return moe_forward(
            spec,
            batch.x[rows],
            batch.ids[rows],
            batch.weight[rows],
            {e: random_expert(spec, e, 0, options.seed, device=device) for e in needed},
        )


def _check(group: Group, batch: GpuBatch, expected: Tensor, contender: GpuContender) -> Verdict:
    """Collective: one call, compared on every rank's sample."""
    y = contender.call().cpu()
    rows, spec = len(batch.sample), batch.spec
    if isinstance(contender, OurKernel):
        contender.session.check()
        bits = FP8_TENSOR_CORE_BITS if spec.weight_dtype == "fp8" else FP32_BITS
        tolerance = oracle_tolerance(spec, rows, bits)
    else:
        # Its groups, scales and roundings are others': it is as far off as FP8 may be.
        tolerance = unquantised_tolerance(spec, rows)
    verdict = judge(y[batch.sample.cpu()], expected.cpu(), tolerance)
    return worst(group.gather(verdict))


def _row(
    group: Group,
    options: BenchOptions,
    timer: GpuTimer,
    batch: GpuBatch,
    routing: str,
    ours: OurKernel,
    others: Sequence[GpuContender],
    absent: dict[str, str],
) -> dict[str, Any]:
    """Checks and times all contenders on one batch."""
    expected = _oracle(options, batch)
    errors: dict[str, Verdict] = {}
    why = {**absent, "stage_us": "staging is part of the kernel, and of total_us"}
    calls: dict[str, Callable[[], object]] = {}
    for contender in (ours, *others):
        _, reason = _attempt(group, lambda c=contender: c.prepare(batch))  # type: ignore[misc]
        if not reason:
            verdict, reason = _attempt(
                group, lambda c=contender: _check(group, batch, expected, c)  # type: ignore[misc]
            )  # fmt: skip
            if not reason:
                errors[contender.name] = verdict
                reason = "" if verdict.ok else "wrong: " + verdict.problem
        if reason:
            why[contender.name] = reason
        else:
            calls[contender.name] = contender.call
    unfused = next((c for c in others if isinstance(c, Unfused) and c.name in calls), None)
    if unfused is not None:
        calls["gemms"] = unfused.gemms
    measured = timer.bursts(calls, options.rounds, options.calls)
    held = {n: timer.sustained(calls[n], options.sustain) for n in _heard(calls, options)}
    host = timer.host_us(ours.call) if ours.name in calls else None
    ours.session.check()
    counts = torch.stack(
        group.gather(
            torch.bincount(batch.ids[batch.ids >= 0].cpu(), minlength=batch.spec.num_experts)
        )
    )
    spread = skew(group.gather(batch.ids.cpu()), batch.spec)
    floor = floor_of(batch.spec, counts)
    peer = next((c for c in others if isinstance(c, PeerKernel)), None)
    figures = _figures(batch, spread.routes, measured, floor)
    sustained = held.get(ours.name)
    total_tokens = sum(batch.counts)
    row: dict[str, Any] = {
        "model": options.model,
        "experts": batch.spec.num_experts,
        "ranks": group.num_ranks,
        "tokens": batch.counts[0] if len(set(batch.counts)) == 1 else batch.counts,
        "routing": routing,
        "max_over_mean": round(spread.max_over_mean, 4),
        "skew": spread.to_dict(),
        **_sizes(ours),
        **figures,
        "launches": 1,
        "host_us": None if host is None else round(host, 1),
        "peer": peer.version if peer is not None else None,
        "peer_window_bytes": peer.window_bytes if peer is not None else None,
        "sustained_us": sustained and round(sustained.us, 1),
        "peer_sustained_us": held["peer"].us if "peer" in held else None,
        "joules_per_token": (
            sustained.joules / total_tokens
            if sustained and sustained.joules is not None and total_tokens
            else None
        ),
        "sm_mhz": sustained and sustained.sm_mhz,
        "watts": sustained and sustained.watts,
        "throttle": sustained and sustained.throttle,
        "gpm": sustained and sustained.counters,
        "max_rel_err": errors[ours.name].error if ours.name in errors else None,
        "errors": {n: {"rel_err": v.error, "allowed": v.allowed} for n, v in errors.items()},
        "calls": measured[ours.name].calls if ours.name in measured else 0,
        "ok": ours.name in errors and all(v.ok for v in errors.values()),
    }
    for contender in (ours, *others):
        contender.done()
    return row | {"reasons": _reasons(row, why, options)}


def _heard(calls: dict[str, Any], options: BenchOptions) -> list[str]:
    """Who is also measured under sustained load."""
    return [n for n in ("megamoe", "peer") if n in calls and options.sustain > 0]


def _sizes(ours: OurKernel) -> dict[str, Any]:
    config = ours.session.config
    return {
        "ring_tokens": config.ring_l1_blocks * config.block_m,
        "ring_blocks_l1": config.ring_l1_blocks,
        "ring_blocks_l2": config.ring_l2_blocks,
        "block_m": config.block_m,
        "wave_blocks": config.wave_blocks,
        "window_bytes": ours.session.counters().window_bytes,
    }


def _figures(
    batch: GpuBatch, routes: int, measured: dict[str, Any], floor: Floor
) -> dict[str, float | None]:
    """Times, and rates: TFLOPS of the mean rank, HBM and NVLink of the busiest."""
    mine, spec = measured.get("megamoe"), batch.spec

    def median(name: str) -> float | None:
        return round(measured[name].median_us, 1) if name in measured else None

    found: dict[str, float | None] = {
        "stage_us": None,
        "total_us": median("megamoe"),
        "p99_us": round(mine.p99_us, 1) if mine else None,
        "peer_us": median("peer"),
        "unfused_us": median("unfused"),
        "gemms_us": median("gemms"),
        "floor_us": round(floor.us, 1),
    }
    us = mine.median_us if mine else None
    flops = 6 * routes * spec.hidden * spec.inter
    peer = measured.get("peer")
    return found | {
        "speedup": round(peer.median_us / us, 4) if peer and us else None,
        "fraction_of_floor": round(floor.us / us, 4) if us else None,
        "tflops": round(flops / us / 1e6 / len(batch.counts), 1) if us else None,
        "hbm_gbs": round(floor.weight_bytes / us / 1e3, 1) if us else None,
        "nvlink_gbs": round(floor.link_bytes / us / 1e3, 1) if us else None,
    }


def _reasons(row: dict[str, Any], why: dict[str, str], options: BenchOptions) -> dict[str, str]:
    """Why figures of the row are null."""
    owner = {
        **dict.fromkeys(("peer", "peer_us", "peer_window_bytes", "peer_sustained_us"), "peer"),
        "speedup": "peer",
        **dict.fromkeys(("unfused_us", "gemms_us"), "unfused"),
    }
    held = ("sustained_us", "joules_per_token", "sm_mhz", "watts", "throttle", "gpm")
    found = dict(why)
    for name, value in row.items():
        if value is not None or name in found:
            continue
        reason = why.get(owner.get(name, "megamoe"))
        if reason is None and name in (*held, "peer_sustained_us") and not options.sustain:
            reason = "--sustain 0: no sustained run"
        found[name] = reason or "NVML does not answer"
    return found
