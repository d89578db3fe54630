"""What shares a step, and how rows are split: properties against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.arena import Layout
from service.batching import StepQueue, rank_rows
from service.ipc import Submit

NOWHERE = Layout(0, 0, 0, 0, 0, 0, 0)


def submit(number: int, tokens: int, fp8: bool = False, deadline: float = 1e9) -> Submit:
    return Submit(number, tokens, fp8, True, NOWHERE, 0.0, deadline)


@given(st.integers(0, 5000), st.integers(1, 72))
def test_rows_cover_a_step_once_and_evenly(tokens, ranks):
    parts = [rank_rows(tokens, ranks, rank) for rank in range(ranks)]
    assert [row for part in parts for row in part] == list(range(tokens))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(
    st.lists(st.tuples(st.integers(1, 10), st.booleans()), max_size=40),
    st.integers(10, 25),
)
def test_every_request_runs_once_and_the_oldest_goes_first(requests, capacity):
    queue = StepQueue(capacity)
    kinds = {}
    for number, (tokens, fp8) in enumerate(requests):
        queue.put(submit(number, tokens, fp8))
        kinds[number] = (tokens, fp8)
    ran: list[int] = []
    waiting = list(kinds)
    while waiting:
        batch, expired = queue.take(0.0)
        assert not expired
        numbers = [s.request for s in batch]
        assert numbers[0] == waiting[0]
        assert numbers == sorted(numbers)
        assert sum(s.num_tokens for s in batch) <= capacity
        assert len({s.fp8 for s in batch}) == 1
        # Nothing of the same kind that would still have fitted was left behind.
        room = capacity - sum(s.num_tokens for s in batch)
        left = [n for n in waiting if n not in numbers and kinds[n][1] == batch[0].fp8]
        assert all(kinds[n][0] > room for n in left)
        waiting = [n for n in waiting if n not in numbers]
        ran += numbers
    assert sorted(ran) == list(kinds)
    assert queue.take(0.0) == ([], [])


def test_cancel_and_deadlines():
    queue = StepQueue(10)
    for number in range(4):
        queue.put(submit(number, 2, deadline=float(number)))
    assert queue.cancel(3)
    assert not queue.cancel(3)
    batch, expired = queue.take(1.5)
    assert [s.request for s in expired] == [0, 1]
    assert [s.request for s in batch] == [2]
    assert len(queue) == 0


@pytest.mark.parametrize("tokens", [0, 11])
def test_a_request_that_never_fits_is_refused(tokens):
    with pytest.raises(ValueError, match=rf"has {tokens} tokens: 1\.\.10"):
        StepQueue(10).put(submit(1, tokens))
