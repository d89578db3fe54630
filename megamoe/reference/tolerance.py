"""How far a correct implementation may be from the oracle, or from the layer before quantisation.

Everything is derived from the dtype, the K dimensions, top-k and the number of tokens; no number
here was picked to let a test pass. Shape legend: T tokens, H hidden, I intermediate, N slots of all
tokens together (T * (K + S)).

**Against the oracle.** Both quantise alike, so three things remain.

1. *Order of FP32 sums.* A kernel rounds after each product of a 128-column partial, the oracle
   once. With a running sum that grows like a random walk, the error relative to the result's rms is
   about ``2**-p * sqrt(64 / 3)`` per partial, and the same walk again over the K/128 partials;
   ``delta = 2**-p * sqrt(128 + K/128)`` is twice that. p is 24 for FP32 units. Hopper's FP8 tensor
   core keeps about 14 bits inside a partial (DeepSeek-V3 report, section 3.3.2). SwiGLU multiplies
   two such values and the last bits of exp differ: 2 * delta reaches the intermediate.
2. *Flipped e4m3 codes* (FP8). A value within 2 * delta of a rounding boundary lands on the other
   side. Spacing is 2**-4..2**-3 of a value, so the share of flipped codes is about
   ``2 * delta * 16``, and each moves the value by at most 2**-3 of itself; a flip beside the
   group's amax moves it by amax / 14, where amax is taken as 8 times the rms. Flips are rare
   events: their number is bounded by the Poisson mean plus 4 standard deviations plus 2.
3. *Flipped BF16 roundings* of the intermediate (BF16 weights), of slots and of y. Spacing is
   2**-8..2**-7 of a value: share ``2 * delta * 256`` of each, every one worth at most 2**-7 of the
   value.

Rows that no e4m3 flip touched obey point 3 alone. So the check is made of three parts: all rows but
the possible number of flipped ones obey the *clean* bound, all rows together the *norm* bound, and
every element the *element* bound. Errors are relative to the rms of the token's row.

**Against the unquantised layer.** Rounding to e4m3 has a relative rms error of ``2**-3 * 0.736 /
sqrt(12)`` (0.736: rms of 1/m over log-uniform mantissas m in 1..2), BF16 of 2**-7 in place of
2**-3. Activations and weights add in quadrature; SwiGLU of two such factors multiplies by 1.45
(its expectation for normal values of unit variance; sqrt(2) in both limits); then the intermediate
and W2 add theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megamoe.spec import GROUP, MoESpec

__all__ = [
    "FP8_TENSOR_CORE_BITS",
    "FP32_BITS",
    "Closeness",
    "Tolerance",
    "closeness",
    "oracle_tolerance",
    "unquantised_tolerance",
]

FP32_BITS: Final = 24
FP8_TENSOR_CORE_BITS: Final = 14
"""Bits that Hopper's FP8 tensor core keeps inside one 128-column partial."""

_BF16_ULP: Final = 2.0**-7
_E4M3_ULP: Final = 2.0**-3
_PEAK: Final = 8.0  # largest over rms, of a row of y or of a group of the intermediate
_W2_PEAK: Final = 4.0  # largest over rms of one row of W2
_SWIGLU_GAIN: Final = 1.45
_MANTISSA_RMS: Final = 0.736


@dataclass(frozen=True)
class Tolerance:
    """Bounds on errors relative to the rms of the token's row.

    Attributes:
        element: of any element, beside one BF16 ulp of the element itself.
        norm: root mean square over all elements.
        clean: the same without the ``flipped_rows`` worst rows.
        flipped_rows: rows that rare flips of the intermediate may have touched.
    """

    element: float
    norm: float
    clean: float
    flipped_rows: int


@dataclass(frozen=True)
class Closeness:
    """How close two outputs are; errors as in ``Tolerance``.

    Attributes:
        norm: root mean square relative error over all elements.
        clean: the same without the tolerance's ``flipped_rows`` worst rows.
        worst: largest element error (less one BF16 ulp), relative to its row's rms.
        where: (token, column) of ``worst``, or of the first non-finite mismatch.
        actual: the value there.
        expected: the value there.
        problem: "" or what broke the tolerance.
    """

    norm: float
    clean: float
    worst: float
    where: tuple[int, int]
    actual: float
    expected: float
    problem: str


def _poisson_bound(mean: float) -> float:
    """A number of rare events that is practically never exceeded."""
    return mean + 4 * math.sqrt(mean) + 2


