"""Pages of the attention caches on the ranks, and the sequences that own them.

A page holds 64 keys of both caches. A sequence is a client's name for a growing list of pages; a
request without one borrows pages for its own time. A group of ranks starts with empty caches: with
it all sequences end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from service.engine import EngineBusy

__all__ = ["PAGE", "Lease", "SequenceConflict", "SequenceError", "Sequences"]

PAGE: Final = 64
"""Keys of a page."""


class SequenceError(ValueError):
    """No such sequence (not started, ended, or lost with its group of ranks), or no more room."""


class SequenceConflict(RuntimeError):
    """Another request of the sequence is in flight: their order would be left to chance."""


@dataclass(slots=True)
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0  # keys that an answered request has written
    busy: bool = False
    used_at: float = 0.0


@dataclass(slots=True, kw_only=True)
class Lease:
    """Pages of one request.

    Attributes:
        pages: in the order of the keys.
        length: keys before the request.
        done: set by the holder once the request was answered; else nothing has happened.
    """

    pages: list[int]
    length: int
    done: bool = False


class Sequences:
    """All pages of one group of ranks.

    Args:
        idle_s: a sequence unused for so long may lose its pages to another.
    """

    def __init__(self, idle_s: float) -> None:
        self.idle_s = idle_s
        self.num_pages = 0
        self._generation = -1
        self._free: list[int] = []
        self._known: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def pages_used(self) -> int:
        """Pages of sequences and of requests in flight."""
        return self.num_pages - len(self._free)

    def renew(self, generation: int, num_pages: int) -> None:
        """Forgets everything if the group of ranks is another one."""
        if generation != self._generation:
            self._generation, self.num_pages = generation, num_pages
            self._free = list(range(num_pages - 1, -1, -1))
            self._known.clear()

    @contextlib.contextmanager
    def scratch(self, count: int) -> Iterator[Lease]:
        """``count`` pages for one request.

        Raises:
            EngineBusy: so many are not free.
        """
        generation = self._generation
        pages = self._take(count)
        try:
            yield Lease(pages=pages, length=0)
        finally:
            self._give(generation, pages)

    @contextlib.contextmanager
    def append(self, name: str, num_tokens: int, *, start: bool, end: bool) -> Iterator[Lease]:
        """Room for ``num_tokens`` more keys of a sequence.

        Args:
            name: of the sequence.
            num_tokens: new keys.
            start: begins it; one of that name that exists begins anew.
            end: frees its pages once the request was answered.

        Raises:
            SequenceError: neither known nor started, or longer than all pages.
            SequenceConflict: it has a request in flight.
            EngineBusy: no free pages.
        """
        generation = self._generation
        sequence = self._known.get(name)
        if sequence is not None and sequence.busy:
            raise SequenceConflict(f"sequence {name} has a request in flight: wait for its answer")
        if start:
            if sequence is not None:
                self._give(generation, sequence.pages)
            sequence = self._known[name] = _Sequence()
        elif sequence is None:
            raise SequenceError(
                f"sequence {name} is not known: begin it with sequence_start (sequences end with "
                "sequence_end, with a restart of the ranks, and when idle while pages are short)"
            )
        keys = sequence.length + num_tokens
        if keys > self.num_pages * PAGE:
            raise SequenceError(
                f"sequence {name} would have {keys} keys: the caches hold {self.num_pages * PAGE}"
            )
        sequence.busy = True
        lease = Lease(pages=[], length=sequence.length)
        fresh: list[int] = []
        try:
            want = -(-keys // PAGE)
            fresh = self._take(want - len(sequence.pages))
            lease.pages = sequence.pages + fresh
            yield lease
        finally:
            sequence.busy, sequence.used_at = False, time.monotonic()
            if lease.done:
                sequence.pages, sequence.length = lease.pages, keys
            else:
                self._give(generation, fresh)
            ended = end and lease.done
            if (ended or (start and not lease.done)) and self._known.get(name) is sequence:
                self._give(generation, sequence.pages)
                del self._known[name]

    def _take(self, count: int) -> list[int]:
        now = time.monotonic()
        idle = sorted(
            (s.used_at, name)
            for name, s in self._known.items()
            if not s.busy and now - s.used_at > self.idle_s
        )
        for _, name in idle:
            if len(self._free) >= count:
                break
            self._give(self._generation, self._known.pop(name).pages)
        if len(self._free) < count:
            raise EngineBusy(
                f"{count} cache pages are needed and {len(self._free)} of {self.num_pages} are "
                f"free ({len(self)} sequences hold the others): end a sequence, or retry later"
            )
        return [self._free.pop() for _ in range(count)]

    def _give(self, generation: int, pages: list[int]) -> None:
        if generation == self._generation:
            self._free += reversed(pages)
