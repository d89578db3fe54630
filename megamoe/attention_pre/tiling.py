"""Tiles: how each stage is cut into tasks, and what a task reads and writes.

A stage is cut along token rows, output columns and (where its body can reduce) K. ``seed_tiles``
repeats the published 148-SM plan, ``choose_tiles`` cuts for any number of workers, rows and keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from megamoe.attention_pre.regions import Region
from megamoe.attention_pre.stages import Stage, StageGraph
from megamoe.errors import SpecError
from megamoe.spec import GROUP, INDEX_PAGE

__all__ = [
    "KV_TILE",
    "M_BANDS",
    "Batch",
    "Finish",
    "Specialization",
    "StageTiles",
    "Tile",
    "TileConfig",
    "Tiling",
    "Unit",
    "choose_tiles",
    "m_band",
    "seed_tiles",
]

Finish = Literal["last", "rows", "all"]
KV_TILE: Final = 256
"""Keys of one index-score step: four pages."""
M_BANDS: Final = (8, 16, 32, 64, 128)
"""Token rows that a compiled GEMM body can hold. More rows are cut into blocks of the last."""
MIN_SPLIT_K: Final = 512
"""Columns of K below which a split costs more in handing over partials than it gains."""
Q_BLOCK_ROWS: Final = 128
"""Query rows (tokens x index heads) of one index-score task."""


def m_band(rows: int) -> int:
    """The smallest band that holds ``rows``, or the largest one."""
    return next((band for band in M_BANDS if band >= rows), M_BANDS[-1])


@dataclass(frozen=True)
class Batch:
    """The requests of one call.

    Plans depend on lengths rounded up to ``granule``, not on the exact ones: the kernel reads
    lengths from memory, so a plan stays valid while no request passes into its next granule.
    A long granule means fewer plans and more score tasks that find nothing to do.

    Attributes:
        requests: (new tokens, keys with the new tokens) of each request. Token rows follow the
            requests' order.
        max_pages: columns of the block table; 0 takes what the longest request needs.
        granule: keys by which a plan knows a length; a multiple of 256.
    """

    requests: tuple[tuple[int, int], ...]
    max_pages: int = 0
    granule: int = KV_TILE

    def __post_init__(self) -> None:
        if self.granule < KV_TILE or self.granule % KV_TILE:
            raise SpecError(f"granule = {self.granule}: must be a positive multiple of {KV_TILE}")
        for new, keys in self.requests:
            if not 1 <= new <= keys:
                raise SpecError(f"request ({new} new tokens, {keys} keys): need 1 <= new <= keys")
        if not self.requests:
            raise SpecError("a batch needs at least one request")
        if self.max_pages and self.max_pages < self.table_pages:
            raise SpecError(f"max_pages = {self.max_pages}: the batch needs {self.table_pages}")

    @property
    def rows(self) -> int:
        """M, token rows."""
        return sum(new for new, _ in self.requests)

    @property
    def table_pages(self) -> int:
        """Columns of the block table."""
        return max(self.max_pages, self.logits_stride // INDEX_PAGE)

    @property
    def logits_stride(self) -> int:
        """Columns of the score matrix: every tile of the longest request."""
        return max(self.kv_tiles(b) for b in range(len(self.requests))) * KV_TILE

    def kv_tiles(self, request: int) -> int:
        """Key tiles of a request, to the end of its granule."""
        return -(-self.requests[request][1] // self.granule) * (self.granule // KV_TILE)

    def first_row(self, request: int) -> int:
        """First token row of a request."""
        return sum(new for new, _ in self.requests[:request])

    def bucket(self) -> Batch:
        """The batch with every length at the end of its granule: equal buckets, equal plans."""
        full = tuple((new, self.kv_tiles(b) * KV_TILE) for b, (new, _) in enumerate(self.requests))
        return Batch(full, self.table_pages, self.granule)

    def new_key_range(self, request: int, first: int, last: int) -> tuple[int, int]:
        """Where the keys of new tokens ``first:last`` of a request may lie, whatever its length."""
        new = self.requests[request][0]
        longest = self.kv_tiles(request) * KV_TILE
        shortest = max(longest - self.granule + 1, new)
        return shortest - new + first, longest - new + last


@dataclass(frozen=True)
class Tiling:
    """How one stage is cut.

    Attributes:
        block_n: output columns of a task.
        split_k: tasks that share the K of one output tile.
        kv_tiles: key tiles of an index-score task.
        final: who finishes what needs every part: the last part to arrive, or tasks of their own:
            of rows that need every column (``qkv_a``: a task per row), or of all sums.
    """

    block_n: int = GROUP
    split_k: int = 1
    kv_tiles: int = 1
    final: Finish = "last"


@dataclass(frozen=True)
class TileConfig:
    """Tilings by stage name, and the token rows of a GEMM task."""

    name: str
    block_m: int
    stages: Mapping[str, Tiling] = field(default_factory=dict)

    def of(self, stage: str) -> Tiling:
        """The tiling of a stage."""
        return self.stages.get(stage, Tiling())


@dataclass(frozen=True, order=True)
class Specialization:
    """What a compiled task body is specialised for: neither M nor any key length.

    ``block_n`` and ``k_tile`` are the columns and the K of a task, ``shape`` the remaining
    constants of the body by name.
    """

    opcode: str
    band: int
    n: int
    k: int
    block_n: int
    k_tile: int
    shape: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Tile:
    """One task before it has a number.

    Attributes:
        fields: values of instruction fields, by name.
        flags: names of instruction flags.
        reads: regions that another stage may have written.
        writes: regions this task alone writes: results, or partials of its unit.
        weight_bytes: what can be fetched before any event.
        input_bytes: what must wait for the events.
        output_bytes: what the task stores.
    """

    fields: tuple[tuple[str, int], ...]
    flags: frozenset[str]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    weight_bytes: int
    input_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Tasks that publish together.

    Attributes:
        tiles: indices of the stage's tiles.
        writes: what becomes readable.
        publications: what the event counters see.
        final_bytes: partials that the last task to arrive reads.
    """

    tiles: tuple[int, ...]
    writes: tuple[Region, ...]
    publications: int = 1
    final_bytes: int = 0


