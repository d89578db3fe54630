"""FP8 quantisation exactly as the layer's contract states it, and an exact FP32 fma.

Shape legend: T tokens, K columns, N rows of a weight; ``e4m3`` is ``torch.float8_e4m3fn``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from megamoe.errors import InputError
from megamoe.spec import GROUP

__all__ = [
    "E4M3_MAX",
    "TINY_AMAX",
    "dequantize_1x128",
    "dequantize_128x128",
    "fma32",
    "quantize_1x128",
    "quantize_128x128",
]

E4M3_MAX: Final = 448.0
TINY_AMAX: Final = 1e-30
"""Floor of a group's amax: keeps 1/scale finite, so that an all-zero group stays zero."""


def _need_groups(x: Tensor, what: str, dims: tuple[int, ...]) -> None:
    if x.dim() < len(dims) or any(x.shape[d] % GROUP for d in dims):
        raise InputError(
            f"{what} of shape {tuple(x.shape)}: dimension(s) {dims} must be multiples of {GROUP}"
        )


def _scale(amax: Tensor) -> Tensor:
    """FP32 scale of a group whose largest finite-or-infinite magnitude is ``amax``."""
    # A tensor divisor, because torch may turn division by a Python scalar into a multiplication.
    return amax.clamp_min(TINY_AMAX) / torch.full_like(amax, E4M3_MAX)


def _encode(v: Tensor, inv: Tensor) -> Tensor:
    """e4m3 of ``v * inv``: nearest, ties to even, saturating; NaN stays NaN."""
    # torch's cast alone turns values above 464 into NaN; clamp keeps NaN and saturates the rest.
    return (v * inv).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _amax(v: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Largest magnitude, NaN left out."""
    found = torch.maximum(v.amax(dims), -v.amin(dims))
    if not bool(found.isnan().any()):  # NaN is rare, and looking for it costs more than the rest
        return found
    clean = torch.where(v.isnan(), torch.zeros_like(v), v)
    return torch.maximum(clean.amax(dims), -clean.amin(dims))


def quantize_1x128(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises each group of 128 consecutive columns of each row.

    ``amax = max |v|`` ignoring NaN, ``scale = max(amax, 1e-30) / 448``, ``inv = 1 / scale``,
    ``q = e4m3(v * inv)``, all in FP32. An infinite value makes its group's scale infinite and
    itself NaN, so the row's result is NaN, never a wrong number.

    Args:
        x: [..., K], BF16 or FP32, K a multiple of 128.

    Returns:
        e4m3 [..., K] and FP32 scales [..., K/128].

    Raises:
        InputError: K is not a multiple of 128.
    """
    _need_groups(x, "activations", (-1,))
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    scale = _scale(_amax(groups, (-1,)))
    return _encode(groups, scale.reciprocal().unsqueeze(-1)).flatten(-2), scale


def dequantize_1x128(q: Tensor, scale: Tensor) -> Tensor:
    """FP32 values of ``quantize_1x128``'s pair: e4m3 [..., K] and FP32 [..., K/128]."""
    groups = q.float().reshape(*scale.shape, GROUP)
    return (groups * scale.unsqueeze(-1)).flatten(-2)


def _blocks(w: Tensor) -> Tensor:
    """[..., N, K] as FP32 [..., N/128, 128, K/128, 128]."""
    n, k = w.shape[-2:]
    return w.float().reshape(*w.shape[:-2], n // GROUP, GROUP, k // GROUP, GROUP)


def quantize_128x128(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises each 128x128 block of a weight by the rule of ``quantize_1x128``.

    Args:
        w: [..., N, K], BF16 or FP32, N and K multiples of 128.

    Returns:
        e4m3 [..., N, K] and FP32 scales [..., N/128, K/128], the published layout of
        ``weight`` and ``weight_scale_inv``.

    Raises:
        InputError: N or K is not a multiple of 128.
    """
    _need_groups(w, "weight", (-2, -1))
    blocks = _blocks(w)
    scale = _scale(_amax(blocks, (-3, -1)))
    q = _encode(blocks, scale.reciprocal()[..., :, None, :, None])
    return q.flatten(-2).flatten(-3, -2), scale


def dequantize_128x128(q: Tensor, scale: Tensor) -> Tensor:
    """FP32 values of ``quantize_128x128``'s pair: e4m3 [..., N, K], FP32 [..., N/128, K/128]."""
    return (_blocks(q) * scale[..., :, None, :, None]).flatten(-2).flatten(-3, -2)


def fma32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of FP32 tensors, rounded once to FP32, as one fma instruction does.

    The product is exact in FP64. The FP64 sum is rounded to odd (its last bit says that something
    was lost), so that rounding it again to FP32 gives what a single rounding would have given
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product  # TwoSum: what total holds of the addend
    lost = (product - (total - virtual)) + (addend - virtual)
    inexact = lost.isfinite() & (lost != 0) & total.isfinite()
    bits = total.view(torch.int64)
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    odd = torch.where(inexact & (bits & 1 == 0), bits + step, bits)
    return odd.view(torch.float64).float()
