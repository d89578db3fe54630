"""The ranks' part of ``bench moe`` on CPUs: opens the layer, checks and times contenders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.progress import Progress

from launcher.contenders import Batch, Contender, HfExperts, HfWeights, OurLayer, Unavailable
from launcher.plan import expert_bytes
from launcher.ranks import Group
from launcher.timing import Memory, MemoryMeter, Times, take_turns
from launcher.verify import Verdict, sample_rows
from launcher.workloads import Skew, random_activations, route, skew, tokens_per_rank
from megamoe.layer import Backend, MoELayer, open_layer
from megamoe.spec import EpConfig, MoESpec
from megamoe.weights import ExpertWeights, random_experts

__all__ = ["BenchOptions", "bench", "worst"]

_MEMORY_MARGIN: Final = 1.2
_GPU_ONLY: Final = (
    "unfused_us",
    "gemms_us",
    "nvlink_gbs",
    "joules_per_token",
    "sm_mhz",
    "throttle",
)


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        model: name of the shape in the rows.
        spec: the layer, without shared experts.
        cases: token counts per rank as ``tokens_per_rank`` reads them, and a routing as ``route``
            does; cases of the same tokens stand together.
        against: names of contenders.
        block_m: rows of a ring block.
        ring_blocks: blocks of each ring; 0 for the recommendation.
        workers: CPU threads per rank; 0 shares out the cores.
        sustain: seconds of calls back to back on GPUs, for power and clocks; 0 leaves them out.
        rounds: turns of each contender.
        calls: timed calls in a turn.
        turn_s: seconds after which a turn ends early.
        sample: tokens per rank that are compared with the oracle.
        seed: of weights, activations and routes.
        backend: of the layer.
    """

    model: str
    spec: MoESpec
    cases: Sequence[tuple[str, str]]
    against: Sequence[str]
    block_m: int
    ring_blocks: int
    workers: int
    sustain: float
    rounds: int
    calls: int
    turn_s: float
    sample: int
    seed: int
    backend: Backend

    def config(self, num_ranks: int, max_tokens: int = 1) -> EpConfig:
        """How a group runs the layer.

        Raises:
            SpecError: an option is out of its range.
        """
        return EpConfig(
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            block_m=self.block_m,
            ring_l1_blocks=self.ring_blocks,
            ring_l2_blocks=self.ring_blocks,
            num_workers=self.workers,
        )


def bench(
    group: Group, options: BenchOptions, bar: Progress
) -> tuple[list[dict[str, Any]], str, str]:
    """Collective: rows of all token counts and routings.

    Returns:
        The rows (equal on every rank), the backend and the device it ran on.
    """
    meter = MemoryMeter()
    spec = options.spec
    counts = group.together(
        lambda: [tokens_per_rank(t, group.num_ranks, options.seed) for t, _ in options.cases]
    )
    most = max(1, *(n for of_ranks in counts for n in of_ranks))
    config = group.together(lambda: options.config(group.num_ranks, most))
    rows: list[dict[str, Any]] = []
    layer = group.together(lambda: open_layer(spec, config, backend=options.backend))
    with layer:
        weight_bytes = _load(group, layer, options, meter, bar)
        ours = OurLayer(group, layer)
        weights = HfWeights(group, options.against)
        others = [HfExperts(group, name, weights) for name in options.against]
        turns = len(options.cases) * (1 + len(others)) * options.rounds
        task = bar.add_task("timing", total=turns)
        for of_ranks, (_, routing) in zip(counts, options.cases, strict=True):
            batch = _batch(group, options, routing, of_ranks)
            memory = None
            if not rows:  # before a contender adds its own weights
                memory = _memory(group, layer, ours, batch, meter, weight_bytes)
            row = _row(
                group, options, layer, batch, routing, ours, others, lambda: bar.advance(task)
            )
            rows.append(row | {"memory": memory})
        counters = layer.counters()
    return rows, counters.backend, counters.device


def _load(
    group: Group, layer: MoELayer, options: BenchOptions, meter: MemoryMeter, bar: Progress
) -> int:
    """Loads this rank's experts; returns their bytes."""
    total = 0

    def watched() -> Iterator[ExpertWeights]:
        nonlocal total
        local = options.spec.experts_per_rank(group.num_ranks)
        experts = random_experts(options.spec, group.rank, group.num_ranks, options.seed)
        for expert in bar.track(experts, total=local, description="experts"):
            total += expert.nbytes
            yield expert
            meter.sample()

    group.together(lambda: layer.load_weights(watched()))
    return total


def _batch(group: Group, options: BenchOptions, routing: str, counts: list[int]) -> Batch:
    spec, rank, tokens = options.spec, group.rank, counts[group.rank]
    x = random_activations(spec, rank, tokens, options.seed)
    idx, weight = group.together(
        lambda: route(routing, spec, group.num_ranks, rank, tokens, options.seed)
    )
    x, idx, weight = (t.to(group.device) for t in (x, idx, weight))
    sample = sample_rows(tokens, options.sample, options.seed)
    return Batch(spec, counts, x, idx, weight, sample, options.seed)


