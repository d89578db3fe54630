"""Finds how the standalone kernels are launched best, on one Hopper GPU.

    python -m launcher.tune_cmp --rows 16 --kv 8192 --seconds 30

Coordinate descent over ``Tuning`` of each kernel and the prefetch node: one change at a time, kept
if a graph of many runs over cold copies gets faster by more than the noise. Prints what it kept;
the winner is written into ``megamoe.cmp.bound.TUNING`` by hand, with the figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from launcher.attention_rows import Copies, batch_of
from launcher.cmp_rows import plan_for, time_runs
from megamoe.attention_pre.data import random_caches, random_inputs
from megamoe.attention_pre.encode import encode
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.stages import partition
from megamoe.cmp.bound import TUNING, BoundCmp, Tuning
from megamoe.cmp.prefetch import Prefetch
from megamoe.errors import MegaMoeError

__all__ = ["Setting", "tune"]

_NOISE: Final = 0.997
_TRIGGERS: Final[Mapping[str, Sequence[str]]] = {
    "A0": ("stored", "never"),
    "B0p": ("weights", "inputs", "stored"),
    "B0f": ("stored",),
    "C0": ("weights", "inputs"),
    "B1p": ("weights", "inputs"),
    "D1p": ("weights", "inputs", "stored"),
    "D1f": ("stored",),
    "D0": ("weights", "inputs", "stored"),
}
_PAGES: Final[Mapping[str, Sequence[int]]] = {
    "D0": (8, 10, 6, 4),
    "B0p": (6, 8, 5, 4),
    "C0": (4,),
}
_PRIORITIES: Final[Mapping[str, Sequence[int]]] = {
    "D0": (-1, -4),
    "D2": (-1,),
    "C0": (0, -5),
    "B1p": (0, -5),
    "E1": (0,),
    "D1p": (0,),
}


@dataclass(frozen=True)
class Setting:
    """What is varied."""

    tuning: Mapping[str, Tuning]
    prefetch: Prefetch | None = None


def _changes(now: Setting, names: Sequence[str]) -> Iterator[tuple[str, Setting]]:
    def with_(name: str, **values: Any) -> Setting:
        tuned = replace(now.tuning.get(name, Tuning()), **values)
        return replace(now, tuning={**now.tuning, name: tuned})

    for name in ("D0", "B0p", "C0"):  # what weighs most
        for pages in _PAGES[name]:
            yield f"{name} pages {pages}", with_(name, weight_pages=pages)
    p = now.prefetch
    for megabytes in (0, 12, 20, 28, 36, 44):
        for cycles in (600, 900, 1300):
            if megabytes == 0 and cycles == 600:
                yield "no prefetch", replace(now, prefetch=None)
            elif megabytes:
                base = p or Prefetch()
                made = replace(base, megabytes=megabytes, cycles=cycles)
                if made != p and (p is None or made.cycles == p.cycles or megabytes == p.megabytes):
                    yield f"prefetch {megabytes} MB {cycles}", replace(now, prefetch=made)
    if p is not None:
        for after in ("A0", "B0p", "B0f"):
            yield f"prefetch after {after}", replace(now, prefetch=replace(p, after=after))
        for weights in (("w_q_b", "w_uk"), ("w_index_q", "w_uk", "w_q_b"), ("w_q_b", "w_index_q")):
            yield f"prefetch {weights}", replace(now, prefetch=replace(p, weights=weights))
    for name in names:
        for trigger in ("entry", *_TRIGGERS.get(name, ())):
            if name in _TRIGGERS:
                yield f"{name} trigger {trigger}", with_(name, trigger=trigger)
        for priority in _PRIORITIES.get(name, ()):
            yield f"{name} priority {priority}", with_(name, priority=priority)


def tune(
    copies: Copies, rows: int, kv: int, seconds: float, start: Setting | None = None
) -> tuple[Setting, float]:
    """The best setting found in the time given, and its microseconds."""
    batch = batch_of(rows, kv)
    plan = plan_for(partition(attention_pre_graph(copies.spec)), batch)
    host = random_inputs(copies.spec, batch, 1) | random_caches(copies.spec, batch, 2)
    tensors = copies.tensors(encode(plan).buffers, host)

    def measure(setting: Setting, replays: int = 7) -> float:
        try:
            bounds = [
                BoundCmp(plan, t, tuning=setting.tuning, prefetch=setting.prefetch) for t in tensors
            ]
            return time_runs(
                bounds, "branches_pdl", launches=36, replays=replays, state=False
            ).median_us
        except MegaMoeError as e:
            print(f"    {e}")
            return float("inf")

    best = start or Setting(TUNING)
    least = measure(best)
    print(f"start: {least:.2f}", flush=True)
    end = time.monotonic() + seconds
    names = [b.kernel.name for b in BoundCmp(plan, tensors[0]).kernels]
    improved = True
    while improved and time.monotonic() < end:
        improved = False
        for what, _ in list(_changes(best, names)):
            if time.monotonic() > end:
                break
            # The change as it applies to what has been kept since.
            setting = dict(_changes(best, names)).get(what)
            if setting is None or setting == best:
                continue
            us = measure(setting)
            if us < least * _NOISE:
                again = measure(setting, 15)
                if again < least * _NOISE:
                    best, least, improved = setting, again, True
                    print(f"  {what}: {least:.2f}", flush=True)
                    continue
            print(f"    ({what}: {us:.2f})", flush=True)
    return best, least


def main() -> None:
    """Parses the command line and prints the setting."""
    from megamoe.spec import ATTENTION_MODELS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="glm-5.2", choices=sorted(ATTENTION_MODELS))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--kv", type=int, default=8192)
    parser.add_argument("--copies", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    copies = Copies.make(ATTENTION_MODELS[args.model], args.kv, args.copies)
    best, us = tune(copies, args.rows, args.kv, args.seconds)
    print(f"{us:.2f} us: {best}")


if __name__ == "__main__":
    main()
