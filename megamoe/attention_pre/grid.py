"""What every tiler needs: the grid of a GEMM, regions by operand, tasks from blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megamoe.attention_pre.regions import Region
from megamoe.attention_pre.stages import Stage, StageGraph
from megamoe.attention_pre.tiling import (
    Batch,
    Specialization,
    StageTiles,
    Tile,
    TileConfig,
    Unit,
    m_band,
    operand_sizes,
)
from megamoe.errors import SpecError
from megamoe.spec import GROUP

__all__ = ["Block", "Tiler", "partials_name"]


def partials_name(stage: Stage) -> str:
    """The buffer of a stage's split-K partials."""
    return f"{stage.name}.partials"


@dataclass(frozen=True, slots=True)
class Block:
    """One cell of a GEMM's grid: token rows, output columns, and a part of K."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    k: tuple[int, int]
    part: tuple[int, int]

    @property
    def fields(self) -> dict[str, int]:
        """The instruction fields that name the cell."""
        return {
            "row": self.rows[0],
            "rows": self.rows[1] - self.rows[0],
            "col": self.cols[0],
            "cols": self.cols[1] - self.cols[0],
            "k": self.k[0],
            "k_len": self.k[1] - self.k[0],
            "part": self.part[0],
            "parts": self.part[1],
        }


class Tiler:
    """What every tiler needs of one stage."""

    def __init__(self, graph: StageGraph, stage: Stage, batch: Batch, config: TileConfig) -> None:
        self.graph = graph
        self.stage = stage
        self.batch = batch
        self.block_m = config.block_m
        self.tiling = config.of(stage.name)
        self.config = config
        self.band = min(m_band(batch.rows), config.block_m)
        self.partials_name = partials_name(stage)
        self.made = {t for s in graph.stages for t in s.writes} | {self.partials_name}

    def sizes(self, role: str) -> tuple[int, ...]:
        """Sizes of an operand, without the token rows."""
        return operand_sizes(self.graph, self.stage, role)

    def region(self, role: str, *ranges: tuple[int, int]) -> Region:
        """A box of an operand."""
        return Region(self.stage.operands[role], ranges)

    def row_blocks(self) -> Iterator[tuple[int, int]]:
        """Token rows, ``block_m`` at a time."""
        for first in range(0, self.batch.rows, self.block_m):
            yield first, min(first + self.block_m, self.batch.rows)

    def blocks(self, n: int, k: int, parts: int = 1) -> Iterator[Block]:
        """The grid, part by part inside an output tile, tile by tile inside a row block."""
        if k % parts or (parts > 1 and (k // parts) % GROUP):
            raise SpecError(
                f"stage {self.stage.name}: split-K {parts} leaves no whole groups of {k}"
            )
        step = k // parts
        for rows in self.row_blocks():
            for col in range(0, n, self.tiling.block_n):
                cols = col, min(col + self.tiling.block_n, n)
                for part in range(parts):
                    yield Block(rows, cols, (part * step, (part + 1) * step), (part, parts))

    def fp8_reads(self, block: Block) -> tuple[Region, ...]:
        """Codes and scales that a block of an FP8 GEMM reads."""
        groups = block.k[0] // GROUP, block.k[1] // GROUP
        return self.region("a", block.rows, block.k), self.region("a_scales", block.rows, groups)

    def tile(
        self,
        fields: dict[str, int],
        reads: tuple[Region, ...],
        writes: tuple[Region, ...],
        *,
        flags: frozenset[str] = frozenset(),
        weight_bytes: int = 0,
        input_bytes: int = 0,
        output_bytes: int = 0,
    ) -> Tile:
        """A task; reads of what no stage writes are dropped."""
        if self.stage.attrs.get("quant.pow2"):
            flags |= {"scale_pow2"}
        reads = tuple(r for r in reads if r.tensor in self.made)
        return Tile(
            tuple(fields.items()), flags, reads, writes, weight_bytes, input_bytes, output_bytes
        )

    def fp8_tile(
        self,
        block: Block,
        writes: tuple[Region, ...],
        *,
        more: dict[str, int] | None = None,
        reads: tuple[Region, ...] = (),
        flags: frozenset[str] = frozenset(),
        weight_rows: int = 0,
    ) -> Tile:
        """A task of an FP8 GEMM; ``weight_rows`` where they are not the output columns."""
        rows, cols, depth = (last - first for first, last in (block.rows, block.cols, block.k))
        return self.tile(
            {**block.fields, **(more or {})},
            self.fp8_reads(block) + reads,
            writes,
            flags=flags,
            weight_bytes=(weight_rows or cols) * depth,
            input_bytes=rows * depth,
            output_bytes=4 * rows * cols,
        )

    def specialization(
        self,
        n: int,
        k: int,
        k_tile: int,
        shape: Mapping[str, float] | None = None,
        *,
        band: int = 0,
        opcode: str = "",
    ) -> Specialization:
        """The body's constants: the calls' and those of ``shape``."""
        attrs = {name.replace(".", "_"): value for name, value in self.stage.attrs.items()}
        constants = tuple(sorted({**attrs, **(shape or {})}.items()))
        block_n = min(self.tiling.block_n, n)
        return Specialization(
            opcode or self.stage.opcode, band or self.band, n, k, block_n, k_tile, constants
        )

    def partials(self, n: int, parts: int) -> tuple[str, tuple[int, ...], str]:
        """The workspace of a split-K sum."""
        return self.partials_name, (self.batch.rows, parts, n), "fp32"

    def partial(self, block: Block) -> Region:
        """What one part of a split-K sum writes."""
        return Region(self.partials_name, (block.rows, block.cols), block.part)

    def done(
        self,
        specialization: Specialization,
        tiles: list[Tile],
        units: list[Unit] | None = None,
        buffers: tuple[tuple[str, tuple[int, ...], str], ...] = (),
        name: str = "",
    ) -> StageTiles:
        """The tiled stage; without ``units`` every task publishes alone."""
        if units is None:
            units = [Unit((i,), t.writes) for i, t in enumerate(tiles)]
        return StageTiles(
            name or self.stage.name,
            specialization.opcode,
            self.stage.name,
            specialization,
            tuple(tiles),
            tuple(units),
            buffers,
        )
