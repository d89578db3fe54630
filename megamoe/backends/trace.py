"""What a traced call recorded: events of each role of each unit, and the buffers they come in.

Opened with ``MEGAMOE_TRACE=1``, a layer records every call; ``MoELayer.trace()`` gives the last
one. The meaning of an event's numbers is in ``csrc/include/megamoe/trace.hpp``.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megamoe import native

__all__ = [
    "NOT_TRACED",
    "TRACE_CAPACITY",
    "LayerTrace",
    "TraceBuffers",
    "decode_trace",
    "event_dtype",
    "stretches",
    "trace_wanted",
]

TRACE_CAPACITY: Final = 2048
"""Events of a track (a role of a unit); a call that makes more counts the rest."""
NOT_TRACED: Final = "set MEGAMOE_TRACE=1 before the layer is opened"


def trace_wanted() -> bool:
    """Whether ``MEGAMOE_TRACE`` asks for traces."""
    return os.environ.get("MEGAMOE_TRACE", "0") not in ("", "0")


class TraceBuffers(ctypes.Structure):
    """``TraceBuffers`` of csrc/include/megamoe/trace.hpp."""

    _fields_ = (
        ("slots", ctypes.c_uint64),
        ("recorded", ctypes.c_uint64),
        ("events", ctypes.c_uint64),
        ("capacity", ctypes.c_uint64),
    )


def event_dtype() -> np.dtype[Any]:
    """One event as it lies in memory: begin, end, kind, a, b, c."""
    return np.dtype([(name, kind) for name, kind in native.describe()["trace_fields"]])


@dataclass(frozen=True)
class LayerTrace:
    """The last call of one rank.

    Attributes:
        rank: whose.
        backend: ``"cpu"`` or ``"cuda"``.
        num_ranks, num_units: R, and CTAs or math workers of the rank.
        block_m, ring_l1, ring_l2: rows of a block, and blocks of each ring.
        l1_tiles, l2_tiles: tile columns of a block.
        num_tokens: T of this rank.
        row_bytes: of a row pulled (with its scales) and of a row scattered.
        roles, kinds, tags: names; an event's ``role`` and ``kind`` and a wait's ``a`` are indices.
        events: structured ``[N]``: unit, role, begin, end (ns of one clock of this rank), kind, a,
            b, c; by track, outer events before those inside them.
        dropped: events that did not fit, ``[units, roles]``.
    """

    rank: int
    backend: str
    num_ranks: int
    num_units: int
    block_m: int
    ring_l1: int
    ring_l2: int
    l1_tiles: int
    l2_tiles: int
    num_tokens: int
    row_bytes: tuple[int, int]
    roles: tuple[str, ...]
    kinds: tuple[str, ...]
    tags: tuple[str, ...]
    events: NDArray[Any]
    dropped: NDArray[np.int64]

    def of(self, *kinds: str) -> NDArray[Any]:
        """Events of these kinds, in their order."""
        numbers = [self.kinds.index(kind) for kind in kinds]
        return self.events[np.isin(self.events["kind"], numbers)]


def stretches(trace: LayerTrace) -> list[tuple[int, str, float, float]]:
    """A call in a few lines: when each unit did what, from its first event of a kind to its last.

    Returns:
        Unit, kind, begin after the call's first event and length in µs.
    """
    if not len(trace.events):
        return []
    zero = int(trace.events["begin"].min())
    found = []
    for kind in ("stage", "list", "exchange", "pull", "linear1", "linear2", "combine"):
        events = trace.of(kind)
        for unit in np.unique(events["unit"]).tolist():
            mine = events[events["unit"] == unit]
            begin, end = int(mine["begin"].min()), int(mine["end"].max())
            found.append((unit, kind, (begin - zero) * 1e-3, (end - begin) * 1e-3))
    return found


def decode_trace(
    recorded: NDArray[np.uint32],
    events: NDArray[np.uint8],
    shape: native.MoEShape,
    *,
    rank: int,
    backend: str,
    num_tokens: int,
) -> LayerTrace:
    """The trace in buffers as a call left them.

    Args:
        recorded: ``[units, roles]``, how many events each track has had.
        events: bytes of ``[units, roles, capacity]`` events.
        shape: of the layer.
        rank: whose buffers.
        backend: whose.
        num_tokens: of the call.
    """
    names = native.describe()
    plain = event_dtype()
    table = events.view(plain).reshape(*recorded.shape, -1)
    capacity = table.shape[-1]
    kept = np.minimum(recorded, capacity).astype(np.int64)
    unit, role, place = np.nonzero(np.arange(capacity) < kept[..., None])
    found = np.empty(len(unit), [("unit", "<u4"), ("role", "<u4"), *plain.descr])
    for name in plain.names or ():
        found[name] = table[name][unit, role, place]
    found["unit"], found["role"] = unit, role
    order = np.lexsort((place, -found["end"].astype(np.int64), found["begin"], role, unit))
    groups = shape.hidden // 128 * 4 if shape.is_fp8 else 0
    return LayerTrace(
        rank=rank,
        backend=backend,
        num_ranks=shape.num_ranks,
        num_units=shape.num_units,
        block_m=shape.block_m,
        ring_l1=shape.ring_l1,
        ring_l2=shape.ring_l2,
        l1_tiles=shape.l1_tiles,
        l2_tiles=shape.l2_tiles,
        num_tokens=num_tokens,
        row_bytes=(shape.hidden * (1 if shape.is_fp8 else 2) + groups, shape.hidden * 2),
        roles=tuple(names["trace_roles"]),
        kinds=tuple(names["trace_kinds"]),
        tags=tuple(names["tags"]),
        events=found[order],
        dropped=recorded.astype(np.int64) - kept,
    )
