"""How the ranks that torchrun started find each other."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous as find_store

from megamoe.symmetric.base import GroupRendezvous, Rendezvous

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["find_ranks"]


class _StoreRendezvous:
    """Exchange over torchrun's store, in JSON; nothing is pickled."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store = store
        self.rank = rank
        self.num_ranks = num_ranks
        self._turn = 0

    def all_gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's value, by rank."""
        self._turn += 1
        self._store.set(f"{self._turn}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._turn}/{r}")) for r in range(self.num_ranks)]


def find_ranks(rank: int, num_ranks: int, groups: str | None) -> Rendezvous:
    """How the ranks that torchrun started find each other.

    Args:
        rank: this rank.
        num_ranks: R.
        groups: backends of a process group, which torch's symmetric memory wants; None takes
            torchrun's store alone, which is enough for CPU ranks.
    """
    store, _, _ = next(find_store("env://", rank, num_ranks))
    # The store outlives a group: ranks of a later one must not find the addresses of a former.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"megamoe/{attempt}", store)
    if groups is None:
        return _StoreRendezvous(store, rank, num_ranks)
    dist.init_process_group(groups, store=store, rank=rank, world_size=num_ranks)
    return GroupRendezvous()
