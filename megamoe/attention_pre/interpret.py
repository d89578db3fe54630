"""The interpreter: runs an encoded plan on the CPU, and finds what is wrong with it.

It reads what the device reads: instruction tensor, operand addresses, counters. Workers are
interleaved at random by a seed, phase by phase (wait, body, arrival, finish, signal), so that every
seed is another execution that the device could show.

Faults are found by what an execution *guarantees*, not by luck: an access must be ordered before
every conflicting one by events alone. The order of tasks in a queue gives no such guarantee (the
next instruction's loads overlap the running one's stores), nor does a wait whose threshold is less
than everything its event will count.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megamoe.attention_pre.check import (
    PlanFault,
    check_instructions,
    event_pairs,
    place_name,
    totals_of,
)
from megamoe.attention_pre.encode import EncodedPlan, InstructionFormat, instruction_format
from megamoe.attention_pre.tile_bodies import BODIES, Span
from megamoe.attention_pre.tiling import Specialization

__all__ = ["Interpreter"]


@dataclass(frozen=True, slots=True)
class _Access:
    box: tuple[Span, ...]
    task: int


class _Memory:
    """Buffers by address, and who touched which part of each."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = {t.data_ptr(): t for t in tensors}
        self._writes: dict[int, list[_Access]] = {}
        self._reads: dict[int, list[_Access]] = {}

    def note(
        self, address: int, box: tuple[Span, ...], writes: bool, task: int, before: int
    ) -> tuple[int, bool] | None:
        """Records an access; a conflicting one that is not in the bit set ``before``, if any."""
        conflict = None
        others = [(True, self._writes.get(address, ()))]
        if writes:
            others.append((False, self._reads.get(address, ())))
        for wrote, accesses in others:
            for other in accesses:
                if other.task == task or before >> other.task & 1:
                    continue
                if all(a < d and c < b for (a, b), (c, d) in zip(box, other.box, strict=True)):
                    conflict = other.task, wrote
        log = self._writes if writes else self._reads
        log.setdefault(address, []).append(_Access(box, task))
        return conflict


class _Context:
    """One instruction in execution: the ``Task`` of its body."""

    def __init__(
        self,
        run: _Run,
        record: NDArray[np.uint32],
        place: tuple[int, int],
        number: int,
        specialization: Specialization | None,
    ) -> None:
        self.record = record
        self.number = number
        self.before = 0
        self._run = run
        shape = dict(specialization.shape) if specialization else {}
        if specialization:
            shape |= {"n": specialization.n, "k": specialization.k}
        self.shape: Mapping[str, float] = shape
        opcode = run.fmt.opcode_name(self.field("opcode"))
        assert opcode is not None
        self.opcode = opcode
        self.name = f"{place_name(place)} ({opcode})"

    def field(self, name: str) -> int:
        """A field of the record."""
        return self._run.fmt.get(self.record, name)

    def flag(self, name: str) -> bool:
        """A flag of the record."""
        return self._run.fmt.has(self.record, name)

    def _address(self, role: str) -> int:
        slot = self._run.fmt.operands[self.opcode][role]
        address = int(self._run.table[self.field("operand_row"), slot])
        if address not in self._run.memory.tensors:
            raise PlanFault(
                "address",
                f"{self.name} finds {address:#x} in slot {slot} ({role}) of operand row "
                f"{self.field('operand_row')}, where no buffer begins",
            )
        return address

    def tensor(self, role: str) -> Tensor:
        """The whole operand."""
        return self._run.memory.tensors[self._address(role)]

    def note(self, role: str, box: tuple[Span, ...], *, writes: bool) -> None:
        """Records an access and checks it against all earlier ones."""
        address = self._address(role)
        found = self._run.memory.note(address, box, writes, self.number, self.before)
        if found is not None:
            other, wrote = found
            raise PlanFault(
                "race",
                f"{self.name} {'writes' if writes else 'reads'} {role} {list(box)}, which "
                f"{place_name(self._run.places[other])} "
                f"{'writes' if wrote else 'reads'}, and no event orders them",
            )

    def load(self, role: str, *box: Span) -> Tensor:
        """A copy of a box of an operand."""
        self.note(role, box, writes=False)
        return self.tensor(role)[tuple(slice(*span) for span in box)].clone()

    def store(self, role: str, value: Tensor, *box: Span) -> None:
        """Writes a box of an operand."""
        self.note(role, box, writes=True)
        target = self.tensor(role)
        target[tuple(slice(*span) for span in box)] = value.to(target.dtype)


