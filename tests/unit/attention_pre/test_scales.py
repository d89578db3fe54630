"""The kernel's scale of a group (ops/rows.cuh) is correctly rounded.

The device computes it without a division. Its steps are repeated here for every mantissa; the
exponent does not matter between the limits that rows.cuh names, since nothing is denormal there.
"""

from __future__ import annotations

import numpy as np

MANTISSAS = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)


def fma(a, b, c):
    """One rounding but for ties of ties: the product is exact in 64 bits, the sum nearly so."""
    product = a.astype(np.float64) * b.astype(np.float64)
    return (product.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)


def first_difference(got, want):
    wrong = np.flatnonzero(got != want)
    return [(float(MANTISSAS[i]), float(got[i]), float(want[i])) for i in wrong[:3]]


def test_a_448th_is_correctly_rounded():
    inverse = np.float32(1) / np.float32(448)
    q = MANTISSAS * inverse
    missed = fma(np.full_like(q, -448), q, MANTISSAS)
    got = fma(missed, np.full_like(q, inverse), q)
    assert first_difference(got, MANTISSAS / np.float32(448)) == []
    assert np.any(q != got)  # the product alone would not do