@dataclass(frozen=True)
class StageTiles:
    """A stage as tasks. ``name`` differs from ``row`` where a stage became two kinds of tasks."""

    name: str
    opcode: str
    row: str
    specialization: Specialization
    tiles: tuple[Tile, ...]
    units: tuple[Unit, ...]
    buffers: tuple[tuple[str, tuple[int, ...], str], ...] = ()


# ------------------------------------------------------------ configurations


def seed_tiles() -> TileConfig:
    """The published plan for 148 SMs, M = 16: 732 tasks."""
    return TileConfig(
        "seed",
        16,
        {
            "B0": Tiling(split_k=4),
            "C0": Tiling(block_n=32, split_k=48),
            "B1": Tiling(split_k=8),
            "D1": Tiling(split_k=4),
            "D2": Tiling(block_n=128),
            "E1": Tiling(kv_tiles=2),
        },
    )


def _split(k: int, tiles: int, workers: int, least: int = MIN_SPLIT_K) -> int:
    """The most equal parts of K, each of at least ``least`` columns, that one wave can hold."""
    blocks = k // GROUP
    fits = (s for s in range(1, blocks + 1) if blocks % s == 0 and tiles * s <= workers)
    return max((s for s in fits if k // s >= least), default=1)


def choose_tiles(
    graph: StageGraph, batch: Batch, num_workers: int, *, final: Finish = "all"
) -> TileConfig:
    """Cuts every stage into at most one wave of ``num_workers`` tasks where its body allows.

    Args:
        graph: the stages.
        batch: the requests.
        num_workers: resident CTAs.
        final: see ``Tiling.final``.
    """
    block_m = m_band(batch.rows)
    m_tiles = -(-batch.rows // block_m)
    stages: dict[str, Tiling] = {}
    for stage in graph.stages:
        operands = {role: graph.tensors[name] for role, name in stage.operands.items()}
        if stage.opcode in ("qkv_a", "index_key", "index_query", "gemm_store"):
            n, k = _sizes(operands["w"].shape)
            split = _split(k, m_tiles * -(-n // GROUP), num_workers)
            stages[stage.name] = Tiling(split_k=split, final=final)
        elif stage.opcode == "head_gate":
            n, k = _sizes(operands["w"].shape)
            stages[stage.name] = Tiling(block_n=n, split_k=_split(k, m_tiles, num_workers))
        elif stage.opcode == "absorb_query":
            heads, _, n = _sizes(operands["w"].shape)
            wide = (b for b in (128, 256, 512) if n % b == 0)
            few = (b for b in wide if m_tiles * heads * (n // b) <= num_workers)
            stages[stage.name] = Tiling(
                block_n=min(few, default=max(b for b in (128, 256, 512) if n % b == 0))
            )
        elif stage.opcode == "index_score":
            heads = _sizes(operands["codes"].shape[1:])[0]
            per_block = max(1, Q_BLOCK_ROWS // heads)
            stages[stage.name] = Tiling(kv_tiles=_score_tiles(batch, per_block, num_workers))
    return TileConfig(f"wave{num_workers}", block_m, stages)


def _score_tiles(batch: Batch, per_block: int, workers: int) -> int:
    """Key tiles of a score task with which the fullest worker has least to do.

    A task costs about as much as one tile beside its tiles; among equals, tasks are long.
    """
    blocks = Counter[int]()
    for b, (new, _) in enumerate(batch.requests):
        blocks[batch.kv_tiles(b)] += -(-new // per_block)

    def fullest(length: int) -> tuple[int, int]:
        tasks = sum(-(-tiles // length) * count for tiles, count in blocks.items())
        return -(-tasks // workers) * (length + 1), -length

    return min(range(1, max(blocks) + 1), key=fullest)


def _sizes(shape: Sequence[int | str]) -> tuple[int, ...]:
    sizes = tuple(s for s in shape if isinstance(s, int))
    if len(sizes) != len(shape):
        raise SpecError(f"shape {tuple(shape)}: sizes of weights must be numbers")
    return sizes


def operand_sizes(graph: StageGraph, stage: Stage, role: str) -> tuple[int, ...]:
    """The sizes of an operand whose shape has no symbol after its first dimension."""
    shape = graph.tensors[stage.operands[role]].shape
    return _sizes(shape if isinstance(shape[0], int) else shape[1:])
