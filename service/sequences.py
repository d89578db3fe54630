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
    """The sequence is not where the request takes it to be.

    It has another number of keys, or another request in flight, which would leave their order to
    chance.
    """


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
            SequenceError: there are not so many at all.
            EngineBusy: so many are not free.
        """
        if count > self.num_pages:
            raise SequenceError(
                f"the request needs {count} cache pages (each of its requests begins one, {PAGE} "
                f"keys a page): the caches have {self.num_pages}; split it"
            )
        generation = self._generation
        pages = self._take(count)
        try:
            yield Lease(pages=pages, length=0)
        finally:
            self._give(generation, pages)

    @contextlib.contextmanager
    def append(
        self,
        name: str,
        num_tokens: int,
        *,
        start: bool = False,
        end: bool = False,
        expected: int | None = None,
        rewind: bool = False,
    ) -> Iterator[Lease]:
        """Room for ``num_tokens`` more keys of a sequence.

        Args:
            name: of the sequence.
            num_tokens: new keys; 0 looks it up, rewinds or ends it.
            start: begins it; one of that name that exists begins anew, once the request was
                answered. Only where no other pages are free does it end before.
            end: frees its pages once the request was answered.
            expected: keys that the request takes it to have before; None takes any number.
            rewind: if it has more, they are forgotten now, whatever becomes of the request: its
                own keys take their place in the caches.

        Raises:
            SequenceError: neither known nor started, or longer than all pages.
            SequenceConflict: it has a request in flight, or not ``expected`` keys.
            EngineBusy: no free pages.
        """
        generation = self._generation
        known = self._known.get(name)
        if known is not None and known.busy:
            raise SequenceConflict(f"sequence {name} has a request in flight: wait for its answer")
        if known is None and not start:
            raise SequenceError(
                f"sequence {name} is not known: begin it with sequence_start (sequences end with "
                "sequence_end, with a restart of the ranks, and when idle while pages are short)"
            )
        sequence = _Sequence() if known is None or start else known
        if expected is not None and expected != sequence.length:
            if expected > sequence.length or not rewind:
                raise SequenceConflict(
                    f"sequence {name} has {sequence.length} keys, the request was made for "
                    f"{expected}: "
                    + (
                        "an earlier one is missing"
                        if expected > sequence.length
                        else "it was answered before, or another one was; sequence_rewind drops "
                        f"the keys past {expected}"
                    )
                )
            kept = max(1, -(-expected // PAGE))  # each holds a page: that bounds their number
            self._give(generation, sequence.pages[kept:])
            sequence.pages, sequence.length = sequence.pages[:kept], expected
        keys = sequence.length + num_tokens
        if keys > self.num_pages * PAGE:
            raise SequenceError(
                f"sequence {name} would have {keys} keys: the caches hold {self.num_pages * PAGE}"
            )
        missing = max(0, -(-keys // PAGE) - len(sequence.pages))
        fresh = self._take(missing, for_name=name, anew=start)
        lease = Lease(pages=sequence.pages + fresh, length=sequence.length)
        former = self._known.get(name) if start else None
        sequence.busy, self._known[name] = True, sequence
        try:
            yield lease
        finally:
            sequence.busy, sequence.used_at = False, time.monotonic()
            if lease.done:
                sequence.pages, sequence.length = lease.pages, keys
            else:
                self._give(generation, fresh)
            if self._known.get(name) is sequence:  # else the group of ranks is another one
                if former is not None and lease.done:
                    self._give(generation, former.pages)
                if start and not lease.done:
                    del self._known[name]
                    if former is not None:
                        self._known[name] = former
                elif end and lease.done:
                    self._give(generation, sequence.pages)
                    del self._known[name]

    def _take(self, count: int, *, for_name: str = "", anew: bool = False) -> list[int]:
        """Free pages, those of idle sequences included.

        Args:
            count: how many.
            for_name: a sequence that may not lose its pages by this.
            anew: unless only they are enough: its keys are not needed any more.
        """
        now = time.monotonic()
        idle = sorted(
            (s.used_at, name)
            for name, s in self._known.items()
            if not s.busy and now - s.used_at > self.idle_s and name != for_name
        )
        if anew and for_name in self._known:
            idle.append((now, for_name))
        room = len(self._free) + sum(len(self._known[name].pages) for _, name in idle)
        if room < count:
            raise EngineBusy(
                f"{count} cache pages are needed and {room} of {self.num_pages} are "
                f"free ({len(self)} sequences hold the others): end a sequence, or retry later"
            )
        for _, name in idle:
            if len(self._free) >= count:
                break
            self._give(self._generation, self._known.pop(name).pages)
        return [self._free.pop() for _ in range(count)]

    def _give(self, generation: int, pages: list[int]) -> None:
        if generation == self._generation:
            self._free += reversed(pages)
