"""Weights in the kernel's layout: tiles of 256 rows, blocks of 128 bytes of K, rows permuted.

Plain, a tile is contiguous, ``[K blocks][256 rows][128 bytes]``, so that one bulk copy of 32 KB
moves a block of it. Placed, blocks of two tiles share 64 KB: ``place_tiles``. The permutations give
a thread neighbouring output columns (``csrc/moe/linear1.cuh``, ``linear2.cuh``). Shape legend:
H hidden, I intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.spec import GROUP

__all__ = [
    "CHUNKS_A",
    "CHUNKS_B",
    "TILE_N",
    "WINDOW_BYTES",
    "num_tiles",
    "pack_scale",
    "pack_weight",
    "place_tiles",
    "rows_linear1",
    "rows_linear2",
    "scale_floats",
]

TILE_N = 256
WINDOW_BYTES = 65536
CHUNKS_A = (0, 3, 4, 7, 9, 10, 13, 14)
CHUNKS_B = (1, 2, 5, 6, 8, 11, 12, 15)
"""Chunks of 4 KiB of an aligned window that belong to one half of L2, and to the other (H200)."""
_BLOCK_BYTES = 128


def rows_linear1(inter: int) -> Tensor:
    """Stored row -> row of W1 ``[2I, H]``: int64 ``[2I]``.

    Row ``16 P + 8 u + i`` of a tile (u: 0 gate, 1 up) is column
    ``16 (P // 2) + 4 (i // 2) + 2 (P % 2) + i % 2`` of the tile's 128 columns.
    """
    row = torch.arange(TILE_N)
    pair, up, i = row // 16, row // 8 % 2, row % 8
    column = 16 * (pair // 2) + 4 * (i // 2) + 2 * (pair % 2) + i % 2
    tile = torch.arange(inter // GROUP)
    return (up * inter + column + tile[:, None] * GROUP).flatten()


def rows_linear2(hidden: int) -> Tensor:
    """Stored row -> row of W2 ``[H, I]``: int64 ``[tiles * 256]``, -1 past the last column.

    Row ``32 s + 8 i + k`` of a tile is its column ``32 s + 8 (k // 2) + 2 i + k % 2``.
    """
    row = torch.arange(TILE_N)
    s, i, k = row // 32, row // 8 % 4, row % 8
    column = 32 * s + 8 * (k // 2) + 2 * i + k % 2
    rows = (column + torch.arange(num_tiles(hidden))[:, None] * TILE_N).flatten()
    return torch.where(rows < hidden, rows, -1)


def num_tiles(rows: int) -> int:
    """Tiles of 256 rows that cover ``rows``."""
    return -(-rows // TILE_N)


def pack_weight(weight: Tensor, rows: Tensor, out: Tensor) -> None:
    """Writes a weight ``[N, K]`` in stored order to ``out``, uint8 ``[tiles, K blocks, 256, 128]``.

    Args:
        weight: e4m3 or BF16.
        rows: int64, stored row -> row of ``weight``, -1 for zeros; on the weight's device.
        out: where it goes.
    """
    raw = weight.contiguous().view(torch.uint8)
    stored = raw[rows.clamp_min(0)]
    if bool((rows < 0).any()):
        stored[rows < 0] = 0
    tiles, blocks = out.shape[:2]
    out.copy_(stored.view(tiles, TILE_N, blocks, _BLOCK_BYTES).transpose(1, 2))


def place_tiles(tiles: Tensor, swapped: Tensor, out: Tensor) -> None:
    """Writes plain tiles so that each block lies in chunks of one half of L2.

    Window ``(j, kb)`` of ``out``, its 64 KiB number ``j * K blocks + kb``, holds block kb of the
    tiles 2j and 2j + 1: the first in ``CHUNKS_A`` and the second in ``CHUNKS_B``, or the other way
    round. The rows of a tile's block fill its chunks in their order, 32 rows each.

    Args:
        tiles: uint8 ``[tiles, K blocks, 256, 128]``, an even number of tiles.
        swapped: bool ``[tiles / 2, K blocks]``: the first tile of the pair is in ``CHUNKS_B``.
        out: as ``tiles``, contiguous; not the same memory.
    """
    pairs, blocks = swapped.shape
    chunks = tiles.contiguous().view(torch.int64).view(pairs, 2, blocks, 8, 512)
    first, second = chunks[:, 0], chunks[:, 1]
    windows = out.view(torch.int64).view(pairs, blocks, 16, 512)
    swap = swapped[:, :, None, None]
    windows[:, :, list(CHUNKS_A)] = torch.where(swap, second, first)
    windows[:, :, list(CHUNKS_B)] = torch.where(swap, first, second)


def scale_floats(k: int) -> int:
    """FP32 words of one tile's scales: two per 128 of K, a multiple of 16 bytes."""
    return -(-(k // GROUP) // 2) * 2 * 2


def pack_scale(scale: Tensor, out: Tensor, *, linear1: bool) -> None:
    """Writes block scales ``[N/128, K/128]`` to ``out``, FP32 ``[tiles, scale_floats(K)]``.

    Each block of K has two: of gate and up rows (Linear 1), of the tile's halves (Linear 2).
    """
    tiles = out.shape[0]
    if linear1:
        pairs = torch.stack((scale[:tiles], scale[tiles:]), dim=-1)
    else:
        padded = scale.new_zeros(2 * tiles, scale.shape[1])
        padded[: scale.shape[0]] = scale
        pairs = padded.view(tiles, 2, -1).transpose(1, 2)
    out.zero_()
    out.view(tiles, -1, 2)[:, : scale.shape[1]].copy_(pairs)
