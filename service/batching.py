"""Which waiting requests share the next step, and how its rows are split over the ranks."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from service.ipc import Submit, SubmitAttention

__all__ = ["AttentionQueue", "StepQueue", "rank_rows"]

S = TypeVar("S", Submit, SubmitAttention)


def rank_rows(num_tokens: int, num_ranks: int, rank: int) -> range:
    """The rows of a step that a rank brings: contiguous, and equal up to one."""
    base, extra = divmod(num_tokens, num_ranks)
    begin = rank * base + min(rank, extra)
    return range(begin, begin + base + (rank < extra))


class _Queue(Generic[S]):
    """Requests in order of arrival."""

    def __init__(self) -> None:
        self._waiting: deque[S] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, submit: S) -> None:
        """Adds a request."""
        self._waiting.append(submit)

    def cancel(self, request: int) -> bool:
        """Withdraws a request; False when it is not waiting."""
        for submit in self._waiting:
            if submit.request == request:
                self._waiting.remove(submit)
                return True
        return False


class StepQueue(_Queue[Submit]):
    """Requests in order of arrival.

    A step takes the oldest request and then, in order, every other that fits beside it and has
    its kind of activations. The oldest always goes, so none waits for ever.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def put(self, submit: Submit) -> None:
        """Adds a request.

        Raises:
            ValueError: it could never run; the HTTP process checks that before.
        """
        if not 1 <= submit.num_tokens <= self.capacity:
            raise ValueError(
                f"request {submit.request} has {submit.num_tokens} tokens: 1..{self.capacity}"
            )
        super().put(submit)

    def take(self, now: float) -> tuple[list[Submit], list[Submit]]:
        """The next step's requests, and those whose deadline has passed."""
        expired = [submit for submit in self._waiting if submit.deadline < now]
        left = deque(submit for submit in self._waiting if submit.deadline >= now)
        batch: list[Submit] = []
        rest: deque[Submit] = deque()
        room = self.capacity
        for submit in left:
            if submit.num_tokens <= room and (not batch or submit.fp8 == batch[0].fp8):
                batch.append(submit)
                room -= submit.num_tokens
            else:
                rest.append(submit)
        self._waiting = rest
        return batch, expired


class AttentionQueue(_Queue[SubmitAttention]):
    """Attention-pre requests in order of arrival; a step takes one."""

    def take(self, now: float) -> tuple[SubmitAttention | None, list[SubmitAttention]]:
        """The oldest request whose deadline has not passed, and those before it."""
        expired: list[SubmitAttention] = []
        while self._waiting:
            submit = self._waiting.popleft()
            if submit.deadline >= now:
                return submit, expired
            expired.append(submit)
        return None, expired
