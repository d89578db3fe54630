"""Assertions on layer outputs. Tolerances are derived in ``megamoe/reference/tolerance.py``."""

from __future__ import annotations

from torch import Tensor

from megamoe.reference.tolerance import (
    FP32_BITS,
    Closeness,
    Tolerance,
    closeness,
    oracle_tolerance,
    unquantised_tolerance,
)
from megamoe.spec import MoESpec

__all__ = ["assert_bitwise", "assert_close", "assert_matches_oracle", "assert_matches_unquantised"]


def assert_close(
    actual: Tensor, expected: Tensor, tolerance: Tolerance, what: str = ""
) -> Closeness:
    """Fails with index, both values and the errors; returns the errors otherwise."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} against {expected.shape}"
    found = closeness(actual, expected, tolerance)
    assert not found.problem, (
        f"{what}: {found.problem}; at {found.where}: actual {found.actual!r}, "
        f"expected {found.expected!r}; norm error {found.norm:.3e} (allowed {tolerance.norm:.3e}), "
        f"clean {found.clean:.3e} (allowed {tolerance.clean:.3e})"
    )
    return found


def assert_matches_oracle(
    actual: Tensor,
    expected: Tensor,
    spec: MoESpec,
    what: str = "",
    accumulator_bits: int = FP32_BITS,
) -> Closeness:
    """``actual`` [T, H] of an implementation against the oracle's ``expected``.

    ``accumulator_bits``: 24 for FP32 sums, ``tolerance.FP8_TENSOR_CORE_BITS`` for Hopper's FP8.
    """
    bound = oracle_tolerance(spec, actual.shape[0], accumulator_bits)
    return assert_close(actual, expected, bound, what)


def assert_matches_unquantised(
    actual: Tensor, expected: Tensor, spec: MoESpec, what: str = ""
) -> Closeness:
    """``actual`` [T, H] against the layer in FP32 from unquantised weights."""
    return assert_close(actual, expected, unquantised_tolerance(spec, actual.shape[0]), what)


def assert_bitwise(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal bit for bit (NaN equals a NaN of any payload); prints the first difference."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} against {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} against {expected.dtype}"
    a, e = actual.double(), expected.double()
    same = ((a == e) & (a.signbit() == e.signbit())) | (a.isnan() & e.isnan())
    if not bool(same.all()):
        index = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int((~same).sum())} of {same.numel()} differ; at {index}: "
            f"actual {a[index].item()!r}, expected {e[index].item()!r}"
        )
