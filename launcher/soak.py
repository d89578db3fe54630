"""``megamoe stress --calls N`` and ``--soak SECONDS``: one call after another, under random skew.

Several layers are open at once, of the same experts but with rings, blocks and waves of different
sizes. All ranks draw the same plan from one seed: which layer, which batch, eager calls or replays
of a captured graph (whose inputs change between replays), and who comes late. Each rank adds small
delays of its own, on the host and on its GPU's stream. Every output is compared bit for bit with
what the largest rings gave for that batch, which was compared with the oracle before. A long soak
has several rounds: each closes all layers, and draws rings, tokens per rank and inputs anew.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from rich.progress import Progress

from launcher.ranks import Group
from launcher.stress_cases import blocks_of, folded, pressure
from megamoe.errors import PeerTimeout
from megamoe.spec import EpConfig, MoESpec

if TYPE_CHECKING:
    from torch import Tensor

    from megamoe.layer import Backend, MoELayer

__all__ = ["SoakOptions", "soak"]

_PATTERNS: Final = ("{}", "ramp:{}", "empty:{}")
"""Tokens per rank; each has a graph of its own in each layer."""
_LOOK_EVERY: Final = 16
"""Steps from one look at the time, at results and at the waits of a traced call to the next."""
_LATE_SHARE: Final = 0.004
_LATE_S: Final = (0.05, 0.25)


@dataclass(frozen=True)
class SoakOptions:
    """What to do.

    Attributes:
        spec: the layer.
        tokens: the most tokens of a rank.
        routings: as ``launcher.workloads.route`` reads them.
        calls: end after so many calls, if not 0.
        seconds: end after so many seconds, if not 0.
        misses: times that a rank misses its call: all ranks raise PeerTimeout, reset and go on.
        layers: how many are open at once.
        rounds: parts of equal length, each with layers and inputs of its own.
        seed: of the plan.
        backend: of the layers.
        timeout_s: limit of each wait inside a call.
    """

    spec: MoESpec
    tokens: int
    routings: tuple[str, ...]
    calls: int
    seconds: float
    misses: int
    layers: int
    rounds: int
    seed: int
    backend: Backend
    timeout_s: float


@dataclass
class _Batch:
    """A call's inputs on this rank, and the output it must give."""

    routing: str
    pattern: int
    inputs: list[Tensor]
    want: Tensor
    every_idx: list[Tensor]
    """Routes of all ranks."""


@dataclass
class _Opened:
    """A layer with its graphs, by token pattern; none on CPU ranks."""

    layer: MoELayer
    round: int
    graphs: list[tuple[Any, list[Tensor], Tensor]] = field(default_factory=list)
    reuses: list[bool] = field(default_factory=list)
    """By batch: whether a rank has more blocks than the ring."""
    calls: int = 0

    def figures(self) -> dict[str, int]:
        """What it was, and how often it was called."""
        config = self.layer.config
        return {
            "round": self.round,
            "ring_blocks_l1": config.ring_l1_blocks,
            "ring_blocks_l2": config.ring_l2_blocks,
            "block_m": config.block_m,
            "wave_blocks": config.wave_blocks,
            "calls": self.calls,
        }


