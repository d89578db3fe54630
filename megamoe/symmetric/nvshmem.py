"""Windows of GPU ranks through ``nvshmem4py``: the selectable provider."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megamoe.symmetric.base import Rendezvous, Window, agree, need_aligned

__all__ = ["NvshmemMemory"]


class NvshmemMemory:
    """Symmetric memory of NVSHMEM, initialised from a ``torch.distributed`` group.

    Peers must be reachable by load and store (one NVLink domain): the kernel takes their addresses.
    Freeing is collective in NVSHMEM, closing a layer is not: windows live as long as the process.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        self._rendezvous = rendezvous
        self._device = device

    def allocate(self, nbytes: int) -> Window:
        """Collective: a zero-filled window of ``nbytes`` on every rank.

        Raises:
            SymmetricMemoryError: on every rank, if any rank could not allocate or map.
        """
        result: dict[str, int] | Exception = {}
        local = torch.empty(0, dtype=torch.uint8)
        bases: tuple[int, ...] = ()
        keep: list[object] = []
        try:
            import nvshmem.core as nvshmem
            from cuda.core.experimental import Device

            self._initialise(nvshmem, Device(self._device.index))
            local = nvshmem.tensor((nbytes,), dtype=torch.uint8)
            peers = [
                local if r == self._rendezvous.rank else nvshmem.get_peer_tensor(local, r)
                for r in range(self._rendezvous.num_ranks)
            ]
            bases = tuple(p.data_ptr() for p in peers)
            keep = [peers]
            local.zero_()
            torch.cuda.synchronize(self._device)
            need_aligned(bases)
        except Exception as e:  # noqa: BLE001 - NVSHMEM has its own exception types; all are reported
            result = e
        agree(self._rendezvous, f"an NVSHMEM window of {nbytes} bytes", result)
        return Window(local, bases, keep=keep)

    def _initialise(self, nvshmem, device) -> None:  # type: ignore[no-untyped-def]
        if nvshmem.init_status() >= 2:  # initialised in this process before
            return
        device.set_current()
        first = self._rendezvous.rank == 0
        ids = [nvshmem.get_unique_id(empty=not first)]
        dist.broadcast_object_list(ids, src=0)
        nvshmem.init(
            device=device,
            uid=ids[0],
            rank=self._rendezvous.rank,
            nranks=self._rendezvous.num_ranks,
            initializer_method="uid",
        )
