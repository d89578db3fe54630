"""Encoding: a plan as the tensors that the kernel reads.

    instructions   uint32 [queues, depth, 32], one 128-byte record per task
    operand table  uint64 [rows, 16], addresses by operand slot; a row per stage
    counters       uint32 [events + reductions (+ tickets)], zero before the first run of a plan

Positions in a record, opcodes, flags and slots come from ``instruction.hpp`` through the compiled
module: this file knows them by name only. New addresses change the operand table alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamoe import native
from megamoe.attention_pre.passes import RELAY
from megamoe.attention_pre.plan import Buffer, KernelPlan
from megamoe.attention_pre.tiling import Specialization
from megamoe.errors import SpecError

__all__ = ["EncodedPlan", "InstructionFormat", "encode", "instruction_format", "operand_table"]


@dataclass(frozen=True)
class InstructionFormat:
    """The record, as ``describe_instruction`` states it.

    Attributes:
        words: uint32 words of a record.
        max_waits: event waits of a record.
        max_signals: event signals of a record.
        operand_slots: addresses of an operand row.
        no_counter: value of an unused event or counter field.
        counter_stride: words between two counters in device memory.
        fields: name to (first word, words).
        flags: name to bit value.
        opcodes: name to number.
        operands: opcode name to slot names to slots.
    """

    words: int
    max_waits: int
    max_signals: int
    operand_slots: int
    no_counter: int
    counter_stride: int
    fields: Mapping[str, tuple[int, int]]
    flags: Mapping[str, int]
    opcodes: Mapping[str, int]
    operands: Mapping[str, Mapping[str, int]]

    @staticmethod
    def from_description(description: Mapping[str, Any]) -> InstructionFormat:
        """The format from ``describe_instruction()``'s dictionary."""
        return InstructionFormat(**description)

    def set(self, record: NDArray[np.uint32], field: str, *values: int) -> None:
        """Writes the first words of a field.

        Raises:
            SpecError: the record has no such field, or the field no such room.
        """
        if field not in self.fields:
            raise SpecError(f"instructions have no field {field!r}: {', '.join(self.fields)}")
        first, words = self.fields[field]
        if len(values) > words:
            raise SpecError(f"field {field} holds {words} words, not {len(values)}")
        record[first : first + len(values)] = values

    def get(self, record: NDArray[np.uint32], field: str) -> int:
        """A one-word field."""
        return int(record[self.fields[field][0]])

    def get_all(self, record: NDArray[np.uint32], field: str) -> list[int]:
        """Every word of a field."""
        first, words = self.fields[field]
        return [int(v) for v in record[first : first + words]]

    def opcode_name(self, number: int) -> str | None:
        """The name of an opcode, or None."""
        return next((name for name, value in self.opcodes.items() if value == number), None)

    def has(self, record: NDArray[np.uint32], flag: str) -> bool:
        """Whether a flag of the record is set."""
        return bool(self.get(record, "flags") & self.flags[flag])


@cache
def instruction_format() -> InstructionFormat:
    """The format of the compiled module."""
    return InstructionFormat.from_description(native.describe_instruction())


@dataclass(frozen=True)
class EncodedPlan:
    """What goes to the device, and the names that bind it to memory.

    Attributes:
        instructions: uint32 [queues, depth, words].
        num_workers: resident CTAs; they share the only queue of a dynamic plan.
        dynamic: whether workers take tickets from one queue.
        num_events: counters of events; arrival counters follow, then a dynamic plan's tickets.
        num_counters: all counters.
        specializations: by ``spec_id``.
        operand_slots: per row, slot to buffer name.
        buffers: by name.
        tasks: int32 [queues, depth], task of each record, -1 for padding; for traces.
        row_names: stage of each operand row; for traces.
    """

    instructions: NDArray[np.uint32]
    num_workers: int
    dynamic: bool
    num_events: int
    num_counters: int
    specializations: tuple[Specialization, ...]
    operand_slots: tuple[Mapping[int, str], ...]
    buffers: Mapping[str, Buffer]
    tasks: NDArray[np.int32]
    row_names: tuple[str, ...]

    def new_counters(self) -> NDArray[np.uint32]:
        """Counters for a first run: epoch 1."""
        return np.zeros(self.num_counters, np.uint32)


