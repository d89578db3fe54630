"""Which kernel follows which: from what each reads and stores, not from any order of launches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megamoe.cmp.kernels import StandaloneKernel
from megamoe.errors import SpecError

__all__ = ["Edge", "chain", "data_edges", "leaves", "streams"]

Edge = tuple[int, int]
"""(producer, consumer), positions in the list of kernels."""


def data_edges(kernels: Sequence[StandaloneKernel]) -> tuple[Edge, ...]:
    """Producer and consumer of every tensor that one kernel stores and another reads.

    An edge that a path of others implies is left out: each kernel waits for its producers before it
    ends, so whoever waits for it has waited for them.

    Raises:
        SpecError: two kernels store the same tensor, or the kernels are not in an order in which
            each follows its producers.
    """
    makers: dict[str, int] = {}
    for i, kernel in enumerate(kernels):
        for tensor in kernel.writes:
            if tensor in makers:
                raise SpecError(
                    f"{kernels[makers[tensor]].name} and {kernel.name} both store {tensor!r}"
                )
            makers[tensor] = i
    direct = {
        (makers[tensor], i)
        for i, kernel in enumerate(kernels)
        for tensor in kernel.reads
        if tensor in makers
    }
    for producer, consumer in direct:
        if producer >= consumer:
            raise SpecError(
                f"{kernels[consumer].name} reads what {kernels[producer].name} stores, but comes "
                "first: order the kernels by their producers"
            )
    before: list[set[int]] = [set() for _ in kernels]
    for i in range(len(kernels)):
        for producer in (p for p, c in direct if c == i):
            before[i] |= before[producer] | {producer}
    kept = [
        (producer, consumer)
        for producer, consumer in direct
        if not any(producer in before[other] for other, c in direct if c == consumer)
    ]
    return tuple(sorted(kept))


def chain(kernels: Sequence[StandaloneKernel]) -> tuple[Edge, ...]:
    """Each kernel after the one before it."""
    return tuple(pairwise(range(len(kernels))))


def leaves(count: int, edges: Sequence[Edge]) -> list[int]:
    """Kernels that no other follows."""
    return sorted(set(range(count)) - {producer for producer, _ in edges})


def streams(count: int, edges: Sequence[Edge]) -> list[int]:
    """A stream for each kernel: that of a producer that no other consumer took, or a new one.

    Of several producers the last one launched is taken: the others' results are likely there first.
    """
    taken: set[int] = set()
    chosen: list[int] = []
    for i in range(count):
        free = [p for p, c in edges if c == i and p not in taken]
        if free:
            taken.add(max(free))
            chosen.append(chosen[max(free)])
        else:
            chosen.append(max(chosen, default=-1) + 1)
    return chosen
