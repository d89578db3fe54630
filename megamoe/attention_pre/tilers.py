"""One tiler per opcode: a stage, a batch and a configuration become tasks and units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from megamoe.attention_pre.grid import Block, Tiler
from megamoe.attention_pre.regions import Region
from megamoe.attention_pre.stages import StageGraph
from megamoe.attention_pre.tiling import (
    KV_TILE,
    Q_BLOCK_ROWS,
    Batch,
    StageTiles,
    Tile,
    TileConfig,
    Unit,
)
from megamoe.errors import SpecError
from megamoe.spec import GROUP, INDEX_DIM, INDEX_PAGE

__all__ = ["FINAL_ROWS", "tile_graph"]

FINAL_ROWS: Final = 16
"""Token rows of a task that sums parts: eight warps take two each, all their loads under way."""


def _norm_quant(t: Tiler) -> list[StageTiles]:
    (columns,) = t.sizes("weight")
    flags: set[str] = set()
    if "residual" in t.stage.operands:
        flags.add("has_residual")
    if t.stage.operands["normed"] in t.stage.writes:
        flags.add("has_normed")
    tiles = []
    for row in range(t.batch.rows):
        rows = row, row + 1
        reads = [
            t.region(role, rows, (0, columns))
            for role in ("x", "residual")
            if role in t.stage.operands
        ]
        writes = [
            t.region(role, rows, (0, columns))
            for role in ("residual_out", "normed", "codes")
            if t.stage.operands.get(role) in t.stage.writes
        ]
        if t.stage.operands["scales"] in t.stage.writes:
            writes.append(t.region("scales", rows, (0, columns // GROUP)))
        fields = {"row": row, "rows": 1, "cols": columns}
        tiles.append(
            t.tile(
                fields,
                tuple(reads),
                tuple(writes),
                flags=frozenset(flags),
                weight_bytes=2 * columns,
                input_bytes=2 * columns * len(reads),
                output_bytes=5 * columns,
            )
        )
    return [t.done(t.specialization(columns, columns, columns, band=1), tiles)]


def _qkv_a(t: Tiler) -> list[StageTiles]:
    n, k = t.sizes("w")
    (q_lora,), (kv_lora,) = t.sizes("q_norm"), t.sizes("kv_norm")
    shape = {"q_lora": q_lora, "kv_lora": kv_lora}
    parts = t.tiling.split_k
    blocks = list(t.blocks(n, k, parts))
    tiles = [t.fp8_tile(block, (t.partial(block),)) for block in blocks]
    apart = {"apart": 0 if t.tiling.final == "last" else 1}
    gemm = t.specialization(n, k, k // parts, {**shape, **apart})
    buffers = (t.partials(n, parts),)

    def finished(rows: tuple[int, int]) -> tuple[Region, ...]:
        return (
            t.region("codes", rows, (0, q_lora)),
            t.region("scales", rows, (0, q_lora // GROUP)),
            t.region("cache", rows),
        )

    if t.tiling.final == "last":
        units = []
        for rows in t.row_blocks():
            members = tuple(i for i, block in enumerate(blocks) if block.rows == rows)
            count = rows[1] - rows[0]
            units.append(Unit(members, finished(rows), count, 4 * count * parts * n))
        return [t.done(gemm, tiles, units, buffers)]

    finals = []
    for row in range(t.batch.rows):
        rows = row, row + 1
        finals.append(
            t.tile(
                {"row": row, "rows": 1, "cols": n, "parts": parts},
                (Region(t.partials_name, (rows, (0, n))),),
                finished(rows),
                weight_bytes=2 * (q_lora + kv_lora),
                input_bytes=4 * parts * n,
                output_bytes=q_lora + kv_lora,
            )
        )
    row_body = t.specialization(n, n, n, shape, band=1, opcode="qkv_a_final")
    return [
        t.done(gemm, tiles, None, buffers),
        t.done(row_body, finals, name=f"{t.stage.name}.final"),
    ]


def _head_gate(t: Tiler) -> list[StageTiles]:
    n, k = t.sizes("w")
    parts = t.tiling.split_k
    tiles = []
    for block in t.blocks(n, k, parts):
        rows, cols, depth = (last - first for first, last in (block.rows, block.cols, block.k))
        write = Region(t.stage.operands["partials"], (block.rows, block.cols), block.part)
        tiles.append(
            t.tile(
                block.fields,
                (t.region("a", block.rows, block.k),),
                (write,),
                weight_bytes=2 * cols * depth,
                input_bytes=2 * rows * depth,
                output_bytes=4 * rows * cols,
            )
        )
    buffers = ((t.stage.operands["partials"], (t.batch.rows, parts, n), "fp32"),)
    return [t.done(t.specialization(n, k, k // parts), tiles, None, buffers)]


def _reduced(
    t: Tiler,
    finished: Callable[[Block], tuple[Region, ...]],
    fields: Callable[[Block], dict[str, int]],
    reads: Callable[[Block], tuple[Region, ...]],
    shape: Mapping[str, float],
    flags: frozenset[str] = frozenset(),
    final: str = "",
) -> list[StageTiles]:
    """A split-K FP8 GEMM.

    The last part to arrive finishes the output tile, or a task of the opcode ``final`` does.
    """
    n, k = t.sizes("w")
    parts = t.tiling.split_k
    if final and t.tiling.final == "all" and parts > 1:
        return _finished_apart(t, finished, fields, reads, shape, final)
    tiles: list[Tile] = []
    units: list[Unit] = []
    for block in t.blocks(n, k, parts):
        # A single part is finished in registers; its sum never goes through memory.
        write = (t.partial(block),) if parts > 1 else finished(block)
        tiles.append(t.fp8_tile(block, write, more=fields(block), reads=reads(block), flags=flags))
        if block.part[0] == parts - 1:
            size = 4 * (block.rows[1] - block.rows[0]) * (block.cols[1] - block.cols[0]) * parts
            members = tuple(range(len(tiles) - parts, len(tiles)))
            units.append(Unit(members, finished(block), 1, size if parts > 1 else 0))
    buffers = (t.partials(n, parts),) if parts > 1 else ()
    return [t.done(t.specialization(n, k, k // parts, shape), tiles, units, buffers)]


def _finished_apart(
    t: Tiler,
    finished: Callable[[Block], tuple[Region, ...]],
    fields: Callable[[Block], dict[str, int]],
    reads: Callable[[Block], tuple[Region, ...]],
    shape: Mapping[str, float],
    opcode: str,
) -> list[StageTiles]:
    """A split-K FP8 GEMM, and tasks that sum and finish its output tiles."""
    n, k = t.sizes("w")
    parts = t.tiling.split_k
    tiles, finals = [], []
    for block in t.blocks(n, k, parts):
        tiles.append(t.fp8_tile(block, (t.partial(block),), more=fields(block)))
        if block.part[0] != parts - 1:
            continue
        for row in range(*block.rows, FINAL_ROWS):
            rows = replace(block, rows=(row, min(row + FINAL_ROWS, block.rows[1])))
            size = (rows.rows[1] - row) * (block.cols[1] - block.cols[0])
            finals.append(
                t.tile(
                    {**rows.fields, **fields(rows)},
                    (Region(t.partials_name, (rows.rows, rows.cols)), *reads(rows)),
                    finished(rows),
                    input_bytes=4 * size * parts,
                    output_bytes=size,
                )
            )
    gemm = t.specialization(n, k, k // parts, {**shape, "apart": 1})
    band = min(t.band, FINAL_ROWS)
    final = t.specialization(n, k, k // parts, shape, band=band, opcode=opcode)
    return [
        t.done(gemm, tiles, None, (t.partials(n, parts),)),
        t.done(final, finals, name=f"{t.stage.name}.final"),
    ]


def _index_key(t: Tiler) -> list[StageTiles]:
    batch = t.batch

    def finished(block: Block) -> tuple[Region, ...]:
        regions = []
        for b, (new, _) in enumerate(batch.requests):
            first = max(block.rows[0] - batch.first_row(b), 0)
            last = min(block.rows[1] - batch.first_row(b), new)
            if first < last:
                keys = batch.new_key_range(b, first, last)
                regions.append(t.region("cache", (b, b + 1), keys, (first, last)))
        return tuple(regions)

    rope = t.graph.tensors[t.stage.operands["rope"]].shape[1]
    assert isinstance(rope, int)
    return _reduced(
        t, finished, lambda _: {}, lambda _: (), {"rope": rope}, final="index_key_final"
    )


def _index_query(t: Tiler) -> list[StageTiles]:
    heads = t.sizes("w")[0] // INDEX_DIM
    maker = t.graph.maker(t.stage.operands["gate"])
    gate_parts = t.config.of(maker.name).split_k if maker else 1
    if t.tiling.block_n != INDEX_DIM:
        raise SpecError(f"stage {t.stage.name}: block_n must be {INDEX_DIM}, one index head")

    def fields(block: Block) -> dict[str, int]:
        return {"item": block.cols[0] // INDEX_DIM, "aux": gate_parts}

    def head(block: Block) -> tuple[int, int]:
        return block.cols[0] // INDEX_DIM, block.cols[0] // INDEX_DIM + 1

    def reads(block: Block) -> tuple[Region, ...]:
        return (t.region("gate", block.rows, head(block)),)

    def finished(block: Block) -> tuple[Region, ...]:
        return (
            t.region("codes", block.rows, head(block), (0, INDEX_DIM)),
            t.region("weights", block.rows, head(block)),
        )

    rope = t.graph.tensors[t.stage.operands["rope"]].shape[1]
    assert isinstance(rope, int)
    shape = {"heads": heads, "rope": rope}
    return _reduced(t, finished, fields, reads, shape, final="index_query_final")


def _main_query(t: Tiler) -> list[StageTiles]:
    n, k = t.sizes("w")
    heads, head_dim = t.sizes("out")
    rope = t.graph.tensors[t.stage.operands["rope"]].shape[1]
    assert isinstance(rope, int)
    if head_dim % t.tiling.block_n or rope > t.tiling.block_n:
        raise SpecError(
            f"stage {t.stage.name}: block_n = {t.tiling.block_n} must divide a head of {head_dim} "
            f"and hold its {rope} rotated columns"
        )
    tiles = []
    for block in t.blocks(n, k):
        head, first = divmod(block.cols[0], head_dim)
        last = first + block.cols[1] - block.cols[0]
        write = t.region("out", block.rows, (head, head + 1), (first, last))
        flags = frozenset({"has_rope"} if last == head_dim else set())
        tiles.append(t.fp8_tile(block, (write,), more={"item": head}, flags=flags))
    return [t.done(t.specialization(n, k, k, {"heads": heads, "rope": rope}), tiles)]


def _absorb_query(t: Tiler) -> list[StageTiles]:
    heads, k, n = t.sizes("w")
    head_dim = t.sizes("a")[1]
    tiles = []
    for rows in t.row_blocks():
        for head in range(heads):
            for col in range(0, n, t.tiling.block_n):
                cols = col, min(col + t.tiling.block_n, n)
                block = Block(rows, cols, (0, k), (0, 1))
                count, width = rows[1] - rows[0], cols[1] - cols[0]
                tiles.append(
                    t.tile(
                        {**block.fields, "item": head},
                        (t.region("a", rows, (head, head + 1), (0, k)),),
                        (t.region("out", rows, (head, head + 1), cols),),
                        weight_bytes=2 * k * width,
                        input_bytes=2 * k * count,
                        output_bytes=2 * count * width,
                    )
                )
    return [t.done(t.specialization(n, k, k, {"heads": heads, "head_dim": head_dim}), tiles)]


def _index_score(t: Tiler) -> list[StageTiles]:
    batch = t.batch
    heads = t.sizes("codes")[0]
    most = max(1, Q_BLOCK_ROWS // heads)
    longest = min(most, max(new for new, _ in batch.requests))
    band = next(b for b in (1, 2, 4, 8, 16, 32, 64, 128) if b >= longest)
    tiles = []
    for b, (new, _) in enumerate(batch.requests):
        fresh = batch.new_key_range(b, 0, new)
        keys_total = batch.kv_tiles(b) * KV_TILE
        for token in range(0, new, most):
            count = min(most, new - token)
            rows = batch.first_row(b) + token, batch.first_row(b) + token + count
            for kv in range(0, keys_total, t.tiling.kv_tiles * KV_TILE):
                keys = kv, min(kv + t.tiling.kv_tiles * KV_TILE, keys_total)
                length = keys[1] - kv
                size = length * (INDEX_DIM + 4)
                new_here = keys[1] > fresh[0] and kv < fresh[1]
                fields = {
                    "row": rows[0],
                    "rows": count,
                    "item": b,
                    "kv": kv,
                    "kv_len": length,
                    "page": b * batch.table_pages + kv // INDEX_PAGE,
                    "stride": batch.logits_stride,
                    "aux": new - token,
                }
                reads = (
                    t.region("codes", rows, (0, heads), (0, INDEX_DIM)),
                    t.region("weights", rows, (0, heads)),
                    t.region("cache", (b, b + 1), keys, (0, new)),
                )
                write = t.region("logits", rows, keys)
                tiles.append(
                    t.tile(
                        fields,
                        reads,
                        (write,),
                        flags=frozenset({"has_new_keys"} if new_here else set()),
                        weight_bytes=0 if new_here else size,
                        input_bytes=count * heads * (INDEX_DIM + 4) + (size if new_here else 0),
                        output_bytes=4 * count * length,
                    )
                )
    spec = t.specialization(KV_TILE, INDEX_DIM, INDEX_DIM, {"heads": heads}, band=band)
    return [t.done(spec, tiles)]


def _gemm_swiglu(t: Tiler) -> list[StageTiles]:
    rows2, k = t.sizes("w")
    n = rows2 // 2
    tiles = []
    for block in t.blocks(n, k):
        groups = block.cols[0] // GROUP, -(-block.cols[1] // GROUP)
        writes = (t.region("codes", block.rows, block.cols), t.region("scales", block.rows, groups))
        weight_rows = 2 * (block.cols[1] - block.cols[0])
        tiles.append(t.fp8_tile(block, writes, weight_rows=weight_rows))
    return [t.done(t.specialization(n, k, k), tiles)]


def _gemm_store(t: Tiler) -> list[StageTiles]:
    def finished(block: Block) -> tuple[Region, ...]:
        return (t.region("out", block.rows, block.cols),)

    def reads(block: Block) -> tuple[Region, ...]:
        return (t.region("residual", block.rows, block.cols),)

    return _reduced(t, finished, lambda _: {}, reads, {}, frozenset({"has_residual"}))


_TILERS: Final[dict[str, Callable[[Tiler], list[StageTiles]]]] = {
    "norm_quant": _norm_quant,
    "qkv_a": _qkv_a,
    "head_gate": _head_gate,
    "index_key": _index_key,
    "index_query": _index_query,
    "main_query": _main_query,
    "absorb_query": _absorb_query,
    "index_score": _index_score,
    "gemm_swiglu": _gemm_swiglu,
    "gemm_store": _gemm_store,
}


def tile_graph(graph: StageGraph, batch: Batch, config: TileConfig) -> tuple[StageTiles, ...]:
    """Cuts every stage of a graph.

    Returns:
        The stages as tasks, in the graph's order; a stage whose rows are finished by tasks of
        their own contributes two entries.
    """
    return tuple(
        tiled
        for stage in graph.stages
        for tiled in _TILERS[stage.opcode](Tiler(graph, stage, batch, config))
    )
