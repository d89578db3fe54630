"""Shared memory in which the tensors of requests lie, and its allocator.

The HTTP process owns it, ranks of the same machine map it. It is an unnamed file in /dev/shm,
opened by peers through the owner's entry in /proc: however a process ends, nothing is left behind.
Each group of ranks gets an arena of its own, so that a rank that was stopped and comes back late
writes into memory that nobody reads any more.
"""

from __future__ import annotations

import mmap
import os
import shutil
from typing import Final

import msgspec

from service.engine import AttentionInfo, AttentionRequest, LayerInfo, MoERequest

__all__ = [
    "ATTENTION_OUTPUTS",
    "Arena",
    "ArenaError",
    "ArenaRef",
    "Layout",
    "arena_bytes",
    "attention_parts",
    "layout_of",
    "moved",
]

FOLDER: Final = "/dev/shm"
ALIGN: Final = 64
ATTENTION_OUTPUTS: Final = (
    "residual",
    "queries",
    "absorbed",
    "index_weights",
    "logits",
    "latent_rows",
    "index_rows",
)


class ArenaError(RuntimeError):
    """The arena cannot be made or mapped; the message says how many bytes it needs."""


class ArenaRef(msgspec.Struct, frozen=True, array_like=True):
    """How another process finds an arena."""

    pid: int
    fd: int
    nbytes: int


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Byte offsets of one request's tensors in the arena; -1 for what it does not have.

    Attributes:
        begin: of the whole block.
        nbytes: of the whole block.
        hidden: [n, H] BF16 or e4m3.
        scales: [n, H/128] float32.
        topk_ids: [n, K] int32; written by the ranks when the router chooses.
        topk_weights: [n, K] float32; likewise.
        output: [n, H] BF16, written by the ranks.
    """

    begin: int
    nbytes: int
    hidden: int
    scales: int
    topk_ids: int
    topk_weights: int
    output: int


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def layout_of(request: MoERequest, layer: LayerInfo) -> Layout:
    """The layout of a request in a block that begins at 0."""
    n = request.num_tokens
    at = 0

    def place(nbytes: int) -> int:
        nonlocal at
        begin, at = at, at + _up(nbytes)
        return begin

    hidden = place(request.hidden.nbytes)
    scales = -1 if request.scales is None else place(request.scales.nbytes)
    ids = place(n * layer.topk * 4)
    weights = place(n * layer.topk * 4)
    output = place(n * layer.hidden * 2)
    return Layout(0, at, hidden, scales, ids, weights, output)


def attention_parts(
    request: AttentionRequest, info: AttentionInfo
) -> tuple[dict[str, tuple[int, int]], int]:
    """(offset, bytes) of an attention-pre request's tensors by name, and the bytes of all.

    ``x``, ``residual_in``, perhaps ``positions`` and ``upload``, and ``ATTENTION_OUTPUTS``, the
    rows of the caches among them only if asked for.
    """
    n = request.num_tokens
    sizes = {
        "x": request.hidden.nbytes,
        "residual_in": request.residual.nbytes,
        "residual": n * info.hidden * 2,
        "queries": n * info.num_heads * info.head_dim * 2,
        "absorbed": n * info.num_heads * info.kv_lora * 2,
        "index_weights": n * info.index_heads * 4,
        "logits": n * request.num_keys * 4,
    }
    if request.positions is not None:
        sizes["positions"] = request.positions.nbytes
    if request.upload is not None:
        sizes["upload"] = request.upload[1].nbytes
    if request.rows:
        sizes |= {"latent_rows": n * info.latent_row_bytes, "index_rows": n * info.index_row_bytes}
    parts: dict[str, tuple[int, int]] = {}
    at = 0
    for name, nbytes in sizes.items():
        parts[name] = (at, nbytes)
        at += _up(nbytes)
    return parts, at


def moved(layout: Layout, begin: int) -> Layout:
    """The same layout in a block that begins elsewhere."""

    def move(offset: int) -> int:
        return offset if offset < 0 else offset + begin

    return Layout(
        begin,
        layout.nbytes,
        move(layout.hidden),
        move(layout.scales),
        move(layout.topk_ids),
        move(layout.topk_weights),
        move(layout.output),
    )


def arena_bytes(layer: LayerInfo, queue_tokens: int, queue_requests: int) -> int:
    """Bytes for the fullest queue, and a quarter more against fragmentation."""
    per_token = 2 * layer.hidden * 2 + layer.num_groups * 4 + layer.topk * 8
    need = queue_tokens * per_token + queue_requests * 5 * ALIGN
    if (info := layer.attention) is not None:
        rows = 2 * (3 * info.hidden + info.num_heads * (info.head_dim + info.kv_lora))
        rows += 4 * (info.index_heads + info.max_keys) + info.latent_row_bytes
        # Two of the largest requests, or many usual ones.
        need += 2 * (info.max_tokens * (rows + 256) + info.max_keys * info.index_row_bytes)
    return -(-(need + need // 4) // mmap.PAGESIZE) * mmap.PAGESIZE


class Arena:
    """A mapped arena. The owner allocates blocks in it; a peer only looks."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self._map)
        self._free: list[tuple[int, int]] = [(0, nbytes)]

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """A new arena, its memory reserved.

        Raises:
            ArenaError: /dev/shm lacks the bytes.
        """
        fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            free = shutil.disk_usage(FOLDER).free
            raise ArenaError(
                f"the requests' tensors need {nbytes} bytes of {FOLDER}, {free} are free: "
                f"lower --queue-tokens, or mount a larger {FOLDER}"
            ) from error

    @classmethod
    def attach(cls, ref: ArenaRef) -> Arena:
        """Maps another process's arena.

        Raises:
            ArenaError: the owner is gone, belongs to another user, or lives on another machine.
        """
        try:
            fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDWR | os.O_CLOEXEC)
            size = os.fstat(fd).st_size
            if size != ref.nbytes:
                os.close(fd)
                raise ArenaError(f"the arena of process {ref.pid} has {size}, not {ref.nbytes} B")
            return cls(fd, ref.nbytes)
        except OSError as error:
            raise ArenaError(
                f"cannot map the arena of process {ref.pid}: {error.strerror}. The HTTP process "
                "and all ranks must run on one machine, as one user"
            ) from error

    @property
    def ref(self) -> ArenaRef:
        """What a peer needs for ``attach``."""
        return ArenaRef(os.getpid(), self._fd, self.nbytes)

    @property
    def free_bytes(self) -> int:
        """Bytes in no block."""
        return sum(length for _, length in self._free)

    def allocate(self, nbytes: int) -> int | None:
        """Begin of a free block (first fit), or None when none is large enough."""
        nbytes = _up(nbytes)
        for index, (begin, length) in enumerate(self._free):
            if length >= nbytes:
                if length == nbytes:
                    del self._free[index]
                else:
                    self._free[index] = (begin + nbytes, length - nbytes)
                return begin
        return None

    def release(self, begin: int, nbytes: int) -> None:
        """Returns a block, and joins it with free neighbours."""
        nbytes = _up(nbytes)
        at = next((i for i, (b, _) in enumerate(self._free) if b > begin), len(self._free))
        end = begin + nbytes
        if at < len(self._free) and self._free[at][0] == end:
            end += self._free[at][1]
            del self._free[at]
        if at and sum(self._free[at - 1]) == begin:
            begin = self._free[at - 1][0]
            del self._free[at - 1]
            at -= 1
        self._free.insert(at, (begin, end - begin))

    def close(self) -> None:
        """Unmaps, unless somebody still holds a view, whose end will then unmap."""
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            pass
        finally:
            os.close(self._fd)
