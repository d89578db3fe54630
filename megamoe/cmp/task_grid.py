"""A CTA's task from its place in the launch, for the stages whose tasks lie on a grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megamoe.attention_pre.encode import InstructionFormat
from megamoe.attention_pre.tiling import StageTiles
from megamoe.spec import GROUP, INDEX_PAGE

__all__ = ["WHOLE_ROWS", "TaskGrid", "agrees", "task_grid"]

WHOLE_ROWS: Final = ("norm_quant", "qkv_a_final")
"""Opcodes whose tasks are rows of all columns, which their bodies load themselves."""


@dataclass(frozen=True)
class TaskGrid:
    """``TaskGrid`` of csrc/cmp/params.cuh: a CTA's task from its place in the launch.

    Attributes:
        ctas: of the launch in x (parts; of scores pieces of the keys), y (tiles; blocks of a
            request's tokens) and z (blocks of rows; requests).
        band: token rows of a block.
        rows: of the call; of scores, tokens of a request.
        block_n: columns of a tile; keys of a piece.
        columns: of all tiles together; keys of a request.
        k_tile: columns of a part's reduction.
        pages: of scores, pages of a request in the block table.
        fresh: of scores, a request's first key that the run may store.
        item_columns: of a head; 0: the stage has none. The kernel knows it and the next two.
        wrap: whether columns count from the head's first.
        rope: whether a head's last tile is rotated.
    """

    ctas: tuple[int, int, int]
    band: int
    rows: int
    block_n: int
    columns: int
    k_tile: int = 0
    pages: int = 0
    fresh: int = 0
    item_columns: int = 0
    wrap: bool = False
    rope: bool = False

    @property
    def words(self) -> tuple[int, ...]:
        """What the kernel is told."""
        return self.band, self.rows, self.block_n, self.columns, self.pages, self.fresh

    def fields(self, cta: int, task_flags: int, flags: Mapping[str, int]) -> dict[str, int]:
        """What the kernel makes of CTA number ``cta``: the twin of ``task_of``."""
        x, rest = cta % self.ctas[0], cta // self.ctas[0]
        y, z = rest % self.ctas[1], rest // self.ctas[1]
        if self.pages:
            kv, token = x * self.block_n, y * self.band
            keys = min(self.block_n, self.columns - kv)
            return {
                "row": z * self.rows + token,
                "rows": min(self.band, self.rows - token),
                "item": z,
                "kv": kv,
                "kv_len": keys,
                "page": z * self.pages + kv // INDEX_PAGE,
                "aux": self.rows - token,
                "flags": task_flags | (flags["has_new_keys"] if kv + keys > self.fresh else 0),
            }
        row, column = z * self.band, y * self.block_n
        cols = min(self.block_n, self.columns - column)
        rotated = self.rope and (column + cols) % self.item_columns == 0
        return {
            "row": row,
            "rows": min(self.band, self.rows - row),
            "col": column % self.item_columns if self.wrap else column,
            "cols": cols,
            "k": x * self.k_tile,
            "part": x,
            "item": column // self.item_columns if self.item_columns else 0,
            "flags": task_flags | (flags["has_rope"] if rotated else 0),
        }


def task_grid(
    tiled: StageTiles, first: Mapping[str, int], *, final: bool, ctas: int, rows: int
) -> TaskGrid | None:
    """The grid that the tasks of an opcode lie on; whether they do, ``agrees`` says.

    Args:
        tiled: the stage.
        first: fields of its first task.
        final: whether the tasks sum the parts of others.
        ctas: tasks.
        rows: M.
    """
    spec, opcode = tiled.specialization, tiled.opcode
    if opcode == "index_score":
        return _score_grid(tiled)
    shape = dict(spec.shape)
    by_head = opcode == "absorb_query"
    columns = spec.n * int(shape["heads"]) if by_head else spec.n
    band = first["rows"] if final else spec.band
    blocks = -(-rows // band)
    tiles = -(-columns // spec.block_n)
    parts = 1 if final else ctas // (blocks * tiles)
    block_n = spec.block_n
    if opcode in WHOLE_ROWS:
        blocks, tiles, parts, block_n = rows, 1, 1, spec.n
    if parts * tiles * blocks != ctas:
        return None
    items = {
        "absorb_query": spec.n,
        "index_query": GROUP,
        "main_query": spec.n // int(shape.get("heads", 1)),
    }
    return TaskGrid(
        ctas=(parts, tiles, blocks),
        band=band,
        rows=rows,
        block_n=block_n,
        columns=columns,
        k_tile=spec.k_tile,
        item_columns=items.get(opcode, 0),
        wrap=by_head,
        rope=opcode == "main_query",
    )


def _score_grid(tiled: StageTiles) -> TaskGrid | None:
    """Of requests that are alike."""
    every = [dict(t.fields) for t in tiled.tiles]
    first = every[0]
    mine = [f for f in every if f["item"] == first["item"]]
    pieces = sum(f["row"] == first["row"] for f in mine)
    ctas = (pieces, len(mine) // pieces, len(every) // len(mine))
    if math.prod(ctas) != len(every):
        return None
    keys = sum(f["kv_len"] for f in mine[:pieces])
    new = [f["kv"] for f, t in zip(mine, tiled.tiles, strict=False) if "has_new_keys" in t.flags]
    return TaskGrid(
        ctas=ctas,
        band=first["rows"],
        rows=first["aux"],
        block_n=first["kv_len"],
        columns=keys,
        pages=every[len(mine)]["page"] if ctas[2] > 1 else keys // INDEX_PAGE,
        fresh=min(new, default=keys),
    )


def agrees(
    fmt: InstructionFormat,
    records: NDArray[np.uint32],
    task: NDArray[np.uint32],
    grid: TaskGrid,
    *,
    final: bool,
) -> bool:
    """Whether the grid gives every record; a final's tasks do not look at ``k`` and ``part``."""
    skip = ("k", "part") if final else ()
    flags = fmt.get(task, "flags")
    for cta, record in enumerate(records):
        made = task.copy()
        for name, value in grid.fields(cta, flags, fmt.flags).items():
            fmt.set(made, name, value)
        for name in skip:
            fmt.set(made, name, fmt.get(record, name))
        if not np.array_equal(made, record):
            return False
    return True
