"""A barrier of GPU ranks' hosts through their windows."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

from megamoe.backends.cuda_driver import copy_from_device, copy_to_device
from megamoe.errors import GroupBroken

__all__ = ["HostBarrier"]

_LINE = 128


class HostBarrier:
    """Says who is missing, and cannot hang. A rank writes its line in every window.

    Args:
        addresses: of the region ``host_barrier`` of every rank's window, as mapped here.
        rank: this rank.
    """

    def __init__(self, addresses: Sequence[int], rank: int) -> None:
        self._addresses, self._rank = addresses, rank
        self._meetings = 0

    def meet(self, limit_s: float) -> None:
        """Returns when every rank has come as often as this one.

        Raises:
            GroupBroken: one did not within ``limit_s`` seconds.
        """
        self._meetings += 1
        line = struct.pack("<I", self._meetings)
        for address in self._addresses:
            copy_to_device(address + self._rank * _LINE, line)
        own = self._addresses[self._rank]
        deadline = time.monotonic() + limit_s
        while True:
            raw = copy_from_device(own, _LINE * len(self._addresses))
            came = [v[0] for v in struct.iter_unpack(f"<I{_LINE - 4}x", raw)]
            missing = tuple(r for r, n in enumerate(came) if n < self._meetings)
            if not missing:
                return
            if time.monotonic() > deadline:
                raise GroupBroken(missing, limit_s)
            time.sleep(0.0005)
