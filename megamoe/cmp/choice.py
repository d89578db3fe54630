"""Which engine is faster for a shape, from committed measurements.

``EVIDENCE`` repeats ``benchmarks/results/attention_pre_h200.json`` (cold L2; the better variant of
each engine); a test compares the two. A shape that was not measured takes the nearest one that was.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Final, Literal

from megamoe.errors import SpecError

__all__ = ["ENGINE_VARIABLE", "EVIDENCE", "Evidence", "GpuEngine", "choose_engine"]

GpuEngine = Literal["megakernel", "cmp"]
ENGINE_VARIABLE: Final = "MEGAMOE_ATTENTION_ENGINE"
"""Environment variable that overrides the choice: ``megakernel`` or ``cmp``."""


@dataclass(frozen=True)
class Evidence:
    """Microseconds per call at one shape: M token rows, keys of the longest request."""

    rows: int
    keys: int
    megakernel_us: float
    cmp_us: float


EVIDENCE: Final[tuple[Evidence, ...]] = ()


def choose_engine(rows: int, keys: int) -> GpuEngine:
    """The engine that was faster at the nearest measured shape, unless the environment says.

    Args:
        rows: M.
        keys: of the longest request.

    Raises:
        SpecError: the environment names an unknown engine.
    """
    if said := os.environ.get(ENGINE_VARIABLE):
        if said == "megakernel":
            return "megakernel"
        if said == "cmp":
            return "cmp"
        raise SpecError(f"{ENGINE_VARIABLE}={said!r}: must be 'megakernel' or 'cmp'")
    if not EVIDENCE:
        return "megakernel"
    nearest = min(
        EVIDENCE,
        key=lambda e: abs(math.log2(e.rows / rows)) + abs(math.log2(e.keys / keys)) / 2,
    )
    return "cmp" if nearest.cmp_us < nearest.megakernel_us else "megakernel"
