"""The arena's allocator against a brute-force model, and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from service.arena import ALIGN, Arena, ArenaError, ArenaRef, arena_bytes, layout_of, moved
from service.engine import MoERequest, Segments
from tests.service.echo import LAYER


@pytest.fixture
def arena():
    made = Arena.create(1 << 16)
    yield made
    made.close()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), max_size=60))
def test_blocks_never_overlap_and_all_memory_comes_back(steps):
    arena = Arena.create(1 << 16)
    held: list[tuple[int, int]] = []
    owner = bytearray(1 << 16)  # brute force: who owns each byte
    for take, size in steps:
        if take or not held:
            begin = arena.allocate(size)
            if begin is None:
                # First fit refuses only when no run of free bytes is long enough.
                runs = bytes(owner).split(b"\1")
                assert max(map(len, runs)) < -(-size // ALIGN) * ALIGN
                continue
            end = begin + -(-size // ALIGN) * ALIGN
            assert begin % ALIGN == 0
            assert end <= arena.nbytes
            assert not any(owner[begin:end])
            owner[begin:end] = b"\1" * (end - begin)
            held.append((begin, size))
        else:
            begin, size = held.pop(size % len(held))
            end = begin + -(-size // ALIGN) * ALIGN
            owner[begin:end] = bytes(end - begin)
            arena.release(begin, size)
        assert arena.free_bytes == owner.count(0)
    for begin, size in held:
        arena.release(begin, size)
    assert arena.allocate(arena.nbytes) == 0  # one block again
    arena.close()


def test_a_peer_sees_the_same_bytes(arena):
    arena.view[100:105] = b"hello"
    ref = arena.ref
    code = (
        "import sys; from service.arena import *; "
        f"a = Arena.attach(ArenaRef({ref.pid}, {ref.fd}, {ref.nbytes})); "
        "print(bytes(a.view[100:105]).decode()); a.view[200:203] = b'bye'; a.close()"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "hello\n"
    assert bytes(arena.view[200:203]) == b"bye"


def test_it_has_no_name(arena):
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{arena.ref.fd}")


def test_too_large_says_how_many_bytes():
    with pytest.raises(ArenaError, match=r"need 4398046511104 bytes of /dev/shm, \d+ are free"):
        Arena.create(1 << 42)


def test_a_wrong_reference_is_refused(arena):
    ref = arena.ref
    with pytest.raises(ArenaError, match="has 65536, not 4096"):
        Arena.attach(ArenaRef(ref.pid, ref.fd, 4096))
    with pytest.raises(ArenaError, match="one machine, as one user"):
        Arena.attach(ArenaRef(2**22 - 1, 3, 4096))


@pytest.mark.parametrize("fp8", [False, True])
def test_layout_holds_every_tensor_without_overlap(fp8):
    n = 13
    request = MoERequest(
        num_tokens=n,
        hidden=Segments([bytes(n * LAYER.hidden * (1 if fp8 else 2))]),
        scales=memoryview(bytes(n * LAYER.num_groups * 4)) if fp8 else None,
    )
    layout = moved(layout_of(request, LAYER), 6400)
    sizes = {
        "hidden": request.hidden.nbytes,
        "scales": n * LAYER.num_groups * 4,
        "topk_ids": n * LAYER.topk * 4,
        "topk_weights": n * LAYER.topk * 4,
        "output": n * LAYER.hidden * 2,
    }
    if not fp8:
        assert layout.scales == -1
        del sizes["scales"]
    spans = sorted((getattr(layout, name), size) for name, size in sizes.items())
    assert spans[0][0] == layout.begin == 6400
    for (begin, size), (after, _) in pairwise([*spans, (6400 + layout.nbytes, 0)]):
        assert begin % ALIGN == 0
        assert begin + size <= after


def test_the_arena_holds_the_fullest_queue():
    layer = replace(LAYER, max_tokens=8)
    arena = Arena.create(arena_bytes(layer, queue_tokens=64, queue_requests=64))
    one = MoERequest(
        num_tokens=1,
        hidden=Segments([bytes(layer.hidden * 2)]),
        scales=memoryview(bytes(layer.num_groups * 4)),
    )
    for _ in range(64):
        assert arena.allocate(layout_of(one, layer).nbytes) is not None
    arena.close()


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=8), st.data())
def test_segments_slice_like_bytes(parts, data):
    whole = b"".join(parts)
    segments = Segments(parts)
    assert segments.nbytes == len(whole)
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    piece = segments.slice(begin, end)
    assert piece.nbytes == end - begin
    assert bytes(piece.join()) == whole[begin:end]
    target = bytearray(end - begin)
    piece.copy_to(memoryview(target))
    assert target == whole[begin:end]
