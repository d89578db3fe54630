"""Ranks as threads of one process: for tests, and for trying a layer without torchrun."""

from __future__ import annotations

import threading
from typing import Any

import torch

from megamoe.symmetric.base import Window, aligned_zeros

__all__ = ["LocalGroup", "LocalMemory", "LocalRendezvous"]


class LocalGroup:
    """A group of ``num_ranks`` ranks in this process; ``rendezvous(rank)`` goes to each thread."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._barrier = threading.Barrier(num_ranks)
        self._values: list[dict[str, Any]] = [{} for _ in range(num_ranks)]

    def rendezvous(self, rank: int) -> LocalRendezvous:
        """What thread ``rank`` passes to ``open_layer``."""
        return LocalRendezvous(self, rank)

    def abort(self) -> None:
        """Breaks every exchange, so that no rank waits for one that has failed."""
        self._barrier.abort()

    def exchange(self, rank: int, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Collective over the group's threads."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class LocalRendezvous:
    """One rank of a ``LocalGroup``."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.num_ranks = group.num_ranks

    def all_gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's value, by rank."""
        return self._group.exchange(self.rank, value)


class LocalMemory:
    """Symmetric memory of a ``LocalGroup``: addresses are valid in every thread as they are."""

    def __init__(self, rendezvous: LocalRendezvous) -> None:
        self._rendezvous = rendezvous

    def allocate(self, nbytes: int) -> Window:
        """Collective: a zero-filled window of ``nbytes`` for every rank."""
        window = aligned_zeros(nbytes, torch.device("cpu"))
        peers = self._rendezvous.all_gather({"base": window.data_ptr(), "tensor": window})
        return Window(window, tuple(p["base"] for p in peers), keep=[p["tensor"] for p in peers])
