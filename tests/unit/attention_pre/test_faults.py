"""Faults planted into encoded plans: the interpreter finds each, under every seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from megamoe.attention_pre.check import PlanFault, check_instructions
from megamoe.attention_pre.encode import (
    EncodedPlan,
    InstructionFormat,
    encode,
    instruction_format,
    operand_table,
)
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.interpret import Interpreter
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.tiling import Batch, TileConfig, Tiling
from tests.attention import SMALL, AttentionCase, poisoned

CASE = AttentionCase(SMALL, Batch(((3, 700), (2, 70))))
SEEDS = [None, 1]


@dataclass
class Bench:
    """A correct plan to be broken: ``of`` finds its instructions, ``run`` runs it."""

    plan: EncodedPlan
    fmt: InstructionFormat

    def of(self, opcode: str):
        """Records of an opcode, in place."""
        number = self.fmt.opcodes[opcode]
        flat = self.plan.instructions.reshape(-1, self.fmt.words)
        return [r for r in flat if self.fmt.get(r, "opcode") == number]

    def run(self, seed, table=None):
        known = {**CASE.weights(), **CASE.inputs()}
        made = poisoned(b for b in self.plan.buffers.values() if b.name not in known)
        tensors = {name: made.get(name, known.get(name)) for name in self.plan.buffers}
        machine = Interpreter(tensors, self.fmt)
        rows = operand_table(self.plan, machine.addresses)
        if table is not None:
            table(rows)
        return machine.run(self.plan, rows, self.plan.new_counters(), seed=seed)

    def fault(self, seed, table=None) -> PlanFault:
        with pytest.raises(PlanFault) as caught:
            self.run(seed, table)
        return caught.value

    def check(self) -> set[str]:
        """Kinds of the faults that show without running."""
        found = check_instructions(self.plan.instructions, self.plan.num_events, self.fmt)
        return {fault.kind for fault in found}


@pytest.fixture(params=["rows", "last", "all"])
def bench(request):
    halves = {name: Tiling(split_k=2, final=request.param) for name in ("B0", "B1", "D1")}
    stages = halves | {"C0": Tiling(block_n=8, split_k=4), "D2": Tiling(block_n=128)}
    planner = Planner(attention_pre_graph(SMALL), 9, tiles=TileConfig("halves", 8, stages))
    return Bench(encode(planner.plan(CASE.batch)), instruction_format())


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_the_plan_itself_is_clean(bench, seed):
    assert bench.check() == set()
    bench.run(seed)


WAITERS = ["qkv_a", "head_gate", "index_key", "index_query", "main_query", "absorb_query"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("opcode", [*WAITERS, "index_score"])
def test_a_missing_wait_is_a_race(bench, seed, opcode):
    record = bench.of(opcode)[-1]
    bench.fmt.set(record, "wait_event", *[bench.fmt.no_counter] * bench.fmt.max_waits)
    assert bench.check() == set(), "only an execution shows it"
    fault = bench.fault(seed)
    assert fault.kind == "race"
    assert "no event orders" in str(fault)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_of_two_waits_missing_is_a_race(bench, seed):
    """What finishes index_query waits for the query latent, or its sums, and for the gate."""
    record = (bench.of("index_query_final") or bench.of("index_query"))[0]
    events = bench.fmt.get_all(record, "wait_event")
    assert sum(e != bench.fmt.no_counter for e in events) == 2
    bench.fmt.set(record, "wait_event", bench.fmt.no_counter, events[1])
    assert bench.fault(seed).kind == "race"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("opcode", WAITERS[:-1])
def test_a_low_threshold_is_a_race(bench, seed, opcode):
    record = next(r for r in bench.of(opcode) if bench.fmt.get(r, "wait_threshold") > 1)
    bench.fmt.set(record, "wait_threshold", bench.fmt.get(record, "wait_threshold") - 1)
    assert bench.check() == {"threshold"}
    assert bench.fault(seed).kind == "race"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_high_threshold_is_a_deadlock(bench, seed):
    record = bench.of("index_query")[0]
    bench.fmt.set(record, "wait_threshold", bench.fmt.get(record, "wait_threshold") + 1)
    assert bench.check() == {"threshold"}
    fault = bench.fault(seed)
    assert fault.kind == "deadlock"
    assert "want" in str(fault)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("opcode", ["norm_quant", "head_gate", "main_query", "index_query"])
def test_a_lost_signal_is_found(bench, seed, opcode):
    """Of split-K units every member carries the signal, so every member loses it."""
    records = bench.of(opcode)
    unit = bench.fmt.get(records[0], "reduce_counter")
    for i, record in enumerate(records):
        same = bench.fmt.get(record, "reduce_counter") == unit != bench.fmt.no_counter
        if i == 0 or same:
            unused = [bench.fmt.no_counter] * bench.fmt.max_signals
            bench.fmt.set(record, "signal_event", *unused)
    assert bench.check() <= {"threshold", "lost event"}
    assert bench.check()
    assert bench.fault(seed).kind == "deadlock"


@pytest.mark.parametrize("seed", SEEDS)
def test_an_event_that_nobody_signals_is_found(bench, seed):
    event = bench.fmt.get(bench.of("absorb_query")[0], "wait_event")
    for record in bench.of("main_query"):
        if bench.fmt.get(record, "signal_event") == event:
            bench.fmt.set(record, "signal_event", bench.fmt.no_counter)
    assert bench.check() == {"lost event"}
    assert bench.fault(seed).kind == "deadlock"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("opcode", ["main_query", "absorb_query", "qkv_a", "head_gate"])
def test_overlapping_regions_are_a_race(bench, seed, opcode):
    """A tile in the place of its neighbour: both write the same region."""
    one, other = bench.of(opcode)[:2]
    for field in ("row", "col", "k", "part", "item"):
        bench.fmt.set(one, field, bench.fmt.get(other, field))
    fault = bench.fault(seed)
    assert fault.kind == "race"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_shifted_key_range_is_a_race(bench, seed):
    """A score task without new keys is moved onto those that index_key writes."""
    fmt = bench.fmt
    record = next(
        r
        for r in bench.of("index_score")
        if sum(e != fmt.no_counter for e in fmt.get_all(r, "wait_event")) == 1
    )
    other = next(
        r
        for r in bench.of("index_score")
        if sum(e != fmt.no_counter for e in fmt.get_all(r, "wait_event")) == 2
        and fmt.get(r, "item") == fmt.get(record, "item")
    )
    for field in ("kv", "kv_len", "page"):
        fmt.set(record, field, fmt.get(other, field))
    assert bench.fault(seed).kind == "race"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cycle_of_events_is_a_deadlock(bench, seed):
    """The first norm also waits for the main queries, which wait for it."""
    event = bench.fmt.get(bench.of("absorb_query")[0], "wait_event")
    threshold = bench.fmt.get(bench.of("absorb_query")[0], "wait_threshold")
    record = bench.of("norm_quant")[0]
    bench.fmt.set(record, "wait_event", event)
    bench.fmt.set(record, "wait_threshold", threshold)
    assert bench.check() == set(), "every number fits, only their order does not"
    assert bench.fault(seed).kind == "deadlock"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_queue_in_the_wrong_order_is_a_deadlock(bench, seed):
    """One worker has its instructions backwards; no event or threshold changed."""
    queues = bench.plan.instructions
    worker = next(
        w
        for w in range(len(queues))
        if bench.fmt.get(queues[w, 0], "opcode") != 0
        and any(bench.fmt.get(r, "opcode") == bench.fmt.opcodes["norm_quant"] for r in queues[w])
    )
    queues[worker] = queues[worker, ::-1].copy()
    assert bench.check() == set()
    assert bench.fault(seed).kind == "deadlock"


@pytest.mark.parametrize("bench", ["rows", "last"], indirect=True)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_unit_of_the_wrong_size_is_found(bench, seed):
    """One member too few is awaited: the last arrival never is the last."""
    for record in bench.of("index_query"):
        total = bench.fmt.get(record, "reduce_total")
        bench.fmt.set(record, "reduce_total", total + 1)
    assert bench.check() == {"threshold"}
    assert bench.fault(seed).kind == "deadlock"


def test_a_wrong_address_is_named(bench):
    def shift(table):
        table[0, 0] += 16

    fault = bench.fault(0, table=shift)
    assert fault.kind == "address"
    assert "(norm_quant)" in str(fault)
    assert "slot 0 (x)" in str(fault)


def test_an_unknown_opcode_is_refused_before_anything_runs(bench):
    bench.fmt.set(bench.plan.instructions[0, 0], "opcode", 999)
    assert bench.check() == {"format"}
    assert bench.fault(0).kind == "format"


def test_an_event_past_the_counters_is_refused(bench):
    bench.fmt.set(bench.of("head_gate")[0], "wait_event", bench.plan.num_events)
    assert "format" in bench.check()
    assert bench.fault(0).kind == "format"


def test_stale_counters_are_found(bench):
    """Counters that start one too high let a consumer pass early, and end one too high."""
    known = {**CASE.weights(), **CASE.inputs()}
    made = poisoned(b for b in bench.plan.buffers.values() if b.name not in known)
    tensors = {name: made.get(name, known.get(name)) for name in bench.plan.buffers}
    machine = Interpreter(tensors, bench.fmt)
    counters = bench.plan.new_counters() + np.uint32(1)
    with pytest.raises(PlanFault) as caught:
        machine.run(bench.plan, operand_table(bench.plan, machine.addresses), counters, seed=0)
    assert caught.value.kind in ("race", "lost event", "deadlock")