def _memory(
    group: Group,
    layer: MoELayer,
    ours: OurLayer,
    batch: Batch,
    meter: MemoryMeter,
    weight_bytes: int,
) -> dict[str, Any]:
    """Growth over the memory after imports, once the layer is loaded and has run.

    PSS divides a shared page by the processes that map it, so the sum over ranks holds every window
    once. The peak is the largest of the samples taken after each expert and after these calls.
    """
    ours.prepare(batch)
    for _ in range(3):
        ours.call()
    group.barrier()  # all windows mapped and touched by all ranks
    meter.sample()
    group.barrier()
    window = layer.counters().window_bytes
    found: list[tuple[Memory, Memory]] = group.gather((meter.now, meter.peak))
    needed = sum(group.gather(weight_bytes)) + window * group.num_ranks
    peak = sum(p.pss for _, p in found)
    return {
        "weight_bytes_per_rank": weight_bytes,
        "window_bytes_per_rank": window,
        "growth_pss": sum(n.pss for n, _ in found),
        "growth_pss_peak": peak,
        "growth_rss_of_ranks": [n.rss for n, _ in found],
        "growth_rss_peak_of_ranks": [p.rss for _, p in found],
        "weights_and_windows": needed,
        "peak_over_needed": round(peak / needed, 4),
        "allowed": _MEMORY_MARGIN,
        "ok": peak <= _MEMORY_MARGIN * needed,
    }


def _row(
    group: Group,
    options: BenchOptions,
    layer: MoELayer,
    batch: Batch,
    routing: str,
    ours: OurLayer,
    others: Sequence[Contender],
    on_round: Callable[[], object],
) -> dict[str, Any]:
    """Checks and times all contenders on one batch."""
    verdicts: dict[str, Verdict] = {}
    reasons: dict[str, str] = {}
    calls = {}
    oracle = None
    for contender in (ours, *others):
        try:
            contender.prepare(batch)
        except Unavailable as why:
            reasons[contender.name] = str(why)
            continue
        verdict, oracle = contender.check(oracle)
        verdicts[contender.name] = worst(group.gather(verdict))
        if verdicts[contender.name].ok:
            calls[contender.name] = contender.call
        else:
            reasons[contender.name] = "wrong: " + verdicts[contender.name].problem
    layer.clear_counters()
    measured = take_turns(
        group,
        calls,
        rounds=options.rounds,
        calls_per_round=options.calls,
        turn_s=options.turn_s,
        on_round=on_round,
    )
    counters = group.gather(layer.counters())
    threads = {c.name: c.threads for c in others if isinstance(c, HfExperts)}
    threads = group.gather(threads)[0]
    spread = skew(group.gather(batch.topk_idx.cpu()), batch.spec)
    mine = measured.get(ours.name)
    peers = {n: t for n, t in measured.items() if n != ours.name}
    peer = min(peers, key=lambda n: peers[n].median_us, default=None)
    verdict = verdicts[ours.name]
    reasons |= _absent()
    if peer is None:
        nobody = "no contender was asked for, or none could run"
        reasons |= dict.fromkeys(("peer", "peer_us", "speedup"), nobody)
    if mine is None:
        timed = ("total_us", "p99_us", "tflops", "hbm_gbs", "speedup")
        reasons |= dict.fromkeys(timed, reasons[ours.name])
    return {
        "model": options.model,
        "experts": batch.spec.num_experts,
        "weight_dtype": batch.spec.weight_dtype,
        "ranks": group.num_ranks,
        "tokens": batch.counts[0] if len(set(batch.counts)) == 1 else batch.counts,
        "routing": routing,
        "max_over_mean": round(spread.max_over_mean, 4),
        "skew": spread.to_dict(),
        "ring_tokens": layer.config.ring_l1_blocks * layer.config.block_m,
        "stage_us": None,
        "total_us": mine and round(mine.median_us, 1),
        "p99_us": mine and round(mine.p99_us, 1),
        "peer": peer,
        "peer_us": peer and round(peers[peer].median_us, 1),
        "speedup": round(peers[peer].median_us / mine.median_us, 4) if peer and mine else None,
        "unfused_us": None,
        "gemms_us": None,
        "floor_us": None,
        "fraction_of_floor": None,
        **_rates(batch, spread, mine),
        "nvlink_gbs": None,
        "joules_per_token": None,
        "sm_mhz": None,
        "throttle": None,
        "max_rel_err": verdict.error,
        "contenders": {
            name: {
                "check": verdicts[name].to_dict() if name in verdicts else None,
                "times": measured[name].to_dict() if name in measured else None,
                "threads": threads.get(name),
            }
            for name in (ours.name, *(c.name for c in others))
        },
        "counters": [c.to_dict() for c in counters],
        "reasons": reasons,
        "ok": all(v.ok for v in verdicts.values()),
    }


def _rates(batch: Batch, spread: Skew, mine: Times | None) -> dict[str, float | None]:
    """Routed FLOPs, and bytes of active experts, over the call's time; all ranks together."""
    if mine is None:
        return {"tflops": None, "hbm_gbs": None}
    spec, seconds = batch.spec, mine.median_us * 1e-6
    flops = 6 * spread.routes * spec.hidden * spec.inter
    active = (spec.num_experts - spread.empty_experts) * expert_bytes(spec)
    return {
        "tflops": round(flops / seconds / 1e12, 4),
        "hbm_gbs": round(active / seconds / 1e9, 2),
    }


def worst(verdicts: list[Verdict]) -> Verdict:
    """One verdict for the group: wrong if any rank's is, with the largest errors."""
    compared = [v for v in verdicts if v.tokens] or verdicts
    problems = [f"rank {r}: {v.problem}" for r, v in enumerate(verdicts) if v.problem]
    return Verdict(
        sum(v.tokens for v in compared),
        max(v.error for v in compared),
        max(v.allowed for v in compared),
        max(v.worst for v in compared),
        "; ".join(problems),
    )


def _absent() -> dict[str, str]:
    """Why figures of the schema are null."""
    reasons = dict.fromkeys(_GPU_ONLY, "CPU ranks")
    ceiling = "no ceiling is measured for CPUs"
    return reasons | {
        "floor_us": ceiling,
        "fraction_of_floor": ceiling,
        "stage_us": "staging is part of the call",
    }
