"""What a GPU session is made of, on this machine's memory: weights, barrier, recorded events."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest
import torch

from megamoe import native
from megamoe.backends import cuda_barrier
from megamoe.backends.cuda_barrier import HostBarrier
from megamoe.backends.cuda_pack import (
    TILE_N,
    num_tiles,
    pack_scale,
    pack_weight,
    rows_linear1,
    rows_linear2,
    scale_floats,
)
from megamoe.backends.cuda_recorder import Recorder
from megamoe.backends.cuda_weights import DeviceWeights
from megamoe.backends.trace import TRACE_CAPACITY, TraceBuffers, event_dtype
from megamoe.errors import GroupBroken, InputError, SpecError
from megamoe.spec import EpConfig, MoESpec
from megamoe.symmetric.base import GroupRendezvous
from megamoe.symmetric.choice import symmetric_memory
from megamoe.weights import ExpertWeights, random_experts

CPU = torch.device("cpu")
SPEC = MoESpec(hidden=256, inter=384, num_experts=4, topk=2, num_shared=1)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_every_expert_lies_in_its_place(dtype):
    spec = MoESpec(hidden=256, inter=384, num_experts=4, topk=2, num_shared=1, weight_dtype=dtype)
    held = DeviceWeights(spec, 2, CPU)
    for tiles, scales in zip(held.tiles, held.scales, strict=True):
        tiles.fill_(77)
        assert not scales.any()
    experts = list(random_experts(spec, 1, 2, seed=3))
    assert held.missing == {0, 1, 2}
    for expert in reversed(experts):
        held.take(expert)
        assert expert.index not in held.missing
    assert held.missing == set()
    rows = rows_linear1(spec.inter), rows_linear2(spec.hidden)
    for expert in experts:
        pairs = ((expert.w1, expert.w1_scale), (expert.w2, expert.w2_scale))
        for i, (weight, scale) in enumerate(pairs):
            tiles = num_tiles(spec.hidden) if i else spec.inter // 128
            columns = weight.shape[1]
            want = torch.zeros(tiles, columns * weight.element_size() // 128, TILE_N, 128)
            want = want.to(torch.uint8)
            pack_weight(weight, rows[i], want)
            assert torch.equal(held.tiles[i][expert.index], want), (expert.index, i)
            floats = torch.zeros(tiles, scale_floats(columns))
            if scale is not None:
                pack_scale(scale, floats, linear1=i == 0)
            assert torch.equal(held.scales[i][expert.index], floats), (expert.index, i)
    first = experts[0]
    wrong = ExpertWeights(3, first.w1, first.w1_scale, first.w2, first.w2_scale)
    with pytest.raises(InputError):
        held.take(wrong)
    held.free()
    assert held.tiles == held.scales == []


@pytest.fixture
def windows(monkeypatch):
    """Barrier lines of three ranks in this process's memory."""
    memory = [(ctypes.c_uint8 * (128 * 3))() for _ in range(3)]
    monkeypatch.setattr(
        cuda_barrier, "copy_to_device", lambda at, data: ctypes.memmove(at, data, len(data))
    )
    monkeypatch.setattr(cuda_barrier, "copy_from_device", ctypes.string_at)
    return memory, [ctypes.addressof(of_rank) for of_rank in memory]


def test_hosts_meet_as_often_as_they_come(windows):
    _, lines = windows
    inside, most = [], []

    def body(rank: int) -> None:
        barrier = HostBarrier(lines, rank)
        for meeting in range(5):
            time.sleep(0.002 * ((rank + meeting) % 3))
            inside.append(meeting)
            barrier.meet(20.0)
            most.append(inside.count(meeting))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [3] * 15


def test_who_is_missing_is_named(windows):
    _, lines = windows
    ctypes.memmove(lines[0] + 128, b"\1", 1)  # rank 1 has come, rank 2 has not
    with pytest.raises(GroupBroken) as broken:
        HostBarrier(lines, 0).meet(0.05)
    assert broken.value.missing == (2,)


def test_events_are_read_from_where_the_kernel_was_told_to_write():
    config = EpConfig(num_ranks=1, max_tokens=8, block_m=8).resolved(SPEC)
    shape = native.make_shape(SPEC, config, num_units=3, num_pullers=3, l2_tile_n=TILE_N)
    recorder = Recorder(shape, 5, CPU)
    assert tuple(recorder.stamps.shape) == (3, 5)
    told = TraceBuffers.from_address(recorder.address)
    assert told.slots == recorder.stamps.data_ptr()
    assert told.capacity == TRACE_CAPACITY
    assert not len(recorder.events(0, 4).events)
    # Two events of the last role of unit 1, written as the kernel does.
    roles = len(native.describe()["trace_roles"])
    track = 2 * roles - 1
    counts = (ctypes.c_uint32 * (3 * roles)).from_address(told.recorded)
    counts[track] = 2
    size = event_dtype().itemsize
    place = told.events + track * TRACE_CAPACITY * size
    events = np.zeros(2, event_dtype())
    events["begin"], events["end"] = [10, 30], [20, 50]
    ctypes.memmove(place, events.tobytes(), 2 * size)
    found = recorder.events(0, 4)
    assert found.events["unit"].tolist() == [1, 1]
    assert found.events["role"].tolist() == [roles - 1] * 2
    assert found.events["begin"].tolist() == [10, 30]
    assert found.events["end"].tolist() == [20, 50]
    assert (found.num_tokens, found.num_units, found.backend) == (4, 3, "cuda")
    assert not found.dropped.any()


def test_a_provider_that_there_is_not(monkeypatch):
    group = object.__new__(GroupRendezvous)
    with pytest.raises(SpecError, match="'mpi': must be 'torch' or 'nvshmem'"):
        symmetric_memory(group, CPU, "mpi")
    monkeypatch.setenv("MEGAMOE_SYMMETRIC", "mpi2")
    with pytest.raises(SpecError, match="'mpi2'"):
        symmetric_memory(group, CPU, None)
