"""Which engine is faster for a shape, from committed measurements.

``EVIDENCE`` repeats ``benchmarks/results/attention_pre_h200.json`` (cold L2, both engines in one
process); a test compares the two. Other shapes take the nearest one that was measured, if it is
near.
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


EVIDENCE: Final[tuple[Evidence, ...]] = (
    Evidence(1, 2048, 29.054, 29.733),
    Evidence(1, 8192, 29.436, 29.802),
    Evidence(1, 65536, 30.719, 31.618),
    Evidence(16, 2048, 32.785, 32.182),
    Evidence(16, 8192, 32.967, 30.228),
    Evidence(16, 65536, 44.108, 46.071),
    Evidence(64, 2048, 42.777, 43.295),
    Evidence(64, 8192, 47.586, 48.187),
    Evidence(64, 65536, 86.62, 102.027),
    Evidence(128, 2048, 64.334, 63.178),
    Evidence(128, 8192, 73.834, 76.936),
)
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
