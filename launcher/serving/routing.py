"""Routes of a token that depend on no neighbour, several tokens at a time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megamoe.router import Router

__all__ = ["SteadyRouter"]

_log = logging.getLogger("megamoe.rank")
CHUNK_CPU: Final = 8
CHUNK_CUDA: Final = 64


class SteadyRouter:
    """The layer's router over chunks of one size, the last padded with zeros.

    A matrix product over another number of rows may take other code and round differently; over
    the same number, in the same memory, the same code runs. Whether a row's place in the chunk
    matters is tried out here, on random tokens in every place; where it does, chunks have one row.

    Args:
        router: the layer's.
        device: where hidden states are.
        chunk: rows of a chunk; 0 takes what suits the device.
    """

    def __init__(self, router: Router, device: str, chunk: int = 0) -> None:
        weight = router.weight.float() if router.logits_fp32 else router.weight
        bias = None if router.bias is None else router.bias.to(device)
        self.router = replace(router, weight=weight.to(device), bias=bias)
        self.chunk = chunk or (CHUNK_CPU if device == "cpu" else CHUNK_CUDA)
        self._rows = self._buffer(device)
        if not self._place_does_not_matter():
            _log.warning("the router takes one token at a time: its rounding depends on the place")
            self.chunk = 1
            self._rows = self._buffer(device)

    def _buffer(self, device: str) -> Tensor:
        columns = self.router.weight.shape[1]
        return torch.zeros((self.chunk, columns), dtype=torch.bfloat16, device=device)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routes BF16 [n, H]: ids int32 [n, K] and weights FP32 [n, K]."""
        ids = torch.empty((len(x), self.router.topk), dtype=torch.int32, device=x.device)
        weights = torch.empty((len(x), self.router.topk), dtype=torch.float32, device=x.device)
        for first in range(0, len(x), self.chunk):
            rows = x[first : first + self.chunk]
            self._rows[: len(rows)] = rows
            self._rows[len(rows) :] = 0
            some_ids, some_weights = self.router(self._rows)
            ids[first : first + len(rows)] = some_ids[: len(rows)]
            weights[first : first + len(rows)] = some_weights[: len(rows)]
        return ids, weights

    def _place_does_not_matter(self) -> bool:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randn(self._rows.shape, generator=generator).to(self._rows)
        ids, weights = self(tokens)
        for shift in range(1, self.chunk):
            shifted_ids, shifted_weights = self(tokens.roll(shift, 0))
            if not torch.equal(shifted_ids, ids.roll(shift, 0)):
                return False
            if not torch.equal(shifted_weights, weights.roll(shift, 0)):
                return False
        return True
