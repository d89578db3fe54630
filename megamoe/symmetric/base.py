"""What a provider gives (``Window``) and what it needs to find its peers (``Rendezvous``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.errors import SymmetricMemoryError

__all__ = [
    "ALIGNMENT",
    "GroupRendezvous",
    "Rendezvous",
    "SymmetricMemory",
    "Window",
    "agree",
    "aligned_zeros",
    "find_rendezvous",
    "need_aligned",
]

ALIGNMENT: Final = 1024
"""Of a window's base: what swizzled bulk copies need, and more than any counter does."""


class Rendezvous(Protocol):
    """How ranks exchange small values while they set up. Collective, in the same order."""

    rank: int
    num_ranks: int

    def all_gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's value, by rank. Values are plain JSON types."""
        ...


@dataclass
class Window:
    """A rank's window and where its peers' windows are mapped.

    Attributes:
        local: uint8 ``[nbytes]``, zero-filled when allocated.
        bases: address of every rank's window in this process (or on this device), by rank.
        keep: whatever must live as long as the addresses are used.
    """

    local: Tensor
    bases: tuple[int, ...]
    keep: list[Any] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of each rank's window."""
        return self.local.numel()

    def close(self) -> None:
        """Drops the mappings; peers keep theirs."""
        self.bases = ()
        self.local = torch.empty(0, dtype=torch.uint8)
        self.keep.clear()


def aligned_zeros(nbytes: int, device: torch.device) -> Tensor:
    """uint8 ``[nbytes]`` on a device, aligned for a window."""
    memory = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % ALIGNMENT :][:nbytes]


def need_aligned(bases: tuple[int, ...]) -> None:
    """Checks the bases of windows that another library has placed.

    Raises:
        SymmetricMemoryError: a base is not aligned for a window.
    """
    if any(base % ALIGNMENT for base in bases):
        given = ", ".join(map(hex, bases))
        raise SymmetricMemoryError(
            f"windows at {given}: must be at multiples of {ALIGNMENT}; take another provider"
        )


class SymmetricMemory(Protocol):
    """A provider."""

    def allocate(self, nbytes: int) -> Window:
        """Collective: a window of ``nbytes`` on every rank.

        Raises:
            SymmetricMemoryError: on every rank, if any rank could not allocate or map.
        """
        ...


class GroupRendezvous:
    """Exchange over a ``torch.distributed`` process group (gloo or NCCL)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)

    def all_gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's value, by rank."""
        out: list[dict[str, Any] | None] = [None] * self.num_ranks
        dist.all_gather_object(out, value, group=self.group)
        return [v for v in out if v is not None]


class _Alone:
    rank = 0
    num_ranks = 1

    def all_gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        return [value]


def find_rendezvous(num_ranks: int) -> Rendezvous:
    """The default process group if there is one, else a group of this process alone.

    Raises:
        SymmetricMemoryError: ``num_ranks`` is not the size of that group.
    """
    rendezvous: Rendezvous = GroupRendezvous() if dist.is_initialized() else _Alone()
    if rendezvous.num_ranks != num_ranks:
        raise SymmetricMemoryError(
            f"num_ranks = {num_ranks}, but this process belongs to a group of "
            f"{rendezvous.num_ranks}: start with torchrun --nproc-per-node {num_ranks} and call "
            "torch.distributed.init_process_group first"
        )
    return rendezvous


def agree(rendezvous: Rendezvous, what: str, value: dict[str, Any] | Exception) -> list[Any]:
    """Exchanges values, or fails on every rank with every rank's error.

    Raises:
        SymmetricMemoryError: any rank brought an exception.
    """
    sent = {"error": str(value)} if isinstance(value, Exception) else {"value": value}
    answers = rendezvous.all_gather(sent)
    errors = [f"rank {r}: {a['error']}" for r, a in enumerate(answers) if "error" in a]
    if errors:
        raise SymmetricMemoryError(f"{what}: " + "; ".join(errors))
    return [a["value"] for a in answers]
