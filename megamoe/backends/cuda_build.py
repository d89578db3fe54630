"""What a GPU rank's kernels are built from: their parameters, their macros, the configuration.

Nothing here needs a GPU.
"""

from __future__ import annotations

import ctypes
import math
import os
from dataclasses import replace
from typing import Final

from megamoe import jit, native
from megamoe.errors import SpecError
from megamoe.spec import GROUP, MAX_RANKS, TAILED_BLOCK_M, EpConfig, MoESpec

__all__ = ["BOXES", "MOST_SMS", "MoEParams", "check_params", "compile_moe", "cuda_config"]

BOXES: Final = (8, 16, 32, 48, 64, 80, 96, 128, TAILED_BLOCK_M)
"""Rows of a box of activations; each has tensor maps of its own."""
MOST_SMS: Final = 192
"""SMs that ``MoEParams`` can tell apart (kMaxSms)."""
_BLOCK_M: Final = 128
_MOST_FEW_ROWS: Final = 96
"""Rows of a block up to which weights are on the M side of wgmma (csrc/moe/math.cuh)."""
_FEW_ROWS_TIME: Final = 0.64
_TAIL_TIME: Final = 0.45
"""Times of a block of few rows and of a tail, in those of a block of many rows, as measured."""
_TAILS_GAIN: Final = 0.03
"""Of a call's time, what tails shall save before they are taken."""
_MAX_EXPERTS: Final = 512
_SHORT_RING: Final = 24
_LONG_RING: Final = 64
_SHORT_RING_ROWS: Final = 64
"""Mean rows of an expert up to which the short ring is the faster one."""
_RING_TILES: Final = 384
"""Linear 1 tiles that a ring shall hold: nearly three for each SM of an H200."""


