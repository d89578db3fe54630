"""Where the kernel of a traced build writes its time stamps and events, and how they are read."""

from __future__ import annotations

import torch

from megamoe import native
from megamoe.backends.trace import (
    TRACE_CAPACITY,
    LayerTrace,
    TraceBuffers,
    decode_trace,
    event_dtype,
)

__all__ = ["Recorder"]


class Recorder:
    """Buffers of a rank's kernel, one row or track per CTA and role.

    Attributes:
        stamps: of the last call, int64 ``[CTAs, slots]``.
        address: of the ``TraceBuffers`` on the device, which the kernel gets.
    """

    def __init__(self, shape: native.MoEShape, slots: int, device: torch.device) -> None:
        """Allocates; ``slots`` is the kernel's ``megamoe_trace_slots``."""
        self._shape = shape
        tracks = (shape.num_units, len(native.describe()["trace_roles"]))
        size = (*tracks, TRACE_CAPACITY, event_dtype().itemsize)
        self.stamps = torch.zeros((shape.num_units, slots), dtype=torch.int64, device=device)
        self._counts = torch.zeros(tracks, dtype=torch.int32, device=device)
        self._events = torch.zeros(size, dtype=torch.uint8, device=device)
        tensors = (self.stamps, self._counts, self._events)
        buffers = TraceBuffers(*(t.data_ptr() for t in tensors), TRACE_CAPACITY)
        self._buffers = torch.frombuffer(bytearray(bytes(buffers)), dtype=torch.uint8).to(device)
        self.address = self._buffers.data_ptr()

    def events(self, rank: int, num_tokens: int) -> LayerTrace:
        """Of the last call, which must have run.

        Args:
            rank: whose they are.
            num_tokens: that it brought to the call.
        """
        counts = self._counts.cpu().numpy().view("uint32")
        most = max(1, min(int(counts.max()), TRACE_CAPACITY))
        return decode_trace(
            counts,
            self._events[:, :, :most].contiguous().cpu().numpy(),
            self._shape,
            rank=rank,
            backend="cuda",
            num_tokens=num_tokens,
        )
