"""Every exception that megamoe raises on purpose.

    MegaMoeError
    ├── SpecError            a shape, dtype or setting that no call could serve        (ValueError)
    │   └── CapacityError    more tokens, or a smaller ring, than the window was sized for
    ├── InputError           tensors of one call that break the layer's contract       (ValueError)
    ├── CheckpointError      a checkpoint that is missing, unknown or inconsistent
    ├── SymmetricMemoryError a window that could not be allocated or mapped
    ├── BackendUnavailable   a backend that this machine cannot run
    ├── PeerTimeout          a bounded wait expired, on this rank or on a peer     (TimeoutError)
    └── GroupBroken          the group lacks a rank and cannot be reset

A message says what was given, what is allowed, and what to do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "BackendUnavailable",
    "CapacityError",
    "CheckpointError",
    "FaultRecord",
    "GroupBroken",
    "InputError",
    "MegaMoeError",
    "PeerTimeout",
    "SpecError",
    "SymmetricMemoryError",
]


class MegaMoeError(Exception):
    """Base of every exception in this package."""


class SpecError(MegaMoeError, ValueError):
    """A shape, dtype or setting that no call could serve."""


class CapacityError(SpecError):
    """More tokens, or a smaller ring, than the window was sized for."""


class InputError(MegaMoeError, ValueError):
    """Tensors of one call that break the layer's contract; no rank was touched."""


class CheckpointError(MegaMoeError):
    """A checkpoint that is missing, of an unknown kind, or inconsistent."""


class SymmetricMemoryError(MegaMoeError):
    """A symmetric window that could not be allocated or mapped."""


class BackendUnavailable(MegaMoeError):
    """A backend that this machine cannot run."""


@dataclass(frozen=True)
class FaultRecord:
    """What a unit was waiting for when its limit expired (``megamoe/fault.hpp``).

    Attributes:
        rank: the rank whose unit gave up.
        unit: CTA on a GPU, worker thread on a CPU.
        role: ``"dispatch"``, ``"math"`` or ``"combine"``.
        phase: the phase of the call, e.g. ``"exchange"`` or ``"linear2"``.
        tag: the wait, e.g. ``"l1_full"``.
        peer: the rank waited for; the own rank for a local wait.
        index: the slot, token or block waited on.
        epoch: the call, counted from 1 since the last reset.
        want: the value that would have ended the wait.
        have: the value last seen.
    """

    rank: int
    unit: int
    role: str
    phase: str
    tag: str
    peer: int
    index: int
    epoch: int
    want: int
    have: int

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON types."""
        return asdict(self)


class PeerTimeout(MegaMoeError, TimeoutError):
    """A bounded wait expired. ``record`` says who waited for whom, in which phase."""

    def __init__(self, record: FaultRecord, limit_s: float) -> None:
        self.record = record
        self.limit_s = limit_s
        super().__init__(
            f"rank {record.rank} waited more than {limit_s:g} s for rank {record.peer}: "
            f"role {record.role}, phase {record.phase}, {record.tag}[{record.index}], "
            f"epoch {record.epoch}, want {record.want}, have {record.have}. "
            "If every rank is alive, call reset() on all of them; otherwise start a new group."
        )


class GroupBroken(MegaMoeError):
    """The group lacks a rank: the survivors need new windows and a new group.

    Attributes:
        missing: ranks that did not answer.
    """

    def __init__(self, missing: tuple[int, ...], limit_s: float) -> None:
        self.missing = missing
        super().__init__(
            f"rank(s) {', '.join(map(str, missing))} did not answer within {limit_s:g} s. "
            "A missing rank may still hold mappings of these windows and write late, so they "
            "cannot be reused: close this layer, and open a new one in a new group."
        )
