"""Finds how the standalone kernels are launched best, on one Hopper GPU.

    python -m launcher.tune_cmp --tokens 16 --kv 8192 --seconds 30 --mode branches_pdl

Descent over ``Tuning`` of each kernel: one change at a time, then several, kept if a graph of many
runs over cold copies gets faster by more than the noise. Every setting's scores are compared with
the first one's, bit by bit, before it is timed. Prints what it kept; the winner is written into
``megamoe.cmp.tuning`` by hand, with the figures.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import torch

from launcher.attention_rows import SCORES, Copies, batch_of
from launcher.cmp_rows import bind_all, plan_for, time_runs
from launcher.script import need_hopper, run_script
from megamoe.attention_pre.data import random_caches, random_inputs
from megamoe.attention_pre.encode import encode
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.stages import partition
from megamoe.cmp.bound import BoundCmp
from megamoe.cmp.graphs import CmpGraph
from megamoe.cmp.modes import MODES, Mode
from megamoe.cmp.tuning import Tuning, tuning_of
from megamoe.errors import MegaMoeError

__all__ = ["Setting", "Tuner", "changes", "describe"]

_NOISE: Final = 0.997
_TRIGGERS: Final[Mapping[str, Sequence[str]]] = {
    "A0": ("stored",),
    "B0p": ("weights", "inputs"),
    "B0f": ("stored",),
    "C0": ("weights", "inputs"),
    "B1p": ("weights", "inputs"),
    "D1p": ("weights", "inputs", "stored"),
    "D1f": ("stored",),
    "D0": ("weights", "inputs", "stored"),
}
_PAGES: Final[Mapping[str, Sequence[int]]] = {
    "D0": (7, 8, 9, 10, 12, 6, 5),
    "B0p": (8, 6, 5, 4),
    "D2": (6, 3),
    "D1p": (4, 3, 2),
    "C0": (8, 4, 2),
    "B1p": (4, 2),
    "E1": (2, 1),
}
_AT_ONCE: Final[Mapping[str, Sequence[int]]] = {
    "D0": (1, 2, 4),
    "B0p": (1, 2, 4),
    "D1p": (1, 2, 4),
    "B0f": (2, 3, 6),
    "B1f": (12, 6, 0),
    "B1p": (1, 4),
    "C0": (1, 4),
    "D2": (1, 4),
}
_CTAS: Final[Mapping[str, Sequence[int]]] = {"D0": (3, 2), "D1f": (3, 2), "B1f": (1, 3, 2)}
_ROWS: Final[Mapping[str, Sequence[int]]] = {"B1f": (2, 4, 0), "D1f": (8, 4, 0)}
_IN_FLIGHT: Final[Mapping[str, Sequence[int]]] = {
    "D0": (0, 2, 3, 4, 6),
    "D1p": (0, 1, 2),
    "B0p": (0, 3, 5),
    "D2": (0, 2),
}
_REGISTERS: Final[Mapping[str, Sequence[int]]] = {"E1": (0, 112, 104, 96), "D0": (0, 48, 56)}
_COLUMNS: Final[Mapping[str, Sequence[int]]] = {"D2": (128, 256)}
_PRIORITIES: Final[Mapping[str, Sequence[int]]] = {
    "D0": (0, -1, -4),
    "D2": (0, -1, -5),
    "C0": (0, -3, -5),
    "B1p": (0, -3, -5),
    "E1": (0, -5),
    "D1p": (0, -5),
}

Setting = Mapping[str, Tuning]
"""What is varied: by kernel name."""


def describe(setting: Setting) -> str:
    """What differs from the defaults, in words that Python reads."""
    parts = []
    for name, tuned in setting.items():
        told = [
            f"{f.name}={getattr(tuned, f.name)!r}"
            for f in fields(tuned)
            if getattr(tuned, f.name) != f.default
        ]
        parts.append(f'"{name}": Tuning({", ".join(told)})')
    return "{" + ", ".join(parts) + "}"


def changes(now: Setting, mode: Mode) -> Iterator[tuple[str, Setting]]:
    """Single changes of a setting, those that may weigh most first."""
    tables: list[tuple[str, Mapping[str, Sequence[Any]]]] = [
        ("at_once", _AT_ONCE),
        ("weight_pages", _PAGES),
        ("columns", _COLUMNS),
        ("in_flight", _IN_FLIGHT),
        ("registers", _REGISTERS),
        ("ctas", _CTAS),
        ("rows", _ROWS),
    ]
    if mode != "single_stream":
        tables.append(("priority", _PRIORITIES))
    if mode not in ("single_stream", "branches"):
        tables.append(("trigger", _TRIGGERS))
    for field, table in tables:
        for name, values in table.items():
            tuned = now.get(name, Tuning())
            for value in (*values, "entry") if field == "trigger" else values:
                if value != getattr(tuned, field):
                    changed = {**now, name: replace(tuned, **{field: value})}
                    yield f"{name} {field} {value}", changed


class Tuner:
    """Times settings of one shape.

    Args:
        copies: of the weights.
        rows: M.
        kv: keys of each request.
    """

    def __init__(self, copies: Copies, rows: int, kv: int) -> None:
        batch = batch_of(rows, kv)
        self.plan = plan_for(partition(attention_pre_graph(copies.spec)), batch)
        host = random_inputs(copies.spec, batch, 1) | random_caches(copies.spec, batch, 2)
        self.tensors = copies.tensors(encode(self.plan).buffers, host)
        self._expected: torch.Tensor | None = None

    def bind(self, setting: Setting, *, trace: bool = False) -> list[BoundCmp]:
        """The kernels on every copy."""
        return bind_all(self.plan, self.tensors, tuning=setting, trace=trace)

    def check(self, bound: BoundCmp, mode: Mode) -> None:
        """Compares the scores with those of the first setting.

        Raises:
            MegaMoeError: they differ.
        """
        scores = self.tensors[0][SCORES]
        scores.fill_(torch.nan)
        graph = CmpGraph([bound], mode)
        graph.launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        graph.close()
        if self._expected is None:
            self._expected = scores.clone()
        if not torch.equal(self._expected, scores):
            raise MegaMoeError("its scores differ from the first setting's")

    def measure(self, setting: Setting, mode: Mode, replays: int = 7) -> float:
        """Microseconds of a run; infinite where the setting cannot run."""
        try:
            bounds = self.bind(setting)
            self.check(bounds[0], mode)
            return time_runs(bounds, mode, launches=36, replays=replays, state=False).median_us
        except MegaMoeError as e:
            print(f"    {str(e)[:200]}")
            return float("inf")

    def tune(self, start: Setting, mode: Mode, seconds: float) -> tuple[Setting, float]:
        """The best setting found in the time given, and its microseconds.

        Single changes until none helps, then several at a time.
        """
        best, least = start, self.measure(start, mode, 15)
        print(f"{mode}, start: {least:.2f}", flush=True)
        end = time.monotonic() + seconds

        def take(what: str, setting: Setting) -> bool:
            nonlocal best, least
            us = self.measure(setting, mode)
            if us < least * _NOISE and (us := self.measure(setting, mode, 15)) < least * _NOISE:
                best, least = setting, us
                print(f"  {what}: {us:.2f}", flush=True)
                return True
            print(f"    ({what}: {us:.2f})", flush=True)
            return False

        improved = True
        while improved and time.monotonic() < end:
            improved = False
            for what, _ in list(changes(best, mode)):
                # The change as it applies to what has been kept since.
                setting = dict(changes(best, mode)).get(what)
                if setting is not None and time.monotonic() < end:
                    improved |= take(what, setting)
        rng = random.Random(0)
        while time.monotonic() < end:
            setting, told = best, []
            for _ in range(rng.randint(2, 4)):
                what, setting = rng.choice(list(changes(setting, mode)))
                told.append(what)
            take("; ".join(told), setting)
        return best, least


def main() -> None:
    """Parses the command line and prints the setting."""
    from megamoe.spec import ATTENTION_MODELS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="glm-5.2", choices=sorted(ATTENTION_MODELS))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--kv", type=int, default=8192)
    parser.add_argument("--copies", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--mode", default="branches_pdl", choices=MODES)
    args = parser.parse_args()
    need_hopper("tune_cmp")
    copies = Copies.make(ATTENTION_MODELS[args.model], args.kv, args.copies)
    tuner = Tuner(copies, args.tokens, args.kv)
    best, us = tuner.tune(tuning_of(args.mode), args.mode, args.seconds)
    print(f"{us:.2f} us: {describe(best)}")


if __name__ == "__main__":
    run_script(main)
