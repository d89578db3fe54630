"""The kernels of a planned graph: a stage each, or the two halves of a split-K sum.

    standalone_kernels   plan -> eleven kernels, with what each reads and stores
    compile_kernel       one of them -> cubin (no GPU needed)

Names are the stages', with ``p`` (partial) and ``f`` (final) behind where a stage became two:
A0, B0p, B0f, C0, B1p, B1f, D1p, D1f, D0, D2, E1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from megamoe import jit
from megamoe.attention_pre.encode import InstructionFormat, instruction_format
from megamoe.attention_pre.grid import partials_name
from megamoe.attention_pre.passes import RELAY
from megamoe.attention_pre.plan import KernelPlan
from megamoe.attention_pre.stages import Stage
from megamoe.attention_pre.tilers import FINAL_ROWS
from megamoe.attention_pre.tiling import Q_BLOCK_ROWS, Specialization, StageTiles, Tile, Unit
from megamoe.backends.attention import spec_macro
from megamoe.cmp.task_grid import WHOLE_ROWS, TaskGrid, agrees, task_grid
from megamoe.errors import SpecError
from megamoe.spec import GROUP

__all__ = [
    "PARTS",
    "WAITS",
    "Part",
    "Shape",
    "StandaloneKernel",
    "Wait",
    "compile_kernel",
    "kernel_defines",
    "kernel_shape",
    "standalone_kernels",
]

Part = Literal["whole", "partial", "final"]
Wait = Literal["entry", "prologue", "late", "never"]
PARTS: Final[tuple[Part, ...]] = ("whole", "partial", "final")
WAITS: Final[tuple[Wait, ...]] = ("entry", "prologue", "late", "never")

_FINISHER_READS: Final = {"index_query": ("gate",), "gemm_store": ("residual",)}
"""Operands that the second half reads besides the parts; all others belong to the first."""
_MOST_PAGES: Final = 13
_AT_ONCE: Final = 4
_PARTS_AT_ONCE: Final = 6
_WARPS: Final = 8
"""That do maths."""


@dataclass(frozen=True)
class Shape:
    """How a kernel is compiled, besides its specialisation.

    Attributes:
        weight_pages: of 16 KiB, for weights or keys; 0: the kernel loads nothing through pages.
        input_pages: of 16 KiB, or less where one holds all inputs.
        ctas: that an SM must be able to hold at once: bounds the registers.
        registers: that a thread may have, instead of what ``ctas`` leaves it.
        at_once: blocks of K that the main loop holds at most before it releases one; of a kernel
            that sums parts, parts that are asked for at once; 0: what the body chooses.
    """

    weight_pages: int
    input_pages: int
    ctas: int
    at_once: int = 4
    registers: int = 0


@dataclass(frozen=True)
class StandaloneKernel:
    """One kernel of the graph.

    Attributes:
        name: of the stage, and of the half.
        row: the stage, whose operand row the kernel uses.
        part: which half.
        specialization: of its body.
        reads: tensors that other kernels may store.
        writes: tensors it stores.
        task: the record that its tasks have in common: uint32 [words].
        grid: each CTA's task; None where ``table`` says it.
        table: uint32 [CTAs, words], for tasks that follow no grid.
        ctas: thread blocks.
    """

    name: str
    row: str
    part: Part
    specialization: Specialization
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    task: NDArray[np.uint32]
    grid: TaskGrid | None
    table: NDArray[np.uint32] | None
    ctas: int

    @property
    def launch(self) -> tuple[int, int, int]:
        """Thread blocks in x, y and z."""
        return self.grid.ctas if self.grid else (self.ctas, 1, 1)


def standalone_kernels(
    plan: KernelPlan,
    columns: Mapping[str, int] | None = None,
    rows: Mapping[str, int] | None = None,
) -> tuple[StandaloneKernel, ...]:
    """The plan's stages as kernels, in an order in which each follows its producers.

    Args:
        plan: made with ``final="rows"`` or ``"all"``.
        columns: by stage, the most that a CTA of ``absorb_query`` computes; the plan's tiles
            otherwise. Small CTAs find room sooner.
        rows: by kernel, the most that a CTA sums and finishes; 16 otherwise.

    Raises:
        SpecError: the plan finishes rows in the last part to arrive (``final="last"``), which a
            kernel of its own cannot.
    """
    fmt = instruction_format()
    kernels: list[StandaloneKernel] = []
    several = {stage.row for stage in plan.graph.stages if stage.name != stage.row}
    for tiled in plan.graph.stages:
        if tiled.opcode == RELAY:
            continue
        stage = plan.stage_graph.stage(tiled.row)
        if tiled.opcode == "qkv_a" and stage.name not in several:
            raise SpecError(
                f"stage {stage.name}: rows are finished by the last part to arrive; plan with "
                'final="rows" to run it as kernels of their own'
            )
        tiled = _narrow(tiled, (columns or {}).get(stage.name, 0))
        kernels += _kernels_of(fmt, plan, stage, tiled, (rows or {}).get(f"{stage.name}f", 0))
    return tuple(kernels)


def _narrow(tiled: StageTiles, columns: int) -> StageTiles:
    """The stage with tasks of at most ``columns`` columns."""
    spec = tiled.specialization
    if not 0 < columns < spec.block_n or tiled.opcode != "absorb_query":
        return tiled
    cut = []
    for tile in tiled.tiles:
        fields = dict(tile.fields)
        end = fields["col"] + fields["cols"]
        for col in range(fields["col"], end, columns):
            some = fields | {"col": col, "cols": min(columns, end - col)}
            cut.append(replace(tile, fields=tuple(some.items())))
    units = tuple(Unit((i,), ()) for i in range(len(cut)))
    return replace(
        tiled, specialization=replace(spec, block_n=columns), tiles=tuple(cut), units=units
    )


def _kernels_of(
    fmt: InstructionFormat, plan: KernelPlan, stage: Stage, tiled: StageTiles, count: int
) -> list[StandaloneKernel]:
    made = {t for s in plan.stage_graph.stages for t in s.writes}
    reads = [t for t in stage.reads if t in made]
    late = {stage.operands[role] for role in _FINISHER_READS.get(stage.opcode, ())}
    parts = partials_name(stage)
    rows = plan.batch.rows
    finals = (parts, *(t for t in reads if t in late))
    if tiled.name != stage.name:  # finished by tasks of their own
        if tiled.opcode == "qkv_a_final":
            kernel = _kernel(fmt, tiled, stage, tiled.tiles, "whole", rows)
        else:
            kernel = _final(fmt, tiled, stage, tiled.tiles, rows, count)
        return [replace(kernel, name=f"{stage.name}f", reads=finals, writes=stage.writes)]
    apart = bool(dict(tiled.specialization.shape).get("apart"))
    if len(tiled.units) == len(tiled.tiles) and not apart:
        kernel = _kernel(fmt, tiled, stage, tiled.tiles, "whole", rows)
        return [replace(kernel, reads=tuple(reads), writes=stage.writes)]
    first = _kernel(fmt, tiled, stage, tiled.tiles, "partial", rows)
    first = replace(
        first,
        name=f"{stage.name}p",
        reads=tuple(t for t in reads if t not in late),
        writes=(parts,),
    )
    if apart:
        return [first]
    # A task per output tile and 16 rows, from the last part's record.
    tiles = [tiled.tiles[unit.tiles[-1]] for unit in tiled.units]
    second = _final(fmt, tiled, stage, tiles, rows, count)
    return [first, replace(second, name=f"{stage.name}f", reads=finals, writes=stage.writes)]


def _final(
    fmt: InstructionFormat,
    tiled: StageTiles,
    stage: Stage,
    tiles: Sequence[Tile],
    rows: int,
    count: int,
) -> StandaloneKernel:
    """The kernel that sums and finishes the parts of ``tiles``, one of each output tile.

    A CTA has at most ``count`` rows; 0 chooses.
    """
    spec = tiled.specialization
    band = min(FINAL_ROWS, spec.band)
    count = min(count or band, band)
    if count <= _WARPS:  # a row for each of the CTA's warps
        band = min(band, _WARPS)
    spec = replace(spec, opcode=stage.opcode, band=band)
    final = replace(tiled, name=stage.name, opcode=stage.opcode, specialization=spec)
    return _kernel(fmt, final, stage, _by_rows(tiles, count), "final", rows)


def _by_rows(tiles: Sequence[Tile], band: int) -> tuple[Tile, ...]:
    """Tasks of at most ``band`` rows, row block by row block."""
    cut: list[tuple[int, int, Tile]] = []
    for i, tile in enumerate(tiles):
        fields = dict(tile.fields)
        end = fields["row"] + fields["rows"]
        for row in range(fields["row"], end, band):
            some = fields | {"row": row, "rows": min(band, end - row)}
            cut.append((row, i, replace(tile, fields=tuple(some.items()))))
    return tuple(tile for _, _, tile in sorted(cut, key=lambda c: c[:2]))


def _kernel(
    fmt: InstructionFormat,
    tiled: StageTiles,
    stage: Stage,
    tiles: Sequence[Tile],
    part: Part,
    rows: int,
) -> StandaloneKernel:
    records = np.zeros((len(tiles), fmt.words), np.uint32)
    for record, tile in zip(records, tiles, strict=True):
        fmt.set(record, "opcode", fmt.opcodes[tiled.opcode])
        fmt.set(record, "reduce_counter", fmt.no_counter)
        # A first stage waits for nothing; what the events are doesn't matter to a kernel.
        waits = [fmt.no_counter] * fmt.max_waits
        fmt.set(record, "wait_event", *([0, *waits[1:]] if tile.reads else waits))
        fmt.set(record, "signal_event", *[fmt.no_counter] * fmt.max_signals)
        for name, value in tile.fields:
            fmt.set(record, name, value)
        fmt.set(record, "flags", sum(fmt.flags[name] for name in tile.flags))
    task = records[0].copy()
    final = part == "final"
    grid = task_grid(tiled, dict(tiles[0].fields), final=final, ctas=len(tiles), rows=rows)
    if grid is not None:
        own = fmt.flags["has_rope"] | fmt.flags["has_new_keys"]
        fmt.set(task, "flags", fmt.get(task, "flags") & ~own)
        if not agrees(fmt, records, task, grid, final=final):
            grid = None
    return StandaloneKernel(
        name=tiled.name,
        row=stage.name,
        part=part,
        specialization=tiled.specialization,
        reads=(),
        writes=(),
        task=task,
        grid=grid,
        table=None if grid else records,
        ctas=len(tiles),
    )


def kernel_shape(
    kernel: StandaloneKernel,
    weight_pages: int = 0,
    ctas: int = 0,
    at_once: int = 0,
    registers: int = 0,
) -> Shape:
    """Pages, resident CTAs, blocks in flight and registers that suit a kernel; 0 chooses.

    Small bands leave room for two CTAs, so that a consumer can begin beside its producer.
    """
    spec = kernel.specialization
    if kernel.part == "final" or spec.opcode in WHOLE_ROWS:
        # A row of the first projection keeps its parts in registers: 168 of them.
        whole_rows = spec.opcode == "qkv_a_final"
        parts = at_once or (_PARTS_AT_ONCE if whole_rows else 0)
        return Shape(0, 0, ctas or (1 if whole_rows else 2), parts, registers)
    if spec.opcode == "index_score":
        rows = spec.band * int(dict(spec.shape)["heads"])
        registers = registers if rows <= Q_BLOCK_ROWS else 0
        return Shape(weight_pages or 2, 1, ctas or (1 if rows > 64 else 2), registers=registers)
    tiles = 2 if spec.opcode == "gemm_swiglu" else -(-spec.block_n // GROUP)
    bf16 = spec.opcode in ("head_gate", "absorb_query")
    blocks = spec.k_tile * (2 if bf16 else 1) // GROUP
    per_page = GROUP // spec.band
    # Blocks that a main loop holds at once (``most_at_once`` of csrc/attention_pre/ops).
    width = spec.band * tiles
    at_once, ctas = at_once or _AT_ONCE, ctas or 2
    if spec.band > 16:  # registers are short
        ctas, registers = 2 if spec.band <= 32 else 1, 0
        at_once = at_once if bf16 else min(at_once, 2)
    most = min(at_once, 4 if bf16 else 4 // tiles if width <= 32 else 2 if width <= 64 else 1)
    held = min(most, blocks)
    if bf16:
        held = next((d for d in range(most, 1, -1) if blocks % d == 0), 1)
    inputs = min(-(-blocks // per_page), 3 if spec.band <= 32 else 5)
    if bf16 and blocks > per_page:
        inputs = -(-held // per_page) + 1
    chosen = weight_pages or min(blocks * tiles, 8, 12 - inputs)
    pages = min(max(chosen, held * tiles), blocks * tiles, _MOST_PAGES - inputs)
    return Shape(pages, inputs, ctas, at_once, registers)


def compile_kernel(
    specialization: Specialization,
    part: Part,
    shape: Shape,
    *,
    wait: Wait = "late",
    trace: bool = False,
) -> jit.Cubin:
    """One kernel. Needs no GPU.

    Args:
        specialization: of its body.
        part: which half of the stage.
        shape: pages and resident CTAs.
        wait: where it waits for its producers. ``"late"``: before the first read of what they
            store, weights before; ``"prologue"``: after barriers and descriptors; ``"entry"``:
            first of all; ``"never"``: wrong, planted by tests.
        trace: whether its CTAs note their times.
    """
    return jit.compile_cubin("cmp/cmp.cu", kernel_defines(specialization, part, shape, wait, trace))


def kernel_defines(
    specialization: Specialization, part: Part, shape: Shape, wait: Wait, trace: bool = False
) -> dict[str, int | str]:
    """The macros of ``compile_kernel``."""
    defines: dict[str, int | str] = {
        "MEGAMOE_ATTENTION_SPECS": spec_macro([specialization]),
        "MEGAMOE_ATTENTION_STANDALONE": 1,
        "MEGAMOE_ATTENTION_SLOTS": 1,
        "MEGAMOE_ATTENTION_WEIGHT_PAGES": shape.weight_pages,
        "MEGAMOE_ATTENTION_INPUT_PAGES": shape.input_pages,
        "MEGAMOE_CMP_CTAS": shape.ctas,
        "MEGAMOE_CMP_PART": PARTS.index(part),
    }
    if shape.registers:
        defines["MEGAMOE_CMP_REGISTERS"] = shape.registers
    if trace:
        defines["MEGAMOE_ATTENTION_TRACE"] = 1
    if shape.at_once:
        whole_rows = specialization.opcode == "qkv_a_final"
        what = "PARTS" if whole_rows else "SUMS" if part == "final" else "BLOCKS"
        defines[f"MEGAMOE_ATTENTION_{what}_AT_ONCE"] = shape.at_once
    if wait == "never":
        defines["MEGAMOE_CMP_NEVER_WAIT"] = 1
    else:
        defines["MEGAMOE_CMP_WAIT"] = WAITS.index(wait)
    return defines
