"""The barriers between the roles of a CTA, run as a model with every role at a random speed.

``csrc/moe`` has two feeding roles, eight math warps and a publishing warp that walk one stream of
tasks through shared-memory barriers. A barrier is waited for by parity, so it must not complete
twice before every waiter has looked: then the wait reads as not over. The model holds the roles'
waits and arrivals, in the order of the sources, and random delays between them; three math warps
stand for eight.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

STAGES, TASK_SLOTS, MATH_WARPS = 4, 4, 3  # kStages, kTaskSlots of csrc/moe/shared.cuh


class Barrier:
    """An mbarrier: `expected` arrivals complete a phase."""

    def __init__(self, expected: int) -> None:
        self.expected, self.left, self.phase = expected, expected, 0

    def arrive(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.left, self.phase = self.expected, self.phase + 1

    def try_wait(self, parity: int) -> bool:
        return self.phase % 2 != parity


@dataclass
class Cta:
    """Barriers of SharedStorage, and what has been announced."""

    tasks: list[tuple[bool, int]]  # (Linear 2?, blocks of K)
    shared_tile_barrier: bool = False  # as it once was
    stage_full: list[Barrier] = field(default_factory=lambda: [Barrier(2) for _ in range(STAGES)])
    stage_empty: list[Barrier] = field(
        default_factory=lambda: [Barrier(MATH_WARPS) for _ in range(STAGES)]
    )
    task_full: list[Barrier] = field(
        default_factory=lambda: [Barrier(1) for _ in range(TASK_SLOTS)]
    )
    task_empty: list[Barrier] = field(
        default_factory=lambda: [Barrier(MATH_WARPS + 2) for _ in range(TASK_SLOTS)]
    )
    tile_written: list[Barrier] = field(
        default_factory=lambda: [Barrier(MATH_WARPS) for _ in range(TASK_SLOTS)]
    )
    rows_ready: Barrier = field(default_factory=lambda: Barrier(1))
    posted: list[int | None] = field(default_factory=lambda: [None] * TASK_SLOTS)
    written: list[int] = field(default_factory=list)  # math warps that have stored each task
    announced: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.written = [0] * len(self.tasks)


Steps = Iterator[tuple[Barrier, int] | None]
"""What a role yields: a wait, or None for time that passes."""


def feed_weights(cta: Cta) -> Steps:
    stage = 0
    for i in range(len(cta.tasks) + 1):
        slot, use = i % TASK_SLOTS, i // TASK_SLOTS
        yield cta.task_empty[slot], (use + 1) % 2
        done = i == len(cta.tasks)
        cta.posted[slot] = None if done else i
        cta.task_full[slot].arrive()
        for _ in range(0 if done else cta.tasks[i][1]):
            yield cta.stage_empty[stage % STAGES], (stage // STAGES + 1) % 2
            yield None
            cta.stage_full[stage % STAGES].arrive()
            stage += 1


def feed_activations(cta: Cta) -> Steps:
    stage = 0
    for i in range(len(cta.tasks)):
        slot, use = i % TASK_SLOTS, i // TASK_SLOTS
        yield cta.task_full[slot], use % 2
        assert cta.posted[slot] == i
        cta.task_empty[slot].arrive()
        yield None
        for _ in range(cta.tasks[i][1]):
            yield cta.stage_empty[stage % STAGES], (stage // STAGES + 1) % 2
            yield None
            cta.stage_full[stage % STAGES].arrive()
            stage += 1


def math(cta: Cta) -> Steps:
    stage = linear2 = 0
    for i, (is_linear2, blocks) in enumerate(cta.tasks):
        slot, use = i % TASK_SLOTS, i // TASK_SLOTS
        yield cta.task_full[slot], use % 2
        assert cta.posted[slot] == i
        for _ in range(blocks):
            yield cta.stage_full[stage % STAGES], stage // STAGES % 2
            yield None
            cta.stage_empty[stage % STAGES].arrive()
            stage += 1
        if is_linear2:
            yield cta.rows_ready, linear2 % 2
            linear2 += 1
        yield None
        assert cta.posted[slot] == i
        cta.written[i] += 1
        cta.task_empty[slot].arrive()
        cta.tile_written[0 if cta.shared_tile_barrier else slot].arrive()


def publish(cta: Cta) -> Steps:
    for i, (is_linear2, _) in enumerate(cta.tasks):
        slot, use = i % TASK_SLOTS, i // TASK_SLOTS
        yield cta.task_full[slot], use % 2
        assert cta.posted[slot] == i
        if cta.shared_tile_barrier:
            cta.task_empty[slot].arrive()
        yield None
        if is_linear2:
            cta.rows_ready.arrive()
        if cta.shared_tile_barrier:
            yield cta.tile_written[0], i % 2
        else:
            yield cta.tile_written[slot], use % 2
        assert cta.written[i] == MATH_WARPS, f"task {i} announced with {cta.written[i]} warps done"
        yield None  # a fence across NVLink may take long
        cta.announced.append(i)
        if not cta.shared_tile_barrier:
            cta.task_empty[slot].arrive()


def run(cta: Cta, rng: random.Random) -> bool:
    """Steps ready roles at random until all end; False when none can go on."""
    roles = [feed_weights(cta), feed_activations(cta), publish(cta)]
    roles += [math(cta) for _ in range(MATH_WARPS)]
    # Each role has a speed of its own for the whole run, over two orders of magnitude.
    speed = {id(r): 10 ** rng.uniform(-2, 0) for r in roles}
    waiting: dict[int, tuple[Barrier, int] | None] = {id(r): None for r in roles}
    while roles:
        ready = [r for r in roles if (w := waiting[id(r)]) is None or w[0].try_wait(w[1])]
        if not ready:
            return False
        role = rng.choices(ready, [speed[id(r)] for r in ready])[0]
        try:
            waiting[id(role)] = next(role)
        except StopIteration:
            roles.remove(role)
    return True


def make(rng: random.Random, **more: bool) -> Cta:
    tasks = [(rng.random() < 0.5, rng.randint(1, 6)) for _ in range(rng.randint(1, 25))]
    return Cta(tasks, **more)


@pytest.mark.parametrize("seed", range(8))
def test_every_task_is_announced_once_and_in_order(seed):
    rng = random.Random(seed)
    for _ in range(150):
        cta = make(rng)
        assert run(cta, rng), f"stuck after announcing {cta.announced} of {cta.tasks}"
        assert cta.announced == list(range(len(cta.tasks)))


def test_the_model_finds_a_barrier_that_completes_twice():
    """One barrier for all tiles, and a slot given back early: a slow publisher is left behind."""
    rng = random.Random(1)

    def breaks() -> bool:
        try:
            return not run(make(rng, shared_tile_barrier=True), rng)
        except AssertionError:
            return True

    assert any(breaks() for _ in range(300))
