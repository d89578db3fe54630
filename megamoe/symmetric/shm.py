"""Windows of CPU ranks: POSIX shared memory between the processes of one machine.

The memory is an unnamed file in /dev/shm. It never has a name, so nothing is left behind however a
process ends; peers open it through the owner's entry in /proc.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil

import torch

from megamoe.errors import SymmetricMemoryError
from megamoe.symmetric.base import Rendezvous, Window, agree

__all__ = ["SharedMemory"]

_FOLDER = "/dev/shm"


class SharedMemory:
    """Symmetric memory over ``/dev/shm``."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def allocate(self, nbytes: int) -> Window:
        """Collective: a zero-filled window of ``nbytes`` on every rank.

        Raises:
            SymmetricMemoryError: on every rank; says bytes wanted and bytes free.
        """
        fd = -1
        try:
            offer: dict[str, int] | Exception
            try:
                fd = _create(nbytes)
                offer = {"pid": os.getpid(), "fd": fd}
            except (OSError, SymmetricMemoryError) as e:
                offer = e
            offers = agree(self._rendezvous, "allocating shared memory", offer)
            maps: list[mmap.mmap] = []
            mapped: dict[str, int] | Exception = {}
            try:
                for rank, peer in enumerate(offers):
                    own = rank == self._rendezvous.rank
                    maps.append(
                        _map(fd if own else _open_peer(peer["pid"], peer["fd"]), nbytes, own)
                    )
            except OSError as e:
                mapped = e
            # Also keeps every owner's descriptor open until all peers have opened it.
            agree(self._rendezvous, "mapping a peer's shared memory", mapped)
        finally:
            if fd >= 0:
                os.close(fd)
        views = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
        bases = tuple(v.data_ptr() for v in views)
        return Window(views[self._rendezvous.rank], bases, keep=[views, maps])


def _create(nbytes: int) -> int:
    # Asked for first: a reservation that fails halfway would have filled the memory of the machine.
    free = shutil.disk_usage(_FOLDER).free
    if nbytes <= free:
        fd = os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as e:
            os.close(fd)
            if e.errno != errno.ENOSPC:
                raise
        else:
            return fd
    raise SymmetricMemoryError(
        f"a window of {nbytes} bytes does not fit into {_FOLDER} ({free} bytes free): "
        "lower max_tokens or the ring sizes, or mount a larger one "
        f"(mount -o remount,size=… {_FOLDER})"
    )


def _open_peer(pid: int, fd: int) -> int:
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _map(fd: int, nbytes: int, own: bool) -> mmap.mmap:
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        if not own:
            os.close(fd)
