"""Which engine is faster for a shape, from committed measurements.

``EVIDENCE`` repeats ``benchmarks/results/attention_pre_h200.json`` (cold L2, the last complete run
of each engine); a test compares the two. Other shapes take the nearest one that was measured, if it
is near. Times of a tuner, which are lower for the standalone kernels, do not count: see
``docs/cmp.md``.
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


EVIDENCE: Final[tuple[Evidence, ...]] = (Evidence(16, 8192, 33.71, 35.067),)
_FAR_ROWS: Final = 1
_FAR_KEYS: Final = 2
"""Octaves beyond which a measurement says nothing: then the megakernel, which was timed at every
published shape."""


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

    def distance(e: Evidence) -> tuple[float, float]:
        return abs(math.log2(e.rows / rows)), abs(math.log2(e.keys / keys))

    near = [e for e in EVIDENCE if distance(e)[0] <= _FAR_ROWS and distance(e)[1] <= _FAR_KEYS]
    if not near:
        return "megakernel"
    nearest = min(near, key=lambda e: sum(distance(e)))
    return "cmp" if nearest.cmp_us < nearest.megakernel_us else "megakernel"