def oracle_tolerance(
    spec: MoESpec, num_tokens: int, accumulator_bits: int = FP32_BITS
) -> Tolerance:
    """Bounds for an implementation of the contract against the oracle; see the module.

    Args:
        spec: the layer.
        num_tokens: T, of the whole batch compared.
        accumulator_bits: p of the sums inside a 128-column partial.
    """
    columns = max(spec.hidden, spec.inter)
    delta = 2.0**-accumulator_bits * math.sqrt(GROUP + columns / GROUP)
    slots, tokens = spec.num_slots, max(num_tokens, 1)

    # Point 3: slots and y. Bounds of a count hold for the batch, so they tighten with its size.
    share = min(1.0, 2 * delta * 256)
    values = tokens * spec.hidden
    rounding = _BF16_ULP * math.sqrt(2 * _poisson_bound(share * values * 2) / values)
    element = _BF16_ULP * _PEAK
    if spec.weight_dtype == "bf16":
        codes = tokens * slots * spec.inter
        inter = _BF16_ULP * math.sqrt(_poisson_bound(share * codes) / codes) * _PEAK / 2
        bound = math.hypot(rounding, inter)
        return Tolerance(element + inter, bound, bound, flipped_rows=0)

    # Point 2.
    codes = tokens * slots * spec.inter
    share = min(1.0, 2 * delta * 16)
    mean = share * codes
    typical = (mean + 4 * math.sqrt(mean)) * _E4M3_ULP**2
    rare = 2 * (_PEAK / 14) ** 2
    flips = math.sqrt((typical + rare) / codes * slots)
    per_row = _poisson_bound(share * slots * spec.inter)
    worst_flip = _PEAK / 14 * _W2_PEAK * math.sqrt(per_row / spec.inter)
    return Tolerance(
        element=element + worst_flip,
        norm=math.hypot(rounding, flips),
        clean=rounding,
        flipped_rows=min(num_tokens, math.floor(_poisson_bound(mean))),
    )


def unquantised_tolerance(spec: MoESpec, num_tokens: int) -> Tolerance:
    """Bounds against the same layer computed in FP32 from unquantised weights; see the module.

    A margin of 1.5 on the norm covers weights and activations that are not normal; an element may
    be off by the largest of T * H normal errors of that size.
    """
    e4m3 = _E4M3_ULP * _MANTISSA_RMS / math.sqrt(12)
    bf16 = _BF16_ULP * _MANTISSA_RMS / math.sqrt(12)
    if spec.weight_dtype == "fp8":
        inter = _SWIGLU_GAIN * math.sqrt(2) * e4m3
        norm = math.sqrt(inter**2 + 2 * e4m3**2 + 2 * bf16**2)
    else:
        norm = math.sqrt(3) * bf16
    norm *= 1.5
    elements = max(num_tokens, 1) * spec.hidden
    return Tolerance(norm * math.sqrt(2 * math.log(2 * elements)), norm, norm, flipped_rows=0)


def closeness(actual: Tensor, expected: Tensor, tolerance: Tolerance) -> Closeness:
    """Compares two outputs [T, H] row by row.

    Rows that hold NaN or Inf must hold them at the same places; their finite elements, of which the
    rms is not defined, are not compared. A row of zeros must be zeros.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.numel():
        return Closeness(0.0, 0.0, 0.0, (0, 0), 0.0, 0.0, "")
    a, e = actual.double(), expected.double()
    same = torch.where(e.isnan(), a.isnan(), torch.where(e.isinf(), a == e, a.isfinite()))
    if not bool(same.all()):
        return _at(a, e, (~same).nonzero()[0], math.inf, math.inf, "non-finite values differ")
    finite = e.isfinite().all(1)
    rows = finite.nonzero().squeeze(1)
    if not len(rows):
        return Closeness(0.0, 0.0, 0.0, (0, 0), 0.0, 0.0, "")
    af, ef = a[rows], e[rows]
    rms = ef.pow(2).mean(1)[:, None].sqrt()
    diff = (af - ef).abs()
    error = torch.where(diff == 0, 0.0, diff / rms)  # inf for a difference in a row of zeros
    beside_ulp = (error - _BF16_ULP * ef.abs() / rms.clamp_min(1e-300)).clamp_min(0)
    per_row = error.pow(2).mean(1).sort().values
    keep = per_row[: max(0, len(per_row) - tolerance.flipped_rows)]
    norm = float(per_row.mean().sqrt())
    clean = float(keep.mean().sqrt()) if len(keep) else 0.0
    worst = float(beside_ulp.max())
    problems = []
    if worst > tolerance.element:
        problems.append(f"element error {worst:.3e} > {tolerance.element:.3e}")
    if norm > tolerance.norm:
        problems.append(f"norm error {norm:.3e} > {tolerance.norm:.3e}")
    if clean > tolerance.clean:
        problems.append(
            f"norm error without the {tolerance.flipped_rows} worst rows {clean:.3e} > "
            f"{tolerance.clean:.3e}"
        )
    place = int((beside_ulp if worst else error).argmax())
    index = torch.tensor([int(rows[place // e.shape[1]]), place % e.shape[1]])
    found = _at(a, e, index, norm, worst, "; ".join(problems))
    return Closeness(norm, clean, worst, found.where, found.actual, found.expected, found.problem)


def _at(a: Tensor, e: Tensor, index: Tensor, norm: float, worst: float, problem: str) -> Closeness:
    t, h = (int(i) for i in index)
    return Closeness(norm, norm, worst, (t, h), float(a[t, h]), float(e[t, h]), problem)
