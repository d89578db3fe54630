"""How each kernel is launched: what suits kernels that run beside others, and alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from megamoe.cmp.kernels import Wait
from megamoe.cmp.modes import Mode

__all__ = ["ALONE", "BRANCHES", "CHAIN", "TRIGGERS", "TUNING", "Trigger", "Tuning", "tuning_of"]

Trigger = Literal["never", "entry", "weights", "inputs", "stored"]
TRIGGERS: Final[tuple[Trigger, ...]] = get_args(Trigger)


@dataclass(frozen=True)
class Tuning:
    """How one kernel runs.

    Attributes:
        trigger: when a CTA lets dependent kernels in: never (when it ends), first of all, when its
            weights are asked for, when its producers are done, or when its results are stored.
        priority: of its blocks among those that could start; 0 is the lowest, -5 the highest.
        weight_pages: of shared memory; 0 chooses.
        ctas: see ``Shape``; 0 chooses.
        registers: see ``Shape``; 0 leaves them to ``ctas``.
        at_once: see ``Shape``; 0 chooses.
        in_flight: weight pages of a CTA that may be on their way at once; 0: as many as it has.
        columns: see ``standalone_kernels``; 0 leaves the plan's.
        rows: see ``standalone_kernels``; 0 leaves the plan's.
        wait: see ``compile_kernel``.
    """

    trigger: Trigger = "entry"
    priority: int = 0
    weight_pages: int = 0
    ctas: int = 0
    registers: int = 0
    at_once: int = 0
    in_flight: int = 0
    columns: int = 0
    rows: int = 0
    wait: Wait = "late"


TUNING: Final[Mapping[str, Tuning]] = {
    # The way to the scores first; D0 and D2 fill what it leaves.
    "A0": Tuning(priority=-5),
    # Weights that stream at full rate hold up A0, whose results these kernels wait for.
    "B0p": Tuning(trigger="inputs", priority=-5, weight_pages=5, at_once=1, in_flight=3),
    "B0f": Tuning(priority=-5, at_once=3),
    "C0": Tuning(priority=-3, weight_pages=4),
    "B1p": Tuning(priority=-3, at_once=2),
    "B1f": Tuning(priority=-3, at_once=12, rows=2),
    "D1p": Tuning(priority=-5, in_flight=2),
    "D1f": Tuning(priority=-5, ctas=3, rows=8),
    # As many pages as fit beside D1p.
    "D0": Tuning(trigger="weights", weight_pages=7, ctas=3, at_once=2, in_flight=4),
    "D2": Tuning(trigger="never", in_flight=2),
    "E1": Tuning(trigger="never", priority=-5, registers=104),
}
"""Beside others, by kernel name. Found by ``launcher.tune_cmp`` at M = 16, 8192 keys, as are the
others here (``docs/cmp.md``)."""

ALONE: Final[Mapping[str, Tuning]] = {
    **dict.fromkeys(TUNING, Tuning()),
    "B0p": Tuning(weight_pages=8, in_flight=5),
    "B1f": Tuning(at_once=12, rows=2),
    "D1f": Tuning(rows=8),
    "D0": Tuning(weight_pages=11, ctas=1, at_once=4, in_flight=6),
}
"""Where each kernel follows the one before it: all of an SM for each."""

CHAIN: Final[Mapping[str, Tuning]] = {
    **ALONE,
    "D1p": Tuning(in_flight=1),
    "D0": Tuning(weight_pages=7, ctas=1, at_once=2, in_flight=6),
}
"""Where each may begin while the one before it runs."""

BRANCHES: Final[Mapping[str, Tuning]] = {
    **ALONE,
    "B0f": Tuning(at_once=3),
    "D1p": Tuning(in_flight=2),
    "D0": Tuning(weight_pages=7, ctas=1, at_once=1, in_flight=6),
}
"""Where some run side by side, each after the end of its producers."""


def tuning_of(mode: Mode) -> Mapping[str, Tuning]:
    """What a kind of graph runs with."""
    alone: Mapping[Mode, Mapping[str, Tuning]] = {
        "single_stream": ALONE,
        "single_stream_pdl": CHAIN,
        "branches": BRANCHES,
    }
    return alone.get(mode, TUNING)
