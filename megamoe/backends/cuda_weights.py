"""A rank's experts on its GPU, in the layout of ``cuda_pack``."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

from megamoe.backends.cuda_pack import (
    TILE_N,
    WINDOW_BYTES,
    num_tiles,
    pack_scale,
    pack_weight,
    place_tiles,
    rows_linear1,
    rows_linear2,
    scale_floats,
)
from megamoe.backends.cuda_placing import placed_words
from megamoe.errors import MegaMoeError
from megamoe.spec import GROUP, MoESpec
from megamoe.symmetric.base import Rendezvous, agree
from megamoe.weights import ExpertWeights, check_expert

__all__ = ["DeviceWeights", "allocate_weights"]


class DeviceWeights:
    """Room for a rank's experts, taken when it is made.

    Attributes:
        tiles: of W1 and W2, uint8 ``[experts, tiles, K blocks, 256, 128]``, aligned to 64 KiB.
        words: of W1 and W2, what the kernel is told about placed tiles (``placed_words``); None for
            plain ones.
        scales: of W1 and W2, FP32 ``[experts, tiles, floats of a tile]``; zero until loaded.
        missing: experts that are not loaded yet.
    """

    def __init__(self, spec: MoESpec, num_ranks: int, device: torch.device) -> None:
        """Allocates.

        Raises:
            torch.OutOfMemoryError: the GPU has not so much left.
        """
        self._spec, self._num_ranks, self._device = spec, num_ranks, device
        local = spec.experts_per_rank(num_ranks) + spec.num_shared
        element = 1 if spec.weight_dtype == "fp8" else 2
        sizes = ((spec.inter // GROUP, spec.hidden), (num_tiles(spec.hidden), spec.inter))
        blocks = [(local, tiles, k * element // 128, TILE_N, 128) for tiles, k in sizes]
        floats = [(local, tiles, scale_floats(k)) for tiles, k in sizes]
        self.tiles = [_aligned(size, device) for size in blocks]
        self.words: list[Tensor] | None = None
        self._swapped: list[Tensor] | None = None
        self.scales = [torch.zeros(size, device=device) for size in floats]
        self._rows = [rows_linear1(spec.inter).to(device), rows_linear2(spec.hidden).to(device)]
        self.missing = set(range(local))

    def place(self, swapped: list[Tensor] | None) -> None:
        """From now on experts are placed, as this memory wants it; before any is loaded.

        Args:
            swapped: of W1 and W2 (``cuda_placing.find_swapped``); None for plain tiles.
        """
        self.words = None if swapped is None else [placed_words(s) for s in swapped]
        self._swapped = swapped

    def take(self, expert: ExpertWeights) -> None:
        """Packs an expert; its tensors may be freed afterwards.

        Raises:
            InputError: it is none of this layer.
        """
        check_expert(self._spec, expert, self._num_ranks)
        pairs = ((expert.w1, expert.w1_scale), (expert.w2, expert.w2_scale))
        for i, (weight, scale) in enumerate(pairs):
            room = self.tiles[i][expert.index]
            plain = room if self._swapped is None else torch.empty_like(room)
            pack_weight(weight.to(self._device), self._rows[i], plain)
            if self._swapped is not None:
                place_tiles(plain, self._swapped[i][expert.index], room)
            if scale is not None:
                on_device = scale.to(self._device)
                pack_scale(on_device, self.scales[i][expert.index], linear1=i == 0)
        self.missing.discard(expert.index)

    def free(self) -> None:
        """Gives the memory back."""
        self.tiles, self.scales = [], []
        self.words = self._swapped = None


def _aligned(size: tuple[int, ...], device: torch.device) -> Tensor:
    """Bytes that begin where a window does."""
    nbytes = math.prod(size)
    room = torch.empty(nbytes + WINDOW_BYTES, dtype=torch.uint8, device=device)
    first = -room.data_ptr() % WINDOW_BYTES
    return room[first : first + nbytes].view(size)


def allocate_weights(
    spec: MoESpec, num_ranks: int, device: torch.device, rendezvous: Rendezvous
) -> DeviceWeights:
    """Collective: room for every rank's experts; a rank without it says so to all.

    Raises:
        SymmetricMemoryError: a rank lacks the memory.
    """
    made: DeviceWeights | None = None
    result: dict[str, str] | Exception = {}
    with suppress(torch.OutOfMemoryError):
        made = DeviceWeights(spec, num_ranks, device)
    if made is None:
        experts = spec.experts_per_rank(num_ranks) + spec.num_shared
        per_expert = 3 * spec.hidden * spec.inter * (1 if spec.weight_dtype == "fp8" else 2)
        torch.cuda.empty_cache()  # what was taken before the last piece did not fit
        free, _ = torch.cuda.mem_get_info(device)
        result = MegaMoeError(
            f"{experts} experts take {experts * per_expert / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB of the GPU are free: take more ranks, or free its memory"
        )
    agree(rendezvous, "allocating the experts' weights", result)
    assert made is not None
    return made
