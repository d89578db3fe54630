"""Where weights lie, so that SMs read them from the half of L2 that they are near to.

Memory belongs to the halves of L2 by chunks of 4 KiB: in every aligned window of 16 chunks
``CHUNKS_A`` to one and ``CHUNKS_B`` to the other, but to which is another thing from window to
window (H200s: so in all of 135,168 windows). A window has room for a block of two tiles: of an even
column, worked on by SMs of the first stream of tickets, and of the odd one beside it, of the
second's. Each gets the chunks that its SMs are near to. So one bit of each window is measured, from
all its chunks, by the time that an atomic takes. It is about time only: whatever the bits are, the
kernel is told them, and finds the weights.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from megamoe.backends.cuda_build import MOST_SMS
from megamoe.backends.cuda_driver import Kernel, chunk_map, tensor_map
from megamoe.backends.cuda_halves import WHOLE_SM, compile_probe, load_probe
from megamoe.backends.cuda_pack import CHUNKS_B, TILE_N, WINDOW_BYTES

__all__ = ["ChunksParams", "find_swapped", "placed_words", "swapped_windows", "weight_maps"]

_REPEATS: Final = 5
_CHUNKS: Final = 16
_WORD_BLOCKS: Final = 64
"""Blocks of a word of ``MoEParams.placed`` (kWordBlocks)."""
_LEAST_AGREEMENT: Final = 0.97
"""Chunks that are where the pattern has them; all were where it was measured, 0.6 by chance."""


class ChunksParams(ctypes.Structure):
    """``ChunksParams`` of csrc/moe/halves.cu."""

    _fields_ = (
        ("words", ctypes.c_uint64),
        ("cycles", ctypes.c_uint64),
        ("half", ctypes.c_uint64),
        ("near_half", ctypes.c_uint32 * (MOST_SMS // 32)),
        ("num_windows", ctypes.c_uint32),
        ("repeats", ctypes.c_uint32),
    )


def find_swapped(tiles: list[Tensor], near_half: list[int]) -> list[Tensor] | None:
    """How to place tiles in their memory; None if its chunks do not follow the pattern.

    Measures on the current stream and waits. What the memory holds stays. Takes
    about a hundredth of its size meanwhile; None if the GPU has not so much left.

    Args:
        tiles: uint8 ``[experts, tiles, K blocks, 256, 128]``, even numbers of tiles, aligned to
            windows.
        near_half: SMs of the second stream (``cuda_halves.near_half``).

    Returns:
        For each of ``tiles``, bool ``[experts, tiles / 2, K blocks]`` (``place_tiles``).

    Raises:
        MegaMoeError: the driver refuses the probe.
    """
    assert compile_probe().constant("megamoe_chunks_param_bytes") == ctypes.sizeof(ChunksParams)
    probe = load_probe(tiles[0].device)
    kernel = Kernel(probe, "megamoe_chunks", threads=32, shared_bytes=WHOLE_SM)
    found = []
    for of_linear in tiles:
        experts, columns, blocks = of_linear.shape[:3]
        try:
            swapped = swapped_windows(*_measured(kernel, of_linear, near_half))
        except torch.OutOfMemoryError:
            return None
        if swapped is None:
            return None
        found.append(swapped.view(experts, columns // 2, blocks))
    return found


def swapped_windows(cycles: Tensor, half: Tensor) -> Tensor | None:
    """In which windows ``CHUNKS_A`` belongs to the half of the second stream's SMs.

    A tile of the first stream then is in ``CHUNKS_B``.

    Args:
        cycles: ``[windows, 16]``, the fewest that an atomic took to each chunk.
        half: ``[windows]``, 0 or 1: which half the SM that measured is near to.

    Returns:
        bool ``[windows]``; None if the chunks do not follow the pattern.
    """
    # Half of a window's chunks are near. A threshold of all windows would have to know clocks.
    ordered = cycles.sort(dim=1).values
    far = 2 * cycles > ordered[:, 7:8] + ordered[:, 8:9]
    in_b = torch.zeros(_CHUNKS, dtype=torch.bool, device=cycles.device)
    in_b[list(CHUNKS_B)] = True
    says = far ^ (half[:, None] != 0) ^ in_b
    swapped = says.sum(dim=1) > _CHUNKS // 2
    agreement = float((says == swapped[:, None]).sum()) / says.numel()
    return swapped if agreement >= _LEAST_AGREEMENT else None


def placed_words(swapped: Tensor) -> Tensor:
    """What the kernel is told, a bit for each block of a tile: 1 if it is in ``CHUNKS_B``.

    Args:
        swapped: bool ``[experts, tiles / 2, K blocks]``.

    Returns:
        int64 ``[experts, tiles, words]``: bit ``kb % 64`` of word ``kb // 64``. There is a bit for
            the block behind the last one: the kernel looks ahead.
    """
    experts, pairs, blocks = swapped.shape
    in_b = torch.stack((swapped, ~swapped), dim=2).view(experts, 2 * pairs, blocks)
    words = blocks // _WORD_BLOCKS + 1
    padded = in_b.new_zeros(experts, 2 * pairs, words * _WORD_BLOCKS)
    padded[:, :, :blocks] = in_b
    place = torch.arange(_WORD_BLOCKS, device=swapped.device)
    bits = padded.view(experts, 2 * pairs, words, _WORD_BLOCKS).long() << place
    return bits.sum(dim=-1)


def weight_maps(tiles: Tensor, *, placed: bool) -> bytes:
    """The two tensor maps of tiles (csrc/moe/weights.cuh); of plain ones the second is zeros."""
    address, nbytes = tiles.data_ptr(), tiles.nbytes
    if not placed:
        rows, box = nbytes // 128, (128, TILE_N)
        return tensor_map(address, columns=128, rows=rows, box=box, element_bytes=1) + bytes(128)
    assert address % WINDOW_BYTES == nbytes % WINDOW_BYTES == 0, (address, nbytes)
    return b"".join(chunk_map(address, nbytes=nbytes, distance=d) for d in (3, 1))


def _measured(kernel: Kernel, tiles: Tensor, near_half: list[int]) -> tuple[Tensor, Tensor]:
    device, num_windows = tiles.device, tiles.nbytes // WINDOW_BYTES
    cycles = torch.zeros(num_windows, _CHUNKS, dtype=torch.int32, device=device)
    half = torch.zeros(num_windows, dtype=torch.int32, device=device)
    params = ChunksParams(
        words=tiles.data_ptr(),
        cycles=cycles.data_ptr(),
        half=half.data_ptr(),
        num_windows=num_windows,
        repeats=_REPEATS,
    )
    params.near_half[:] = near_half
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    kernel.launch(num_sms, params, torch.cuda.current_stream(device).cuda_stream)
    return cycles, half
