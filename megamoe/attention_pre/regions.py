"""Regions of tensors: what a task reads and writes, and how such regions relate.

A region is a box in a tensor's logical coordinates, not in memory: the part index of a split-K sum
and the place of a token in a paged cache are no coordinates of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Region", "first_conflict", "is_covered", "sweep_dimension"]


@dataclass(frozen=True, slots=True)
class Region:
    """The box ``ranges`` of a tensor, half-open in each dimension.

    Attributes:
        tensor: name of the tensor in its graph.
        ranges: (first, past the last) per dimension.
        part: (index, count) of a contribution to a sum over the same box; (0, 1) is the value.
    """

    tensor: str
    ranges: tuple[tuple[int, int], ...]
    part: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if any(first >= last for first, last in self.ranges):
            raise ValueError(f"region of {self.tensor} {self.ranges}: every range needs a member")

    @property
    def volume(self) -> int:
        """Number of elements."""
        count = 1
        for first, last in self.ranges:
            count *= last - first
        return count

    def overlaps(self, other: Region) -> bool:
        """Whether both boxes share an element, whatever their parts."""
        return self.tensor == other.tensor and self.shared(other) > 0

    def shared(self, other: Region) -> int:
        """Elements that both boxes of one tensor contain."""
        count = 1
        for (a, b), (c, d) in zip(self.ranges, other.ranges, strict=True):
            length = (b if b < d else d) - (a if a > c else c)
            if length <= 0:
                return 0
            count *= length
        return count

    def __str__(self) -> str:
        box = ", ".join(f"{first}:{last}" for first, last in self.ranges)
        part = f" part {self.part[0]}/{self.part[1]}" if self.part[1] > 1 else ""
        return f"{self.tensor}[{box}]{part}"


def first_conflict(writes: Sequence[Region]) -> tuple[Region, Region] | None:
    """Two regions that write the same element of the same part, or None.

    Parts of one sum never conflict: each has memory of its own.
    """
    groups: dict[tuple[str, tuple[int, int]], list[Region]] = {}
    for write in writes:
        groups.setdefault((write.tensor, write.part), []).append(write)
    for group in groups.values():
        dim = sweep_dimension(group)
        group.sort(key=lambda r: r.ranges[dim])
        for i, one in enumerate(group):
            for other in group[i + 1 :]:
                # Sorted by their start: nothing later can reach back into `one`.
                if other.ranges[dim][0] >= one.ranges[dim][1]:
                    break
                if one.overlaps(other):
                    return one, other
    return None


def sweep_dimension(regions: Sequence[Region]) -> int:
    """The dimension in which regions of one tensor differ most: the one to sort them along."""
    dims = range(len(regions[0].ranges))
    return max(dims, key=lambda d: len({r.ranges[d] for r in regions}))


def is_covered(read: Region, writes: Iterable[Region]) -> bool:
    """Whether regions of its tensor, without mutual conflict, contain all of ``read``.

    A sum counts once: of the parts of one box, part 0 stands for all.
    """
    return sum(w.shared(read) for w in writes if w.part[0] == 0) == read.volume
