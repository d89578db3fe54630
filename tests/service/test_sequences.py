"""Pages of sequences: who owns which, and that none is lost or shared."""

from __future__ import annotations

import random

import pytest

from service.engine import EngineBusy
from service.sequences import PAGE, SequenceConflict, SequenceError, Sequences


@pytest.fixture
def pages():
    made = Sequences(idle_s=600)
    made.renew(1, 8)
    return made


def append(pages, name, n, *, fails=False, **more):
    """(keys before, pages) of one request."""
    with pages.append(name, n, **more) as lease:
        found = lease.length, list(lease.pages)
        lease.done = not fails
    return found


def test_a_sequence_keeps_its_pages_and_grows(pages):
    length, first = append(pages, "a", 60, start=True)
    assert (length, len(first)) == (0, 1)
    length, second = append(pages, "a", 5)
    assert (length, len(second)) == (60, 2)
    assert second[0] == first[0]
    assert append(pages, "a", 1, end=True) == (65, second)
    assert (len(pages), pages.pages_used) == (0, 0)


def test_a_request_that_failed_has_not_happened(pages):
    append(pages, "a", 60, start=True)
    append(pages, "a", 100, fails=True)
    assert pages.pages_used == 1
    assert append(pages, "a", 1)[0] == 60
    append(pages, "b", 10, start=True, fails=True)
    with pytest.raises(SequenceError, match="sequence b is not known"):
        append(pages, "b", 1)
    append(pages, "a", 1, end=True, fails=True)
    assert append(pages, "a", 1)[0] == 61


def test_a_request_says_how_many_keys_it_takes_the_sequence_to_have(pages):
    append(pages, "a", 60, start=True, expected=0)
    assert append(pages, "a", 5, expected=60)[0] == 60
    # Sent again, as after a lost answer.
    with pytest.raises(SequenceConflict, match="has 65 keys, the request was made for 60: it was"):
        append(pages, "a", 5, expected=60)
    with pytest.raises(SequenceConflict, match="made for 70: an earlier one is missing"):
        append(pages, "a", 5, expected=70, rewind=True)
    assert append(pages, "a", 1)[0] == 65
    assert append(pages, "a", 3, start=True, expected=0)[0] == 0


def test_rewinding_forgets_keys_and_gives_their_pages_back(pages):
    _, first = append(pages, "a", 300, start=True)
    _, again = append(pages, "a", 1, expected=130, rewind=True)
    assert again == first[:3]
    assert (append(pages, "a", 1)[0], pages.pages_used) == (131, 3)
    # It may fail afterwards: its keys may be in the caches, in the place of the former ones.
    append(pages, "a", 64, expected=100, rewind=True, fails=True)
    assert (append(pages, "a", 1)[0], pages.pages_used) == (100, 2)
    # As many as there are: nothing to forget.
    assert append(pages, "a", 1, expected=101, rewind=True)[0] == 101
    append(pages, "a", 0, expected=0, rewind=True)
    assert (len(pages), pages.pages_used) == (1, 1), "each sequence holds a page"
    assert append(pages, "a", 64)[1] == first[:1]


def test_without_tokens_a_sequence_is_looked_up_or_ended(pages):
    append(pages, "a", 70, start=True)
    assert append(pages, "a", 0)[0] == 70
    assert append(pages, "a", 0, expected=70, end=True)[0] == 70
    assert (len(pages), pages.pages_used) == (0, 0)
    with pytest.raises(SequenceError, match="not known"):
        append(pages, "a", 0, end=True)


def test_starting_again_forgets_what_was(pages):
    append(pages, "a", 300, start=True)
    assert append(pages, "a", 3, start=True)[0] == 0
    assert pages.pages_used == 1


def test_a_start_that_failed_leaves_what_was(pages):
    append(pages, "a", 300, start=True)
    with pages.append("a", 3, start=True, end=True), pytest.raises(SequenceConflict):
        append(pages, "a", 1)
    assert (append(pages, "a", 1)[0], pages.pages_used) == (300, 5)
    with pytest.raises(SequenceError, match="513 keys"):
        append(pages, "a", 8 * PAGE + 1, start=True)
    append(pages, "b", 2 * PAGE, start=True)
    with pytest.raises(EngineBusy, match=r"8 cache pages are needed and 6 of 8 .*\(2 sequences"):
        append(pages, "a", 8 * PAGE, start=True)
    assert append(pages, "a", 1)[0] == 301
    with pytest.raises(SequenceError, match="513 keys"):
        append(pages, "c", 8 * PAGE + 1, start=True)
    with pytest.raises(SequenceError, match="c is not known"):
        append(pages, "c", 1)