def encode(plan: KernelPlan, fmt: InstructionFormat | None = None) -> EncodedPlan:
    """Encodes a plan.

    Raises:
        SpecError: the plan names an opcode, field, flag or operand that the record does not have,
            or more events than it holds.
    """
    fmt = fmt or instruction_format()
    queues, depth = len(plan.queues.workers), plan.queues.depth
    instructions = np.empty((queues, depth, fmt.words), np.uint32)
    tasks = np.full((queues, depth), -1, np.int32)
    instructions[:] = _blank(fmt)
    arrivals = plan.reduce_counters
    templates = [_template(fmt, plan, s) for s in range(len(plan.graph.stages))]
    for q, queue in enumerate(plan.queues.workers):
        for i, task in enumerate(queue):
            tasks[q, i] = task
            record = instructions[q, i]
            record[:] = templates[plan.graph.tasks[task].stage]
            _fill(fmt, record, plan, task, arrivals)
    slots = tuple(
        _slots(fmt, plan.stage_graph.stage(name).opcode, row)
        for name, row in zip(plan.rows, plan.operands, strict=True)
    )
    return EncodedPlan(
        instructions=instructions,
        num_workers=plan.queues.num_workers,
        dynamic=plan.queues.dynamic,
        num_events=len(plan.graph.events),
        num_counters=plan.num_counters + plan.queues.dynamic,
        specializations=plan.specializations,
        operand_slots=slots,
        buffers=plan.buffers,
        tasks=tasks,
        row_names=plan.rows,
    )


def _blank(fmt: InstructionFormat) -> NDArray[np.uint32]:
    """A no_op without events."""
    record = np.zeros(fmt.words, np.uint32)
    fmt.set(record, "opcode", fmt.opcodes[RELAY])
    fmt.set(record, "wait_event", *[fmt.no_counter] * fmt.max_waits)
    fmt.set(record, "signal_event", *[fmt.no_counter] * fmt.max_signals)
    fmt.set(record, "reduce_counter", fmt.no_counter)
    return record


def _template(fmt: InstructionFormat, plan: KernelPlan, stage: int) -> NDArray[np.uint32]:
    """What the tasks of a stage have in common."""
    tiled = plan.graph.stages[stage]
    record = _blank(fmt)
    if tiled.opcode not in fmt.opcodes:
        known = ", ".join(fmt.opcodes)
        raise SpecError(f"stage {tiled.name}: no opcode {tiled.opcode!r}; the kernel has {known}")
    fmt.set(record, "opcode", fmt.opcodes[tiled.opcode])
    if tiled.opcode != RELAY:
        fmt.set(record, "spec_id", plan.spec_ids[stage])
        fmt.set(record, "operand_row", plan.rows.index(tiled.row))
    return record


def _fill(
    fmt: InstructionFormat,
    record: NDArray[np.uint32],
    plan: KernelPlan,
    task: int,
    arrivals: Mapping[int, int],
) -> None:
    graph = plan.graph
    tile = graph.tasks[task].tile
    for name, value in tile.fields:
        fmt.set(record, name, value)
    fmt.set(record, "flags", sum(fmt.flags[name] for name in tile.flags))
    unit = graph.units[graph.tasks[task].unit]
    if unit.index in arrivals:
        fmt.set(record, "reduce_counter", arrivals[unit.index])
        fmt.set(record, "reduce_total", len(unit.tasks))
    _events(fmt, record, "wait", [(e, graph.events[e].threshold) for e in graph.waits[task]])
    _events(fmt, record, "signal", [(e, unit.publications) for e in graph.signals[unit.index]])


def _events(
    fmt: InstructionFormat,
    record: NDArray[np.uint32],
    what: str,
    events: Sequence[tuple[int, int]],
) -> None:
    amount = "threshold" if what == "wait" else "increment"
    fmt.set(record, f"{what}_event", *(event for event, _ in events))
    fmt.set(record, f"{what}_{amount}", *(count for _, count in events))


def _slots(fmt: InstructionFormat, opcode: str, row: Mapping[str, str]) -> dict[int, str]:
    known = fmt.operands[opcode]
    if unknown := sorted(set(row) - set(known)):
        raise SpecError(f"opcode {opcode} has no operands {unknown}: it has {', '.join(known)}")
    return {known[role]: name for role, name in row.items()}


def operand_table(
    encoded: EncodedPlan, addresses: Mapping[str, int], fmt: InstructionFormat | None = None
) -> NDArray[np.uint64]:
    """The pointer table: uint64 [rows, 16], zero in unused slots.

    Args:
        encoded: the plan.
        addresses: of every buffer the plan names.
        fmt: of the record.

    Raises:
        SpecError: an address is missing.
    """
    fmt = fmt or instruction_format()
    table = np.zeros((len(encoded.operand_slots), fmt.operand_slots), np.uint64)
    for row, slots in enumerate(encoded.operand_slots):
        for slot, name in slots.items():
            if name not in addresses:
                raise SpecError(
                    f"no address for {name!r}, operand of stage {encoded.row_names[row]}: "
                    f"the plan needs {', '.join(encoded.buffers)}"
                )
            table[row, slot] = addresses[name]
    return table
