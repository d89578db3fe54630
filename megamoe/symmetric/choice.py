"""Which symmetric memory a group of GPU ranks gets."""

from __future__ import annotations

import os
from typing import Literal

import torch

from megamoe.errors import SpecError
from megamoe.symmetric.base import GroupRendezvous, Rendezvous, SymmetricMemory
from megamoe.symmetric.device import DeviceMemory

__all__ = ["Provider", "symmetric_memory"]

Provider = Literal["torch", "nvshmem"]


def symmetric_memory(
    rendezvous: Rendezvous, device: torch.device, provider: str | None
) -> SymmetricMemory:
    """Plain device memory for ranks of one process, a provider's for processes.

    Args:
        rendezvous: how ranks find each other.
        device: of this rank.
        provider: ``"torch"`` or ``"nvshmem"``; None takes ``$MEGAMOE_SYMMETRIC``, or torch.

    Raises:
        SpecError: no such provider.
        BackendUnavailable: its package is missing.
    """
    if not isinstance(rendezvous, GroupRendezvous):
        return DeviceMemory(rendezvous, device)
    name = provider or os.environ.get("MEGAMOE_SYMMETRIC", "torch")
    if name == "nvshmem":
        from megamoe.symmetric.nvshmem import NvshmemMemory

        return NvshmemMemory(rendezvous, device)
    if name == "torch":
        from megamoe.symmetric.torch_symm import TorchSymmetricMemory

        return TorchSymmetricMemory(rendezvous, device)
    raise SpecError(f"symmetric memory provider {name!r}: must be 'torch' or 'nvshmem'")