@dataclass
class _Tally:
    """What happened on this rank."""

    calls: int = 0
    replays: int = 0
    late: int = 0
    misses: int = 0
    reused: int = 0
    batches: int = 0
    error: float = 0.0
    waits: int | None = None
    waits_of: int = 0
    layers: list[dict[str, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    flags: list[tuple[str, Tensor]] = field(default_factory=list)

    def look(self) -> None:
        """Reads the comparisons that wait on the device."""
        import torch

        if self.flags:
            differs = torch.stack([flag for _, flag in self.flags]).tolist()
            self.wrong += [w for (w, _), bad in zip(self.flags, differs, strict=True) if bad]
            self.flags.clear()


def soak(group: Group, options: SoakOptions, bar: Progress) -> dict[str, Any]:
    """Collective: runs until the asked number of calls or seconds; the result on every rank."""
    plan = random.Random(options.seed)
    own = random.Random(options.seed * 1_000 + group.rank)
    task = bar.add_task("soak", total=options.calls or None)
    tally = _Tally()
    problem, started = "", 0.0
    for number in range(options.rounds):
        with ExitStack() as stack:
            layers = _open(group, options, plan, number, stack)
            batches = _batches(group, options, plan, number, layers, tally)
            for rank in range(group.num_ranks if group.device != "cpu" else 0):
                if rank == group.rank:  # while one thread captures, no other may touch the device
                    for opened in layers:
                        _capture(opened, batches)
                group.barrier()
            group.barrier()
            started = started or time.perf_counter()
            try:
                for _ in _steps(group, options, plan, own, number, started, layers, batches, tally):
                    bar.update(task, completed=tally.calls)
                tally.look()
            except PeerTimeout as e:
                problem = str(e)
            tally.layers += [o.figures() for o in layers]
            _count_waits(tally, layers)
        if any(group.gather(problem)):
            break
    seconds = time.perf_counter() - started
    mine: dict[str, Any] = {
        "wrong": tally.wrong[:20],
        "num_wrong": len(tally.wrong),
        "problem": problem,
        "waits": tally.waits,
    }
    every = group.gather(mine)
    problems = [f"rank {r}: {m['problem']}" for r, m in enumerate(every) if m["problem"]]
    return {
        "ranks": group.num_ranks,
        "calls": tally.calls,
        "graph_replays": tally.replays,
        "late_ranks": tally.late,
        "missed_calls": tally.misses,
        "reused": tally.reused,
        "backpressure": {
            "events": folded(sum, [m["waits"] for m in every]),
            "of_calls": tally.waits_of,
        },
        "seconds": round(seconds, 1),
        "seed": options.seed,
        "rounds": options.rounds,
        "batches": tally.batches,
        "max_rel_err": tally.error,
        "layers": tally.layers,
        "wrong": sum(m["num_wrong"] for m in every),
        "first_wrong": [f"rank {r}: {w}" for r, m in enumerate(every) for w in m["wrong"]][:20],
        "problems": problems,
        "ok": not problems and not any(m["num_wrong"] for m in every),
    }


def _open(
    group: Group, options: SoakOptions, plan: random.Random, number: int, stack: ExitStack
) -> list[_Opened]:
    """The layers of a round; the stack closes them."""
    from megamoe.layer import open_layer
    from megamoe.weights import random_experts

    layers = []
    for config in _configs(group, options, plan):
        layer = group.together(
            lambda config=config: open_layer(  # type: ignore[misc]
                options.spec, config, backend=options.backend, rendezvous=group.rendezvous()
            )
        )
        stack.enter_context(layer)
        layer.load_weights(random_experts(options.spec, group.rank, group.num_ranks, seed=0))
        layers.append(_Opened(layer, number))
    return layers


def _count_waits(tally: _Tally, layers: list[_Opened]) -> None:
    """Adds what CPU ranks have counted in all calls of a round; GPUs count in traced calls only."""
    events = [o.layer.counters().backpressure_events for o in layers]
    known = [n for n in events if n is not None]
    if known:
        tally.waits = (tally.waits or 0) + sum(known)
        tally.waits_of = tally.calls


def _configs(group: Group, options: SoakOptions, plan: random.Random) -> list[EpConfig]:
    """The largest rings first; then the smallest; then the recommendation; then random ones."""
    base = EpConfig(
        num_ranks=group.num_ranks,
        max_tokens=options.tokens,
        block_m=8,
        num_workers=2 if group.device == "cpu" else 0,
        timeout_s=options.timeout_s,
    )
    most = base.max_blocks(options.spec)
    configs = [
        replace(base, ring_l1_blocks=most, ring_l2_blocks=most),
        replace(base, ring_l1_blocks=1, ring_l2_blocks=1, wave_blocks=1),
        replace(base, block_m=0),
    ]
    while len(configs) < options.layers:
        b1, b2 = plan.randint(1, 12), plan.randint(1, 12)
        configs.append(
            replace(
                base,
                block_m=plan.choice((8, 16, 32, 64, 128)),
                ring_l1_blocks=b1,
                ring_l2_blocks=b2,
                wave_blocks=plan.randint(1, min(b1, b2)),
            )
        )
    return configs[: options.layers]


def _batches(
    group: Group,
    options: SoakOptions,
    plan: random.Random,
    number: int,
    layers: list[_Opened],
    tally: _Tally,
) -> list[_Batch]:
    """One batch per routing; what the largest rings give, compared with the oracle."""
    from launcher.verify import against_oracle, sample_rows
    from launcher.workloads import random_activations, route, tokens_per_rank
    from megamoe.weights import random_expert

    spec, batches, layer = options.spec, [], layers[0].layer
    # A pattern's batches have the same tokens: they share a graph.
    least = options.tokens if number == 0 else max(1, options.tokens // 8)
    most = [plan.randint(least, options.tokens) for _ in _PATTERNS]
    experts = [random_expert(spec, e, 0, seed=0) for e in range(spec.num_experts + spec.num_shared)]
    for i, routing in enumerate(options.routings):
        pattern = (i + number) % len(_PATTERNS)
        counts = tokens_per_rank(_PATTERNS[pattern].format(most[pattern]), group.num_ranks)
        tokens, seed = counts[group.rank], 10_000 * options.seed + 100 * number + i
        x = random_activations(spec, group.rank, tokens, seed)
        idx, weight = route(routing, spec, group.num_ranks, group.rank, tokens, seed=seed)
        inputs = [t.to(group.device) for t in (x, idx.int(), weight)]
        want = layer.run(inputs[0], inputs[1], inputs[2])
        error, problem = 0.0, ""
        if tokens:
            verdict, _ = against_oracle(
                spec,
                sample_rows(tokens, 16, seed),
                x,
                idx,
                weight,
                want.cpu(),
                experts.__getitem__,
                experts[spec.num_experts :],
                on_gpu=group.device != "cpu",
            )
            error, problem = verdict.error, verdict.problem
        found = group.gather((error, idx))
        group.together(lambda problem=problem, routing=routing: _need_right(routing, problem))  # type: ignore[misc]
        tally.error = max(tally.error, *(e for e, _ in found))
        batches.append(_Batch(routing, pattern, inputs, want, [i for _, i in found]))
    tally.batches += len(batches)
    for opened in layers:
        config = opened.layer.config
        least_ring = min(config.ring_l1_blocks, config.ring_l2_blocks)
        opened.reuses = [
            max(blocks_of(spec, config.block_m, b.every_idx)) > least_ring for b in batches
        ]
    return batches


def _need_right(routing: str, problem: str) -> None:
    from megamoe.errors import MegaMoeError

    if problem:
        raise MegaMoeError(f"{routing} on the largest rings differs from the oracle: {problem}")


def _capture(opened: _Opened, batches: list[_Batch]) -> None:
    """A graph of a call for each token pattern."""
    import torch

    for pattern in range(len(_PATTERNS)):
        held = [t.clone() for t in next(b for b in batches if b.pattern == pattern).inputs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = opened.layer.run(held[0], held[1], held[2])
        opened.graphs.append((graph, held, y))


def _steps(
    group: Group,
    options: SoakOptions,
    plan: random.Random,
    own: random.Random,
    number: int,
    started: float,
    layers: list[_Opened],
    batches: list[_Batch],
    tally: _Tally,
) -> Iterator[None]:
    """Each step is a few calls; ends when the round is over, on all ranks at the same step."""
    end, share = (number + 1) / options.rounds, 0.0
    for step in count():
        looks = step % _LOOK_EVERY == 0
        if looks:
            tally.look()
            spent = group.gather(time.perf_counter() - started)[0]
            share = spent / options.seconds if options.seconds else 0.0
        if options.calls:
            share = max(share, tally.calls / options.calls)
        if share >= end:
            return
        opened, which = plan.choice(layers), plan.randrange(len(batches))
        batch = batches[which]
        replays = plan.randint(1, 8) if opened.graphs and plan.random() < 0.5 else 0
        late = plan.randrange(group.num_ranks) if plan.random() < _LATE_SHARE else None
        if late is not None:
            tally.late += 1
            pause = plan.uniform(*_LATE_S)
            if group.rank == late:
                time.sleep(pause)
        if tally.misses < options.misses and share >= (tally.misses + 1) / (options.misses + 1):
            victim = plan.randrange(group.num_ranks)
            _miss(group, opened, batch, victim, options.timeout_s)
            tally.misses += 1
        _delay(group, own)
        if replays:
            y = _replay(opened, batch, replays)
            tally.replays += replays
        else:
            y = _eager(opened.layer, batch)
        done = replays or 1
        tally.calls += done
        tally.reused += done if opened.reuses[which] else 0
        opened.calls += done
        differs = (y.view(_bits()) != batch.want.view(_bits())).any()
        what = f"round {number}, step {step}, {batch.routing}, rings of layer "
        what += f"{layers.index(opened)}, {replays} replays"
        tally.flags.append((what, differs))
        if looks and group.device != "cpu":
            waits, _, _ = pressure(opened.layer, opened.layer.counters())
            if waits is not None:
                tally.waits = (tally.waits or 0) + waits
                tally.waits_of += 1
        yield


def _bits() -> Any:
    import torch

    return torch.int16


def _delay(group: Group, own: random.Random) -> None:
    """A little skew, of the host or of the stream."""
    import torch

    kind = own.random()
    if kind < 0.25:
        time.sleep(own.uniform(0, 3e-4))
    elif kind < 0.5 and group.device != "cpu":
        torch.cuda._sleep(own.randrange(400_000))  # cycles


def _eager(layer: MoELayer, batch: _Batch) -> Tensor:
    import torch

    # The allocator is likely to give this block to the output.
    poison = torch.full_like(batch.want, float("nan"))
    del poison
    return layer.run(batch.inputs[0], batch.inputs[1], batch.inputs[2])


def _replay(opened: _Opened, batch: _Batch, times: int) -> Tensor:
    """New inputs, then replays without a wait between them."""
    graph, held, y = opened.graphs[batch.pattern]
    for target, source in zip(held, batch.inputs, strict=True):
        target.copy_(source)
    y.fill_(float("nan"))
    for _ in range(times):
        graph.replay()
    opened.layer.check()
    return y


def _miss(group: Group, opened: _Opened, batch: _Batch, victim: int, timeout_s: float) -> None:
    """A rank comes after the limit: all hear of it, and a reset mends the group."""
    if group.rank == victim:
        time.sleep(1.5 * timeout_s)
    try:
        _eager(opened.layer, batch)
    except PeerTimeout as e:
        if group.num_ranks > 1 and e.record.peer != victim:
            raise
    else:
        assert group.num_ranks == 1, "a rank came after the limit, and nobody said so"
    opened.layer.reset()
