"""Windows of GPU ranks through ``torch.distributed._symmetric_memory``: the default provider."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from megamoe.errors import SymmetricMemoryError
from megamoe.symmetric.base import Rendezvous, Window, agree, need_aligned

__all__ = ["TorchSymmetricMemory"]

_GROUPS: dict[str, weakref.ref[dist.ProcessGroup]] = {}
"""The group that torch's symmetric memory met first under a name."""


def _under_its_own_name(rendezvous: Rendezvous, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Collective: the group, or one of the same ranks if its name means another group to a rank.

    Torch keeps ranks and store of a group under the group's name as long as the process lives, and
    names begin again after ``destroy_process_group``: survivors of a lost rank would ask the old
    group's store, and wait for the lost rank.
    """
    while True:
        known = _GROUPS.setdefault(group.group_name, weakref.ref(group))
        stale = {"stale": known() is not group}
        if not any(theirs["stale"] for theirs in rendezvous.all_gather(stale)):
            return group
        ranks = dist.get_process_group_ranks(group)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class TorchSymmetricMemory:
    """Symmetric memory of a ``torch.distributed`` group, one process per rank.

    Multicast objects are neither created nor used. Several processes on one GPU need
    ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1``.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        self._rendezvous = rendezvous
        self._device = device

    def allocate(self, nbytes: int) -> Window:
        """Collective: a zero-filled window of ``nbytes`` on every rank.

        Raises:
            SymmetricMemoryError: on every rank, if any rank could not allocate or map.
        """
        group = getattr(self._rendezvous, "group", None) or dist.group.WORLD
        if group is None:
            raise SymmetricMemoryError(
                "torch symmetric memory needs torch.distributed.init_process_group first"
            )
        group = _under_its_own_name(self._rendezvous, group)
        result: dict[str, int] | Exception = {}
        try:
            from torch._C._distributed_c10d import _SymmetricMemory
            from torch.distributed import _symmetric_memory as symmetric

            # Not symmetric.empty: it takes blocks from a pool, so that a window could get the
            # memory of a closed one, which a lost rank may still map and write.
            local = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self._device)
            handle = symmetric.rendezvous(local, group)
            bases = tuple(int(p) for p in handle.buffer_ptrs)
            local.zero_()
            torch.cuda.synchronize(self._device)
            need_aligned(bases)
        except (ImportError, RuntimeError, SymmetricMemoryError) as e:
            result = e
        agree(self._rendezvous, f"a symmetric window of {nbytes} bytes", result)
        return Window(local, bases, keep=[handle, local])
