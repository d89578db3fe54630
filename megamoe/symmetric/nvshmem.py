"""Windows of GPU ranks through ``nvshmem4py``: the selectable provider."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from megamoe.errors import SymmetricMemoryError
from megamoe.symmetric.base import ALIGNMENT, Rendezvous, Window, agree, need_aligned

__all__ = ["NvshmemMemory"]


class NvshmemMemory:
    """Symmetric memory of NVSHMEM, initialised from a ``torch.distributed`` group.

    Peers must be reachable by load and store (one NVLink domain): the kernel takes their addresses.
    Freeing is collective in NVSHMEM, closing a layer is not: windows live as long as the process.
    So does NVSHMEM's group: every layer of a process must be opened by the same ranks, and after a
    rank is lost the others go on in new processes.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        self._rendezvous = rendezvous
        self._device = device

    def allocate(self, nbytes: int) -> Window:
        """Collective: a zero-filled window of ``nbytes`` on every rank.

        Raises:
            SymmetricMemoryError: on every rank, if any rank could not allocate or map.
        """
        what = f"an NVSHMEM window of {nbytes} bytes"
        # Each step is collective in NVSHMEM and would hang there if a rank had failed before it.
        nvshmem = self._step(what, self._import)
        if int(nvshmem.init_status()) < 2:  # once per process
            identity = self._step(what, lambda: self._identity(nvshmem))
            self._step(what, lambda: self._initialise(nvshmem, identity))
        self._step(what, lambda: self._need_same_group(nvshmem))
        whole = self._step(what, lambda: nvshmem.tensor((nbytes + ALIGNMENT,), dtype=torch.uint8))
        window: Window = self._step(what, lambda: self._map(nvshmem, whole, nbytes))
        return window

    def _step(self, what: str, work: Any) -> Any:
        """Runs ``work`` on every rank, or fails on all of them."""
        result: dict[str, int] | Exception = {}
        value = None
        try:
            value = work()
        except Exception as e:  # noqa: BLE001 - NVSHMEM has its own exception types; all are reported
            result = e
        agree(self._rendezvous, what, result)
        return value

    def _import(self) -> Any:
        # NVLink multicast objects are not used; nobody but this process' peers is reached.
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
        try:
            import nvshmem.core as nvshmem
        except ImportError as e:
            raise SymmetricMemoryError(
                f"nvshmem4py cannot be imported ({e}): pip install 'megamoe[cuda]', or take the "
                "provider torch"
            ) from e
        return nvshmem

    def _identity(self, nvshmem: Any) -> Any:
        """What rank 0's is to become for all; made where nothing can hang yet."""
        from cuda.core import Device

        Device(self._device.index).set_current()
        return nvshmem.get_unique_id(empty=self._rendezvous.rank != 0)

    def _initialise(self, nvshmem: Any, identity: Any) -> None:
        from cuda.core import Device

        group = getattr(self._rendezvous, "group", None)
        identities = [identity]
        first = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast_object_list(identities, src=first, group=group)
        nvshmem.init(
            device=Device(self._device.index),
            uid=identities[0],
            rank=self._rendezvous.rank,
            nranks=self._rendezvous.num_ranks,
            initializer_method="uid",
        )

    def _need_same_group(self, nvshmem: Any) -> None:
        ours = (self._rendezvous.rank, self._rendezvous.num_ranks)
        if (nvshmem.my_pe(), nvshmem.n_pes()) != ours:
            raise SymmetricMemoryError(
                f"NVSHMEM of this process is rank {nvshmem.my_pe()} of {nvshmem.n_pes()}, the "
                f"layer's group says {ours[0]} of {ours[1]}: open every layer of a process in the "
                "same group, or take the provider torch"
            )

    def _map(self, nvshmem: Any, whole: torch.Tensor, nbytes: int) -> Window:
        """Cuts an aligned window out of every rank's allocation, at the same offset."""
        rank, num_ranks = self._rendezvous.rank, self._rendezvous.num_ranks
        peers = [
            whole if r == rank else nvshmem.get_peer_tensor(whole, r) for r in range(num_ranks)
        ]
        start = -whole.data_ptr() % ALIGNMENT
        bases = tuple(p.data_ptr() + start for p in peers)
        need_aligned(bases)
        whole.zero_()
        torch.cuda.synchronize(self._device)
        return Window(whole[start : start + nbytes], bases, keep=[peers])
