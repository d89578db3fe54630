"""How each kernel is launched: what suits kernels that run beside others, and alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from megamoe.cmp.kernels import Wait
from megamoe.cmp.modes import Mode

__all__ = ["ALONE", "TRIGGERS", "TUNING", "Trigger", "Tuning", "tuning_of"]

Trigger = Literal["never", "entry", "weights", "inputs", "stored"]
TRIGGERS: Final[tuple[Trigger, ...]] = ("never", "entry", "weights", "inputs", "stored")


@dataclass(frozen=True)
class Tuning:
    """How one kernel runs.

    Attributes:
        trigger: when a CTA lets dependent kernels in: never (when it ends), first of all, when its
            weights are asked for, when its producers are done, or when its results are stored.
        priority: of its blocks among those that could start; 0 is the lowest, -5 the highest.
        weight_pages: of shared memory; 0 chooses.
        ctas: see ``Shape``; 0 chooses.
        at_once: see ``Shape``; 0 chooses.
        in_flight: weight pages of a CTA that may be on their way at once; 0: as many as it has.
        ahead: weight pages that find no room and go to L2 meanwhile.
        ahead_cycles: at least, between two of them: a backlog would delay all other requests.
        columns: see ``standalone_kernels``; 0 leaves the plan's.
        wait: see ``compile_kernel``.
    """

    trigger: Trigger = "entry"
    priority: int = 0
    weight_pages: int = 0
    ctas: int = 0
    at_once: int = 0
    in_flight: int = 0
    ahead: int = 0
    ahead_cycles: int = 900
    columns: int = 0
    wait: Wait = "late"


TUNING: Final[Mapping[str, Tuning]] = {
    # The way to the scores first; D0 and D2 fill what it leaves.
    **{name: Tuning(priority=-5) for name in ("A0", "B0f", "D1p", "D1f", "E1")},
    **{name: Tuning(priority=-3) for name in ("B1p", "B1f")},
    "B0p": Tuning(priority=-5, weight_pages=6),
    "C0": Tuning(priority=-3, weight_pages=4),
    "D0": Tuning(weight_pages=6),
}
"""By kernel name; others take ``Tuning()``. Found by ``launcher.tune_cmp`` at M = 16, 8192 keys
(``docs/cmp.md``); D0 with more pages was not tried."""

ALONE: Final[Mapping[str, Tuning]] = {
    **dict.fromkeys(TUNING, Tuning()),
    "B0p": Tuning(weight_pages=8),
    "D0": Tuning(weight_pages=11, at_once=2, ctas=1),
}
"""Where kernels follow one another: all of an SM for each."""


def tuning_of(mode: Mode) -> Mapping[str, Tuning]:
    """What a kind of graph runs with."""
    return ALONE if mode == "single_stream" else TUNING