def test_starting_again_in_full_caches_takes_its_own_pages(pages):
    append(pages, "a", 7 * PAGE, start=True)
    assert append(pages, "a", 6 * PAGE, start=True)[0] == 0
    assert pages.pages_used == 6
    append(pages, "a", 5 * PAGE, start=True, fails=True)  # its keys may be overwritten by now
    with pytest.raises(SequenceError, match="a is not known"):
        append(pages, "a", 1)
    assert (len(pages), pages.pages_used) == (0, 0)


def test_more_pages_than_there_are_is_no_matter_of_waiting(pages):
    with pytest.raises(SequenceError, match=r"9 cache pages .* the caches have 8"):
        pages.scratch(9).__enter__()


def test_one_request_at_a_time(pages):
    with pages.append("a", 1, start=True, end=False) as lease:
        with pytest.raises(SequenceConflict, match="in flight"):
            append(pages, "a", 1)
        lease.done = True
    assert append(pages, "a", 1)[0] == 1


def test_no_room(pages):
    with pytest.raises(SequenceError, match=r"513 keys: the caches hold 512"):
        append(pages, "a", 8 * PAGE + 1, start=True)
    append(pages, "a", 6 * PAGE, start=True)
    with pytest.raises(EngineBusy, match=r"3 cache pages are needed and 2 of 8 are free"):
        append(pages, "b", 3 * PAGE, start=True)
    assert len(pages) == 1
    with pages.scratch(2) as lease, pytest.raises(EngineBusy):
        append(pages, "a", 1)
    assert len(set(lease.pages)) == 2
    assert append(pages, "a", 1)[0] == 6 * PAGE


def test_idle_sequences_give_way_to_those_that_need_pages(pages):
    append(pages, "old", 4 * PAGE, start=True)
    append(pages, "new", 4 * PAGE, start=True)
    pages.idle_s = 0.0
    with pages.append("new", 1, start=False, end=False) as lease:
        assert len(lease.pages) == 5
        lease.done = True
    with pytest.raises(SequenceError, match="old is not known"):
        append(pages, "old", 1)


def test_idle_sequences_stay_where_they_would_not_help(pages):
    append(pages, "old", 2 * PAGE, start=True)
    pages.idle_s = 0.0
    with pages.append("new", 4 * PAGE, start=True, end=False) as lease:
        with pytest.raises(EngineBusy, match="5 cache pages are needed and 4 of 8 are free"):
            append(pages, "more", 5 * PAGE, start=True)
        lease.done = True
    assert append(pages, "old", 1)[0] == 2 * PAGE


def test_another_group_starts_empty_and_gets_no_page_twice(pages):
    with pages.append("a", PAGE, start=True, end=False) as lease:
        pages.renew(2, 4)
        lease.done = True
    assert (len(pages), pages.pages_used, pages.num_pages) == (0, 0, 4)
    with pages.scratch(4) as lease:
        assert sorted(lease.pages) == [0, 1, 2, 3]


def test_no_page_has_two_owners_and_none_is_lost():
    pages = Sequences(idle_s=600)
    pages.renew(1, 16)
    rng = random.Random(3)
    owned: dict[str, list[int]] = {}
    for _ in range(3000):
        name = f"s{rng.randrange(5)}"
        start = name not in owned or rng.random() < 0.1
        end, fails = rng.random() < 0.2, rng.random() < 0.2
        more: dict = {"start": start, "end": end, "fails": fails}
        if not start and rng.random() < 0.2:
            keep = rng.randrange(64 * len(owned[name]) + 1)
            more |= {"expected": keep, "rewind": True}
        try:
            length, have = append(pages, name, rng.randrange(start, 200), **more)
        except (EngineBusy, SequenceError, SequenceConflict) as error:
            # Rewound it is all the same, unless it had not so many keys.
            if "rewind" in more and not isinstance(error, SequenceConflict):
                owned[name] = owned[name][: max(1, -(-keep // PAGE))]
            continue
        if "rewind" in more:
            assert length == keep
            owned[name] = owned[name][: max(1, -(-keep // PAGE))]
        others = {page for other, theirs in owned.items() if other != name for page in theirs}
        assert not others & set(have)
        assert len(set(have)) == len(have)
        if not fails:
            owned[name] = have
            if end:
                del owned[name]
        elif start and set(have) & set(owned.get(name, [])):
            del owned[name]
    assert pages.pages_used == sum(map(len, owned.values()))
    assert len(pages) == len(owned)
