"""What both forms of attention-pre on a GPU ask of tensors: dtypes, shapes, tensor maps.

The megakernel (``backends/attention.py``) and the standalone kernels (``megamoe/cmp``) read the
same operands through the same maps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from megamoe.attention_pre.encode import EncodedPlan, instruction_format
from megamoe.attention_pre.plan import Buffer
from megamoe.attention_pre.tiling import Specialization
from megamoe.backends.cuda_driver import block_map, tensor_map
from megamoe.errors import SpecError
from megamoe.spec import GROUP, INDEX_DIM, INDEX_PAGE

__all__ = [
    "NO_PAGES",
    "TORCH_DTYPES",
    "MappedRow",
    "check_tensor",
    "mapped_rows",
    "stage_maps",
]

TORCH_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "fp32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
    "bytes": torch.uint8,
}
"""By a buffer's dtype."""
_FP8_GEMMS: Final = (
    "qkv_a",
    "index_key",
    "index_query",
    "main_query",
    "gemm_swiglu",
    "gemm_store",
)
NO_PAGES: Final = ("norm_quant", "qkv_a_final", "index_key_final", "index_query_final")
"""Opcodes whose bodies load everything themselves."""


def check_tensor(buffer: Buffer, t: Tensor, device: torch.device) -> None:
    """Refuses a tensor that a plan's buffer cannot be.

    Raises:
        SpecError: its shape, dtype, device, strides or alignment (16 bytes).
    """
    fits = len(t.shape) == len(buffer.shape) and all(
        isinstance(want, str) or want == have
        for want, have in zip(buffer.shape, t.shape, strict=True)
    )
    good = t.device == device and t.is_contiguous() and t.data_ptr() % 16 == 0
    if not (fits and good and t.dtype == TORCH_DTYPES[buffer.dtype]):
        raise SpecError(
            f"{buffer.name} is {tuple(t.shape)} {t.dtype} on {t.device}: must be {buffer.shape} "
            f"{buffer.dtype} on {device}, contiguous, at a multiple of 16 bytes"
        )


@dataclass(frozen=True)
class MappedRow:
    """A row of the operand table whose body loads through tensor maps.

    Attributes:
        opcode: of the body.
        spec: its specialisation.
    """

    opcode: str
    spec: Specialization


def mapped_rows(encoded: EncodedPlan) -> dict[int, MappedRow]:
    """Rows by number; those of bodies that load nothing need no maps.

    Raises:
        SpecError: two specialisations share a row.
    """
    fmt = instruction_format()
    words = encoded.instructions.reshape(-1, fmt.words)
    columns = [fmt.fields[name][0] for name in ("operand_row", "opcode", "spec_id")]
    rows: dict[int, MappedRow] = {}
    for row, number, spec_id in np.unique(words[:, columns], axis=0).tolist():
        opcode = fmt.opcode_name(number)
        assert opcode is not None
        if opcode in ("no_op", *NO_PAGES):
            continue
        if row in rows:
            raise SpecError(f"operand row {row} has two specialisations: give them a row each")
        rows[row] = MappedRow(opcode, encoded.specializations[spec_id])
    return rows


def stage_maps(row: MappedRow, operands: Mapping[str, Tensor]) -> bytes:
    """``StageMaps`` of csrc/attention_pre: the maps of inputs and of weights, 128 bytes each.

    A box of inputs is a page: blocks of K one after another, or the queries of scores.

    Args:
        row: how the operands are read.
        operands: by role of the opcode.
    """
    band = row.spec.band

    def matrix(name: str, box: tuple[int, int]) -> bytes:
        """Rows of a matrix; leading dimensions are rows, too."""
        t = operands[name]
        return _map(t, t.shape[-1], t.numel() // t.shape[-1], box)

    if row.opcode == "index_score":
        cache = operands["cache"]  # a page is 64 rows of codes and 2 of scales
        heads = int(dict(row.spec.shape)["heads"])
        return matrix("codes", (INDEX_DIM, band * heads)) + _map(
            cache, INDEX_DIM, cache.numel() // INDEX_DIM, (INDEX_DIM, INDEX_PAGE)
        )
    a = operands["a"]
    blocks = row.spec.k_tile * a.element_size() // GROUP
    inputs = block_map(
        a.data_ptr(),
        columns=a[0].numel(),
        rows=a.shape[0],
        box=(band, min(GROUP // band, blocks)),
        element_bytes=a.element_size(),
    )
    if row.opcode in _FP8_GEMMS:
        return inputs + matrix("w", (GROUP, GROUP))
    return inputs + matrix("w", (64, 64 if row.opcode == "absorb_query" else GROUP))


def _map(t: Tensor, columns: int, rows: int, box: tuple[int, int]) -> bytes:
    return tensor_map(
        t.data_ptr(), columns=columns, rows=rows, box=box, element_bytes=t.element_size()
    )
