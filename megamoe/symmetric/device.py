"""Windows of GPU ranks that are threads of one process, on one GPU or several: for tests.

Addresses are valid in every thread as they are. With one rank it is plain device memory.
"""

from __future__ import annotations

import torch

from megamoe.errors import SymmetricMemoryError
from megamoe.symmetric.base import Rendezvous, Window, aligned_zeros

__all__ = ["DeviceMemory", "enable_peer_access"]


def enable_peer_access(devices: set[int]) -> None:
    """Lets kernels of the current device address the memory of the others.

    Raises:
        SymmetricMemoryError: two GPUs of the group cannot reach each other.
    """
    from cuda.bindings import runtime

    own = torch.cuda.current_device()
    for peer in devices - {own}:
        if not torch.cuda.can_device_access_peer(own, peer):
            raise SymmetricMemoryError(
                f"GPU {own} cannot address GPU {peer}: take GPUs of one NVLink domain"
            )
        (error,) = runtime.cudaDeviceEnablePeerAccess(peer, 0)
        if error not in (
            runtime.cudaError_t.cudaSuccess,
            runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled,
        ):
            raise SymmetricMemoryError(f"peer access from GPU {own} to GPU {peer}: {error}")
        runtime.cudaGetLastError()


class DeviceMemory:
    """Symmetric memory of a group of threads, or of a rank alone."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        self._rendezvous = rendezvous
        self._device = device

    def allocate(self, nbytes: int) -> Window:
        """Collective: a zero-filled window of ``nbytes`` for every rank."""
        local = aligned_zeros(nbytes, self._device)
        torch.cuda.synchronize(self._device)
        peers = self._rendezvous.all_gather(
            {"base": local.data_ptr(), "device": self._device.index, "keep": local}
        )
        enable_peer_access({p["device"] for p in peers})
        return Window(local, tuple(p["base"] for p in peers), keep=[p["keep"] for p in peers])