class _Run:
    """One execution of all queues."""

    def __init__(
        self,
        plan: EncodedPlan,
        table: NDArray[np.uint64],
        counters: NDArray[np.uint32],
        epoch: int,
        memory: _Memory,
        fmt: InstructionFormat,
    ) -> None:
        self.fmt = fmt
        self.table = table
        self.memory = memory
        self.places: list[tuple[int, int]] = []
        self._plan = plan
        self._counters = counters
        self._epoch = epoch
        self._totals = totals_of(plan.instructions, fmt)
        self._clocks: dict[int, int] = {}
        self.order: list[tuple[int, int]] = []

    def reached(self, event: int, threshold: int) -> bool:
        """``event_reached`` of instruction.hpp: modulo 2^32."""
        difference = (int(self._counters[event]) - threshold * self._epoch) & 0xFFFFFFFF
        return difference < 1 << 31

    def _add(self, counter: int, amount: int) -> int:
        before = int(self._counters[counter])
        self._counters[counter] = (before + amount) & 0xFFFFFFFF
        return before

    def worker(self, index: int) -> Iterator[tuple[int, int] | None]:
        """Phases of a worker; yields the (event, threshold) it waits for, or None to go on."""
        plan = self._plan
        if not plan.dynamic:
            for i in range(plan.instructions.shape[1]):
                yield from self._execute((index, i))
            return
        depth = plan.instructions.shape[1]
        drawn = (depth + plan.num_workers) * (self._epoch - 1)
        while True:
            place = (self._add(plan.num_counters - 1, 1) - drawn) & 0xFFFFFFFF
            if place >= depth:
                return
            yield None
            yield from self._execute((0, place))

    def _execute(self, place: tuple[int, int]) -> Iterator[tuple[int, int] | None]:
        record = self._plan.instructions[place]
        spec_id = self.fmt.get(record, "spec_id")
        known = self._plan.specializations
        task = _Context(
            self, record, place, len(self.places), known[spec_id] if spec_id < len(known) else None
        )
        self.places.append(place)
        for event, threshold in event_pairs(self.fmt, record, "wait", "threshold"):
            while not self.reached(event, threshold):
                yield event, threshold
            # Less than everything says nothing about who signalled.
            if threshold >= self._totals.events.get(event, 0):
                task.before |= self._clocks.get(event, 0)
        main, finish = BODIES[task.opcode]
        main(task)
        self.order.append(place)
        yield None
        counter = task.field("reduce_counter")
        mine = task.before | 1 << task.number
        if counter != self.fmt.no_counter:
            self._clocks[counter] = self._clocks.get(counter, 0) | mine
            arrived = self._add(counter, 1) + 1
            if arrived != task.field("reduce_total") * self._epoch & 0xFFFFFFFF:
                return
            yield None
            task.before |= self._clocks[counter]
            assert finish is not None
            finish(task)
            yield None
            mine = task.before | 1 << task.number
        for event, increment in event_pairs(self.fmt, record, "signal", "increment"):
            # The clock first: it stands for the release that the counter's value carries.
            self._clocks[event] = self._clocks.get(event, 0) | mine
            self._add(event, increment)
            yield None

    def check_counters(self) -> None:
        """Every counter must have got what the records promise."""
        for totals, what in ((self._totals.events, "event"), (self._totals.arrivals, "unit")):
            for counter, total in totals.items():
                want, have = total * self._epoch & 0xFFFFFFFF, int(self._counters[counter])
                if want != have:
                    text = f"{what} {counter} counts {have} after run {self._epoch}, not {want}"
                    raise PlanFault("lost event", text)


class Interpreter:
    """Runs encoded plans over torch buffers.

    Args:
        tensors: every buffer, by the names of the plan; addresses in the operand table must be
            their ``data_ptr()``.
        fmt: of the records.
    """

    def __init__(self, tensors: Mapping[str, Tensor], fmt: InstructionFormat | None = None) -> None:
        self._tensors = dict(tensors)
        self._fmt = fmt or instruction_format()

    @property
    def addresses(self) -> dict[str, int]:
        """What ``encode.operand_table`` needs."""
        return {name: t.data_ptr() for name, t in self._tensors.items()}

    def run(
        self,
        plan: EncodedPlan,
        table: NDArray[np.uint64],
        counters: NDArray[np.uint32],
        *,
        epoch: int = 1,
        seed: int | None = None,
    ) -> list[tuple[int, int]]:
        """Runs every instruction once.

        Args:
            plan: instructions, specialisations, and how workers share them.
            table: uint64 [rows, 16].
            counters: uint32, advanced in place; zeros for ``epoch`` 1.
            epoch: which run of the plan on these counters this is, from 1.
            seed: of the interleaving; None runs worker by worker as far as each can go.

        Returns:
            The places (queue, index) in the order in which their bodies ran.

        Raises:
            PlanFault: the plan is wrong; ``kind`` says how.
        """
        for fault in check_instructions(plan.instructions, plan.num_events, self._fmt):
            if fault.kind == "format":
                raise fault
        run = _Run(plan, table, counters, epoch, _Memory(self._tensors.values()), self._fmt)
        rng = random.Random(seed)
        workers = {w: run.worker(w) for w in range(plan.num_workers)}
        ready = list(workers)
        waiting: dict[int, tuple[int, int]] = {}
        while workers:
            if not ready:
                ready = [w for w, wait in waiting.items() if run.reached(*wait)]
                if not ready:
                    raise _deadlock(waiting, counters, epoch)
                for w in ready:
                    del waiting[w]
            i = rng.randrange(len(ready)) if seed is not None else len(ready) - 1
            worker = ready[i]
            try:
                wait = next(workers[worker])
            except StopIteration:
                del workers[worker]
                ready.pop(i)
                continue
            if wait is not None:
                waiting[worker] = wait
                ready.pop(i)
            if seed is not None and waiting and rng.random() < 0.1:
                # Let a waiting worker look early, as a polling one would.
                looker = rng.choice(list(waiting))
                if run.reached(*waiting[looker]):
                    del waiting[looker]
                    ready.append(looker)
        run.check_counters()
        return run.order


def _deadlock(
    waiting: Mapping[int, tuple[int, int]], counters: NDArray[np.uint32], epoch: int
) -> PlanFault:
    shown = "; ".join(
        f"worker {w} waits for event {event}: want {threshold * epoch}, have {counters[event]}"
        for w, (event, threshold) in list(waiting.items())[:4]
    )
    return PlanFault("deadlock", f"{len(waiting)} workers wait and nothing else runs: {shown}")
