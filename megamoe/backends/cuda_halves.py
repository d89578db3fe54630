"""Which half of L2 each SM of a GPU is near to, and whether a rank's tickets come in two streams.

L2 of a Hopper GPU is two halves with a link between them, and nothing says which SM is near to
which. But an atomic is done where its line lives, and takes 330 cycles in the near half and 525 in
the far one (H200): so SMs of one half see the same lines near.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from typing import Final

import torch
from torch import Tensor

from megamoe import jit, native
from megamoe.backends.cuda_build import MOST_SMS
from megamoe.backends.cuda_driver import Kernel, Module

__all__ = [
    "WHOLE_SM",
    "HalvesParams",
    "compile_probe",
    "load_probe",
    "near_half",
    "split_halves",
    "words_of",
]

_LINES, _REPEATS = 96, 10
_STRIDE: Final = 3104
"""Words from line to line: 12 KiB and a line more. Neighbouring pages lie in either half."""
WHOLE_SM: Final = 200 * 1024
"""Bytes of shared memory of which only one CTA has room on an SM."""
_LEAST_ALIKE: Final = 0.75
"""Correlation of SMs' cycles; 0.92 with atomics (H200), below 0.6 with loads instead."""
_LEAST_GAP: Final = 1.25
"""Far cycles in near ones; measured 1.6."""


class HalvesParams(ctypes.Structure):
    """``HalvesParams`` of csrc/moe/halves.cu."""

    _fields_ = (
        ("words", ctypes.c_uint64),
        ("cycles", ctypes.c_uint64),
        ("stride", ctypes.c_uint32),
        ("lines", ctypes.c_uint32),
        ("repeats", ctypes.c_uint32),
        ("num_sms", ctypes.c_uint32),
    )


def compile_probe() -> jit.Cubin:
    """The kernels that measure. Needs no GPU."""
    return jit.compile_cubin("moe/halves.cu", {})


@cache
def load_probe(device: torch.device) -> Module:
    """The same on the current device, ``device``: loaded once, as modules stay where they are."""
    return Module(compile_probe().image)


def near_half(shape: native.MoEShape, device: torch.device, most_streams: int) -> list[int] | None:
    """For two streams of tickets, which SMs take the second one's; None for one stream.

    Two need waves that share weights, a CTA on every SM (a stream without any would not be worked
    off), and halves of L2 that are equally near to equally many SMs. ``MEGAMOE_STREAMS=1`` wants
    one, and so do a GPU without memory to measure with and a share of a GPU by MPS, whose SMs may
    be others in another launch. Measures once a process and device, on the current stream: what is
    not clear then, on a busy GPU say, stays one stream.

    Args:
        shape: of the layer.
        device: of this rank.
        most_streams: ``megamoe_moe_most_streams`` of the kernel.

    Returns:
        Bits by SM, 32 to a word: ``near_half`` of ``MoEParams``.

    Raises:
        MegaMoeError: the driver refuses the probe. That a measurement shows no halves is no error.
    """
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if (
        most_streams < 2
        or shape.wave_blocks == 1
        or shape.num_units != num_sms
        or num_sms > MOST_SMS
        or os.environ.get("MEGAMOE_STREAMS") == "1"
        or "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in os.environ
    ):
        return None
    halves: list[bool] | None = None
    with suppress(torch.OutOfMemoryError):
        halves = _measured(device)
    return None if halves is None else words_of(halves)


def words_of(halves: list[bool]) -> list[int]:
    """Bits by SM, 32 to a word."""
    words = [0] * (MOST_SMS // 32)
    for sm, half in enumerate(halves):
        words[sm // 32] |= half << sm % 32
    return words


def split_halves(cycles: Tensor) -> list[bool] | None:
    """Tells the halves apart, if it is clear that there are two of equally many SMs.

    Args:
        cycles: ``[SMs, lines]``, the fewest that an atomic took; 0 where not measured.

    Returns:
        By SM, whether it belongs to the other half than SM 0; None if it is not clear.
    """
    if not (cycles > 0).all():
        return None
    cycles = cycles.double()
    # What an SM sees of a line beside what others see: the same sign for SMs of one half.
    alike = torch.corrcoef(cycles - cycles.mean(0)).nan_to_num()
    side = torch.where(alike[0] < 0, -1.0, 1.0)
    if (alike * side * side[:, None]).min() < _LEAST_ALIKE or side.sum() != 0:
        return None
    first, second = cycles[side > 0].mean(0), cycles[side < 0].mean(0)
    near, far = torch.minimum(first, second).mean(), torch.maximum(first, second).mean()
    return (side < 0).tolist() if far >= _LEAST_GAP * near else None


@cache
def _measured(device: torch.device) -> list[bool] | None:
    assert compile_probe().constant("megamoe_halves_param_bytes") == ctypes.sizeof(HalvesParams)
    # Cooperative: all CTAs at once, so every SM has one.
    kernel = Kernel(
        load_probe(device), "megamoe_halves", threads=32, shared_bytes=WHOLE_SM, cooperative=True
    )
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    words = torch.zeros(_LINES * _STRIDE, dtype=torch.int32, device=device)
    cycles = torch.zeros(num_sms, _LINES, dtype=torch.int32, device=device)
    params = HalvesParams(
        words=words.data_ptr(),
        cycles=cycles.data_ptr(),
        stride=_STRIDE,
        lines=_LINES,
        repeats=_REPEATS,
        num_sms=num_sms,
    )
    kernel.launch(num_sms, params, torch.cuda.current_stream(device).cuda_stream)
    return split_halves(cycles.cpu())
