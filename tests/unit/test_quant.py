"""Quantisation against a table of e4m3 values and exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from megamoe.errors import InputError
from megamoe.reference.quant import (
    dequantize_1x128,
    dequantize_128x128,
    fma32,
    quantize_1x128,
    quantize_128x128,
)


def _e4m3_value(byte: int) -> float:
    """OCP e4m3 by its definition: 1 sign, 4 exponent (bias 7), 3 mantissa; 0x7f is NaN."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if byte & 128 else magnitude


_POSITIVE = np.array([_e4m3_value(b) for b in range(0x7F)])  # ascending; the index is the code


def _nearest(value: float) -> int:
    """Code of a positive value: nearest, ties to the even code, saturating."""
    exact = np.abs(_POSITIVE - value)
    best = np.flatnonzero(exact == exact.min())
    return int(best[0] if best[0] % 2 == 0 else best[-1])


def _groups(*rows) -> torch.Tensor:
    """Rows of 128 columns; short rows are padded with zeros."""
    out = torch.zeros(len(rows), 128)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def test_codes_and_scales_equal_an_independent_encoder():
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(3))
    x *= torch.exp2(torch.randint(-20, 20, (40, 256), generator=torch.Generator().manual_seed(4)))
    x = x.bfloat16()
    q, scale = quantize_1x128(x)
    codes = q.view(torch.uint8).numpy()
    for t in range(40):
        for g in range(2):
            v = x[t, g * 128 : (g + 1) * 128].float().numpy()
            want = np.float32(np.abs(v).max()) / np.float32(448)
            assert scale[t, g].item() == want, (t, g, scale[t, g].item(), want)
            scaled = v * (np.float32(1) / want)
            for k in range(128):
                code = _nearest(abs(float(scaled[k]))) | (128 if np.signbit(scaled[k]) else 0)
                assert codes[t, g * 128 + k] == code, (t, g, k, v[k], codes[t, g * 128 + k], code)


def test_ties_go_to_the_even_code():
    # amax 448 makes the scale 1. Halfway between 16 and 18 is 17: code of 16 is even; 19 -> 20.
    q, scale = quantize_1x128(_groups([448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10]))
    assert scale.item() == 1
    assert q[0, :6].float().tolist() == [448, 16, 20, -16, 0, 2.0**-8]


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 1e-31])
def test_zero_and_tiny_groups_are_finite_and_tiny(amax):
    q, scale = quantize_1x128(_groups([amax, -amax]))
    assert scale.item() == np.float32(1e-30) / np.float32(448)
    assert bool(q.float().isfinite().all())
    assert float((dequantize_1x128(q, scale) - _groups([amax, -amax])).abs().max()) <= 1e-30


@pytest.mark.parametrize("amax", [2e-30, 1e-20, 1.0, 3e38])
def test_groups_of_any_size_keep_their_relative_precision(amax):
    x = torch.linspace(-1, 1, 128)[None] * amax
    back = dequantize_1x128(*quantize_1x128(x))
    error = (back - x).abs()
    allowed = x.abs() * 2.0**-4 * 1.0001 + amax / 448 * 2.0**-10
    assert bool((error <= allowed).all()), (error - allowed).max()


def test_nan_stays_where_it_is_and_does_not_touch_its_group():
    clean, clean_scale = quantize_1x128(_groups([3.0, 1.0, 2.0]))
    q, scale = quantize_1x128(_groups([3.0, float("nan"), 2.0]))
    assert scale.item() == clean_scale.item()
    assert q.float().isnan().nonzero().tolist() == [[0, 1]]
    assert q[0, 2].float() == clean[0, 2].float()


def test_infinity_makes_the_group_not_a_number():
    x = _groups([float("inf"), 1.0], [1.0, 1.0])
    back = dequantize_1x128(*quantize_1x128(x))
    assert bool(back[0].isnan().any())
    assert not bool(back[1].isnan().any())


def test_blocks_are_quantised_alone():
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    w *= torch.arange(1.0, 7).reshape(2, 3).repeat_interleave(128, 0).repeat_interleave(128, 1)
    q, scale = quantize_128x128(w)
    assert scale.shape == (2, 3)
    for n in range(2):
        for k in range(3):
            block = w[n * 128 : n * 128 + 128, k * 128 : k * 128 + 128]
            # A 1x128 group of the flattened block that starts with the block's amax.
            want = block.abs().max() / torch.tensor(448.0)
            assert scale[n, k] == want, (n, k, scale[n, k], want)
            back = dequantize_128x128(q, scale)[n * 128 : n * 128 + 128, k * 128 : k * 128 + 128]
            error = (back - block).abs() - (block.abs() * 2.0**-4 * 1.0001 + want * 2.0**-10)
            assert float(error.max()) <= 0


def test_batched_weights_equal_single_ones():
    w = torch.randn(3, 128, 256, generator=torch.Generator().manual_seed(1))
    q, scale = quantize_128x128(w)
    for e in range(3):
        qe, se = quantize_128x128(w[e])
        assert torch.equal(q[e].view(torch.uint8), qe.view(torch.uint8))
        assert torch.equal(scale[e], se)


def test_no_rows():
    q, scale = quantize_1x128(torch.zeros(0, 256))
    assert q.shape == (0, 256)
    assert scale.shape == (0, 2)
    assert dequantize_1x128(q, scale).shape == (0, 256)


def test_wrong_shapes_are_named():
    with pytest.raises(InputError, match=r"\(3, 100\).*multiples of 128"):
        quantize_1x128(torch.zeros(3, 100))
    with pytest.raises(InputError, match=r"\(100, 128\).*multiples of 128"):
        quantize_128x128(torch.zeros(100, 128))


def test_fma_rounds_once():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4000, generator=generator) for _ in range(2))
    near = -(a.double() * b.double()).float()  # cancels: what is left is the product's tail
    c = torch.where(torch.arange(4000) % 2 == 0, near, torch.randn(4000, generator=generator))
    # Sums that lie exactly on, or a hair beside, the middle of two FP32 values.
    a[:4], b[:4] = 1 + 2.0**-12, torch.tensor([1 + 2.0**-12, 1 - 2.0**-12, 1.0, 2.0**-24])
    c[:4] = torch.tensor([1.0, 1.0, 2.0**-24, 1.0])
    result = fma32(a, b, c)
    for i in range(4000):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        got = np.float32(result[i].item())
        distance = abs(Fraction(float(got)) - exact)
        for other in (
            np.nextafter(got, np.float32(np.inf)),
            np.nextafter(got, -np.float32(np.inf)),
        ):
            away = abs(Fraction(float(other)) - exact)
            even = int(got.view(np.uint32)) % 2 == 0
            assert distance < away or (distance == away and even), (i, got, float(exact))
