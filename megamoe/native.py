"""The only importer of the compiled module: shapes, names and the CPU session.

Facts that C++ defines (names of regions, roles, tags; fields of records) are read from it, never
repeated in Python.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from megamoe import _native
from megamoe._native import (
    CpuSession,
    MoEShape,
    clear_span,
    row_sources,
    schedule,
    window_layout,
    window_layout_bytes,
)
from megamoe.errors import FaultRecord
from megamoe.spec import EpConfig, MoESpec

__all__ = [
    "CpuSession",
    "MoEShape",
    "clear_span",
    "describe",
    "describe_instruction",
    "fault_record",
    "make_shape",
    "row_sources",
    "schedule",
    "window_layout",
    "window_layout_bytes",
]


@cache
def describe() -> dict[str, Any]:
    """Names and facts of the compiled module: regions, roles, phases, tags, record fields."""
    return _native.describe()


@cache
def describe_instruction() -> dict[str, Any]:
    """The 128-byte instruction record: fields, flags, opcodes and their operand slots."""
    return _native.describe_instruction()


def make_shape(
    spec: MoESpec, config: EpConfig, *, num_units: int, num_pullers: int, l2_tile_n: int
) -> MoEShape:
    """The numbers that layout, schedule and kernels derive from.

    Args:
        spec: the layer.
        config: a resolved configuration (``EpConfig.resolved``).
        num_units: CTAs or math workers per rank.
        num_pullers: warps or threads per rank that pull rows.
        l2_tile_n: output columns of a Linear 2 tile.
    """
    return MoEShape(
        num_ranks=config.num_ranks,
        num_experts=spec.num_experts,
        topk=spec.topk,
        num_shared=spec.num_shared,
        hidden=spec.hidden,
        inter=spec.inter,
        is_fp8=int(spec.weight_dtype == "fp8"),
        max_tokens=config.max_tokens,
        block_m=config.block_m,
        tail_rows=config.tail_rows,
        ring_l1=config.ring_l1_blocks,
        ring_l2=config.ring_l2_blocks,
        wave_blocks=config.wave_blocks,
        l2_lag=config.l2_lag_blocks,
        l2_tile_n=l2_tile_n,
        num_units=num_units,
        num_pullers=num_pullers,
    )


def fault_record(fields: dict[str, int]) -> FaultRecord:
    """A record as the device wrote it, with names for role, phase and tag."""
    names = describe()
    return FaultRecord(
        rank=fields["rank"],
        unit=fields["unit"],
        role=names["roles"][fields["role"]],
        phase=names["phases"][fields["phase"]],
        tag=names["tags"][fields["tag"]],
        peer=fields["peer"],
        index=fields["index"],
        epoch=fields["epoch"],
        want=fields["want"],
        have=fields["have"],
    )
