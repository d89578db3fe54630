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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from rich.progress import Progress

from launcher.ranks import Group
from launcher.soak_layers import (
    Batch,
    Opened,
    SoakOptions,
    capture,
    make_batches,
    open_layers,
)
from launcher.stress_cases import folded, pressure
from megamoe.errors import PeerTimeout

if TYPE_CHECKING:
    from torch import Tensor

    from megamoe.layer import MoELayer

__all__ = ["SoakOptions", "soak"]

_LOOK_EVERY: Final = 16
"""Steps from one look at the time, at results and at the waits of a traced call to the next."""
_LATE_SHARE: Final = 0.004
_LATE_S: Final = (0.05, 0.25)


@dataclass
class _Tally:
    """What happened on this rank."""

    calls: int = 0
    replays: int = 0
    late: int = 0
    misses: int = 0
    rounds: int = 0
    reused: int = 0
    batches: int = 0
    error: float = 0.0
    waits: int | None = None
    waits_of: int = 0
    problem: str = ""
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


def soak(
    group: Group, options: SoakOptions, bar: Progress, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Collective: runs until the asked number of calls or seconds.

    Args:
        group: of the ranks.
        options: what to do.
        bar: shows how far it is.
        keep: gets the result after every round, on the first rank.

    Returns:
        The result, on every rank.
    """
    plan = random.Random(options.seed)
    own = random.Random(options.seed * 1_000 + group.rank)
    task = bar.add_task("soak", total=options.calls or None)
    tally, found = _Tally(), dict[str, Any]()
    started = 0.0
    for number in range(options.rounds):
        # Rounds after the time is over do nothing, but other groups may wait for their turns.
        ended = bool(found.get("ended"))
        with ExitStack() as stack:
            with group.alone():
                if not (tally.problem or ended):
                    tally.rounds += 1
                    layers, batches = _open(group, options, plan, number, tally, stack)
            started = started or time.perf_counter()
            try:
                if not (tally.problem or ended):
                    for _ in _steps(
                        group, options, plan, own, number, started, layers, batches, tally
                    ):
                        bar.update(task, completed=tally.calls)
                    tally.look()
            except PeerTimeout as e:
                tally.problem = str(e)
            with group.alone():
                if not (found.get("problems") or ended):
                    tally.layers += [o.figures() for o in layers]
                    _count_waits(tally, layers)
                    seconds = group.gather(time.perf_counter() - started)[0]
                    over = bool(options.seconds) and seconds >= options.seconds
                    ended = over or number + 1 == options.rounds
                    found = _result(group, options, tally, seconds, ended=ended)
                    tally.problem = "; ".join(found["problems"])
                    if group.first:
                        keep(found)
                stack.close()
    return found


def _open(
    group: Group,
    options: SoakOptions,
    plan: random.Random,
    number: int,
    tally: _Tally,
    stack: ExitStack,
) -> tuple[list[Opened], list[Batch]]:
    """A round's layers, batches and graphs; the stack closes the layers."""
    layers = open_layers(group, options, plan, number, stack)
    batches, error = make_batches(group, options, plan, number, layers)
    tally.batches += len(batches)
    tally.error = max(tally.error, error)
    for rank in range(group.num_ranks if group.device != "cpu" else 0):
        if rank == group.rank:  # while one thread captures, no other may touch the device
            for opened in layers:
                capture(opened, batches)
        group.barrier()
    group.barrier()
    return layers, batches


def _result(
    group: Group, options: SoakOptions, tally: _Tally, seconds: float, *, ended: bool
) -> dict[str, Any]:
    """Collective: what has happened so far."""
    mine: dict[str, Any] = {
        "wrong": tally.wrong[:20],
        "num_wrong": len(tally.wrong),
        "problem": tally.problem,
        "waits": tally.waits,
    }
    every = group.gather(mine)
    problems = [f"rank {r}: {m['problem']}" for r, m in enumerate(every) if m["problem"]]
    return {
        "ended": ended,
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
        "rounds": tally.rounds,
        "batches": tally.batches,
        "max_rel_err": tally.error,
        "layers": list(tally.layers),
        "wrong": sum(m["num_wrong"] for m in every),
        "first_wrong": [f"rank {r}: {w}" for r, m in enumerate(every) for w in m["wrong"]][:20],
        "problems": problems,
        "ok": not problems and not any(m["num_wrong"] for m in every),
    }


def _count_waits(tally: _Tally, layers: list[Opened]) -> None:
    """Adds what CPU ranks have counted in all calls of a round; GPUs count in traced calls only."""
    events = [o.layer.counters().backpressure_events for o in layers]
    known = [n for n in events if n is not None]
    if known:
        tally.waits = (tally.waits or 0) + sum(known)
        tally.waits_of = tally.calls


def _steps(
    group: Group,
    options: SoakOptions,
    plan: random.Random,
    own: random.Random,
    number: int,
    started: float,
    layers: list[Opened],
    batches: list[Batch],
    tally: _Tally,
) -> Iterator[None]:
    """Each step is a few calls; ends when the round is over, on all ranks at the same step."""
    end, share = (number + 1) / options.rounds, 0.0
    missed = False  # which takes longer than all other calls
    for step in count():
        looks, missed = missed or step % _LOOK_EVERY == 0, False
        if looks:
            tally.look()
            spent = group.gather(time.perf_counter() - started)[0]
            share = spent / options.seconds if options.seconds else 0.0
        if options.calls:
            share = max(share, tally.calls / options.calls)
        if share >= end and step:  # a round without a call would show nothing
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
            missed = True
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


def _eager(layer: MoELayer, batch: Batch) -> Tensor:
    import torch

    # The allocator is likely to give this block to the output.
    poison = torch.full_like(batch.want, float("nan"))
    del poison
    return layer.run(batch.inputs[0], batch.inputs[1], batch.inputs[2])


def _replay(opened: Opened, batch: Batch, times: int) -> Tensor:
    """New inputs, then replays without a wait between them."""
    graph, held, y = opened.graphs[batch.pattern]
    for target, source in zip(held, batch.inputs, strict=True):
        target.copy_(source)
    y.fill_(float("nan"))
    for _ in range(times):
        graph.replay()
    opened.layer.check()
    return y


def _miss(group: Group, opened: Opened, batch: Batch, victim: int, timeout_s: float) -> None:
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