class MoEParams(ctypes.Structure):
    """``MoEParams`` of csrc/moe/params.cuh; ``check_params`` compares them."""

    _fields_ = (
        ("w", ctypes.c_uint8 * (128 * 2 * 2)),
        ("x", ctypes.c_uint8 * (128 * len(BOXES))),
        ("h", ctypes.c_uint8 * (128 * len(BOXES))),
        ("shape", ctypes.c_uint8 * (4 * len(native.describe()["shape_fields"]))),
        ("layout", ctypes.c_uint64 * (3 * len(native.describe()["regions"]) + 1)),
        ("rank", ctypes.c_uint32),
        ("num_tokens", ctypes.c_uint32),
        ("timeout_ns", ctypes.c_uint64),
        ("topk_idx", ctypes.c_uint64),
        ("topk_weight", ctypes.c_uint64),
        ("w1_scale", ctypes.c_uint64),
        ("w2_scale", ctypes.c_uint64),
        ("placed", ctypes.c_uint64 * 2),
        ("y", ctypes.c_uint64),
        ("swiglu_clamp", ctypes.c_float),
        ("stage_is_bf16", ctypes.c_uint32),
        ("stage_x", ctypes.c_uint64),
        ("stage_scale", ctypes.c_uint64),
        ("trace", ctypes.c_uint64),
        ("num_streams", ctypes.c_uint32),
        ("near_half", ctypes.c_uint32 * (MOST_SMS // 32)),
        ("bases", ctypes.c_uint64 * MAX_RANKS),
    )


def check_params(cubin: jit.Cubin) -> None:
    """That the kernel's parameters lie where ``MoEParams`` has them."""
    # The compiled structure is padded to the 64 bytes that tensor maps need.
    size = -(-ctypes.sizeof(MoEParams) // 64) * 64
    fields = "layout", "rank", "placed", "bases"
    here = size, *(getattr(MoEParams, field).offset for field in fields)
    names = "param_bytes", *(f"{field}_offset" for field in fields)
    compiled = tuple(cubin.constant(f"megamoe_moe_{name}") for name in names)
    assert here == compiled, f"{names}: {here} here, {compiled} in the kernel"


def compile_moe(spec: MoESpec, *, tail_rows: int = 0, trace: bool = False) -> jit.Cubin:
    """The kernel for a layer's matrix shape.

    Args:
        spec: the layer.
        tail_rows: of ``EpConfig``: blocks may have tails.
        trace: build in time stamps and events (``csrc/device/trace.cuh``).

    Raises:
        SpecError: ``$MEGAMOE_DEFINES`` is not a list of NAME=INTEGER.
    """
    defines = {
        "MEGAMOE_HIDDEN": spec.hidden,
        "MEGAMOE_INTER": spec.inter,
        "MEGAMOE_FP8": int(spec.weight_dtype == "fp8"),
        "MEGAMOE_TAIL_ROWS": tail_rows,
    }
    if trace:
        defines["MEGAMOE_TRACE"] = 1
    # For experiments: NAME=VALUE,… overrides a tuning constant of the sources.
    for pair in filter(None, os.environ.get("MEGAMOE_DEFINES", "").split(",")):
        name, _, value = pair.partition("=")
        if not (name.isidentifier() and value.removeprefix("-").isdecimal()):
            raise SpecError(f"MEGAMOE_DEFINES has {pair!r}: it takes NAME=INTEGER,… or nothing")
        defines[name] = int(value)
    return jit.compile_cubin("moe/moe.cu", defines)


def _spared_by_tails(mean: float) -> float:
    """The share of a call's time that tails are expected to save.

    Args:
        mean: rows of an expert, which are taken as a Poisson number.
    """
    if mean > 1024:
        return 0.0  # a share of some blocks of many
    spared = total = 0.0
    for rows in range(1, math.ceil(mean + 6 * math.sqrt(mean)) + 1):
        chance = math.exp(rows * math.log(mean) - mean - math.lgamma(rows + 1))
        full, last = divmod(rows, _BLOCK_M)
        total += chance * (full + (_FEW_ROWS_TIME if last <= _MOST_FEW_ROWS else 1) * (last > 0))
        if full and 0 < last <= TAILED_BLOCK_M - _BLOCK_M:
            spared += chance * (_FEW_ROWS_TIME - _TAIL_TIME)
    return spared / total


def cuda_config(spec: MoESpec, config: EpConfig) -> EpConfig:
    """``config`` with every 0 replaced by what suits a GPU (``docs/performance.md``).

    Raises:
        SpecError: blocks larger than the kernel's 144 rows, or more experts than its tables hold.
    """
    if config.block_m > TAILED_BLOCK_M:
        raise SpecError(f"block_m = {config.block_m}: the GPU takes at most 128, or 144; 0 chooses")
    if spec.num_experts > _MAX_EXPERTS:
        raise SpecError(f"num_experts = {spec.num_experts}: the GPU takes at most {_MAX_EXPERTS}")
    mean = config.max_tokens * spec.topk * config.num_ranks / spec.num_experts
    if config.block_m == 0:
        tails = spec.weight_dtype == "fp8" and _spared_by_tails(mean) >= _TAILS_GAIN
        config = replace(config, block_m=TAILED_BLOCK_M if tails else _BLOCK_M)
    # Few rows per expert: slots that are soon used again stay in L2. Many: a pull shall be far
    # ahead of its tile. And in either case tiles for all SMs.
    least = _SHORT_RING if mean <= _SHORT_RING_ROWS else _LONG_RING
    rings = min(config.max_blocks(spec), max(least, math.ceil(_RING_TILES * GROUP / spec.inter)))
    b1, b2 = config.ring_l1_blocks or rings, config.ring_l2_blocks or rings
    # Blocks of a busy expert if routing is uniform. A wave that holds all of an expert's blocks
    # reads its weights from memory once: so waves have room for twice as many, for skewed routing,
    # but not for more than half a ring then, or Linear 2 could not trail. Waves of one block stay
    # so: they need no walk, and two streams gain nothing there.
    busy = math.ceil((mean + 4 * math.sqrt(mean)) / (config.block_m - config.tail_rows))
    longest = 1 if busy == 1 else max(busy, min(2 * busy, min(b1, b2) // 2))
    wave = config.wave_blocks or max(1, min(16, longest, b1, b2))
    lag = config.l2_lag_blocks or max(1, min(20, b2 - wave))
    chosen = replace(
        config, ring_l1_blocks=b1, ring_l2_blocks=b2, wave_blocks=wave, l2_lag_blocks=lag
    )
    return chosen.resolved(spec)
