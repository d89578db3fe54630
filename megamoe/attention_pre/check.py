"""What is wrong with encoded records, as far as it shows without running them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megamoe.attention_pre.encode import InstructionFormat, instruction_format
from megamoe.attention_pre.tile_bodies import BODIES
from megamoe.errors import MegaMoeError

__all__ = [
    "FaultKind",
    "PlanFault",
    "Totals",
    "check_instructions",
    "event_pairs",
    "place_name",
    "totals_of",
]

FaultKind = Literal["address", "deadlock", "format", "lost event", "race", "threshold"]


class PlanFault(MegaMoeError):
    """An encoded plan that some execution of it would break.

    Attributes:
        kind: ``"address"`` an operand that is no buffer; ``"deadlock"`` workers that can't go on;
            ``"format"`` a record that no body accepts; ``"lost event"`` a counter without enough
            signals; ``"race"`` conflicting accesses that no event orders; ``"threshold"`` a wait
            for less or more than its event counts.
    """

    def __init__(self, kind: FaultKind, message: str) -> None:
        self.kind: FaultKind = kind
        super().__init__(f"{kind}: {message}")


def place_name(place: tuple[int, int]) -> str:
    """An instruction by queue and index."""
    return f"instruction [{place[0]}, {place[1]}]"


@dataclass
class Totals:
    """What one run adds to each counter: signals of events, arrivals of units."""

    events: dict[int, int] = field(default_factory=dict)
    arrivals: dict[int, int] = field(default_factory=dict)


def event_pairs(
    fmt: InstructionFormat, record: NDArray[np.uint32], what: str, amount: str
) -> list[tuple[int, int]]:
    """(event, threshold or increment) of the used slots of a record."""
    events = fmt.get_all(record, f"{what}_event")
    counts = fmt.get_all(record, f"{what}_{amount}")
    return [(e, c) for e, c in zip(events, counts, strict=True) if e != fmt.no_counter]


def totals_of(instructions: NDArray[np.uint32], fmt: InstructionFormat) -> Totals:
    """Sums over all records; the members of a unit signal once together."""
    totals = Totals()
    seen: set[int] = set()
    for record in instructions.reshape(-1, fmt.words):
        counter = fmt.get(record, "reduce_counter")
        if counter != fmt.no_counter:
            totals.arrivals[counter] = totals.arrivals.get(counter, 0) + 1
            if counter in seen:
                continue
            seen.add(counter)
        for event, increment in event_pairs(fmt, record, "signal", "increment"):
            totals.events[event] = totals.events.get(event, 0) + increment
    return totals


def check_instructions(
    instructions: NDArray[np.uint32], num_events: int, fmt: InstructionFormat | None = None
) -> list[PlanFault]:
    """Everything wrong with the records that shows without running them.

    Checks opcodes, counter numbers, that each wait asks for exactly what its event counts (only
    then does it order anything), and that a unit has as many tasks as its arrivals say.
    """
    fmt = fmt or instruction_format()
    faults: list[PlanFault] = []
    totals = totals_of(instructions, fmt)
    for place in np.ndindex(*instructions.shape[:2]):
        record = instructions[place]
        where = place_name((place[0], place[1]))
        if fmt.opcode_name(fmt.get(record, "opcode")) not in BODIES:
            opcode = fmt.get(record, "opcode")
            faults.append(PlanFault("format", f"{where} has opcode {opcode}, which has no body"))
        counter = fmt.get(record, "reduce_counter")
        if counter != fmt.no_counter:
            want, have = fmt.get(record, "reduce_total"), totals.arrivals[counter]
            if want != have:
                text = f"{where} is one of {want} tasks of unit {counter}, which has {have}"
                faults.append(PlanFault("threshold", text))
        for event, threshold in event_pairs(fmt, record, "wait", "threshold"):
            have = totals.events.get(event, 0)
            if event >= num_events:
                faults.append(
                    PlanFault("format", f"{where} waits for event {event} of {num_events}")
                )
            elif have == 0:
                faults.append(
                    PlanFault("lost event", f"{where} waits for event {event}: no signal")
                )
            elif threshold != have:
                text = f"{where} waits for {threshold} of event {event}, which counts {have}"
                faults.append(PlanFault("threshold", text))
        for event, _ in event_pairs(fmt, record, "signal", "increment"):
            if event >= num_events:
                faults.append(PlanFault("format", f"{where} signals event {event} of {num_events}"))
    return faults
