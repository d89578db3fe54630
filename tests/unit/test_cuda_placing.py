"""Placed weights: that the kernel's loads find every block, and how the placing is measured."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megamoe.backends import cuda_driver, cuda_placing
from megamoe.backends.cuda_build import MoEParams
from megamoe.backends.cuda_pack import CHUNKS_A, CHUNKS_B, TILE_N, WINDOW_BYTES
from megamoe.backends.cuda_placing import (
    ChunksParams,
    find_swapped,
    placed_words,
    swapped_windows,
    weight_maps,
)
from megamoe.backends.cuda_weights import DeviceWeights
from megamoe.spec import MoESpec
from megamoe.weights import random_experts

CPU = torch.device("cpu")
NEAR, FAR, NOISE = 330, 525, 20


class Map:
    """What a tensor map was encoded from; ``box`` reads memory as the copy engine does."""

    def __init__(self, address, sizes, strides, box, element_bytes) -> None:
        self.address, self.sizes, self.strides = address, sizes, (element_bytes, *strides)
        self.box_sizes = box

    def box(self, memory: np.ndarray, at: tuple[int, ...]) -> np.ndarray:
        """``[rows, 128]`` as they land; ``memory`` begins at the map's address."""
        spans = [np.arange(c, c + n) for c, n in zip(at, self.box_sizes, strict=True)]
        for span, size in zip(spans, self.sizes, strict=True):
            assert span[0] >= 0 <= size - 1 - span[-1], (at, self.sizes)
        offsets = np.zeros((), int)
        for span, stride in zip(spans, self.strides, strict=True):  # the first is the innermost
            offsets = np.add.outer(span * stride, offsets)
        return memory[offsets].reshape(-1, 128)


@pytest.fixture
def maps(monkeypatch):
    """Tensor maps by the 128 bytes that stand for them."""
    made: dict[bytes, Map] = {}

    def encode(*of) -> bytes:
        key = len(made).to_bytes(128, "big")
        made[key] = Map(*of)
        return key

    monkeypatch.setattr(cuda_driver, "_tensor_map", encode)
    return made


def pair_of(tiles: torch.Tensor, made: dict[bytes, Map]) -> tuple[Map, Map]:
    data = weight_maps(tiles, placed=True)
    first, second = made[data[:128]], made[data[128:]]
    assert first.address == second.address == tiles.data_ptr()
    return first, second


@pytest.mark.parametrize(
    ("hidden", "inter", "dtype"),
    [(512, 256, "fp8"), (8576, 256, "fp8"), (896, 256, "bf16")],
    ids=["small", "two words and half a tile", "bf16 and half a tile"],
)
def test_the_kernels_loads_find_every_block(hidden, inter, dtype, maps):
    """By the addresses of csrc/moe/weights.cuh, worked out here, from any bits."""
    spec = MoESpec(hidden=hidden, inter=inter, num_experts=2, topk=1, weight_dtype=dtype)
    plain, placed = DeviceWeights(spec, 1, CPU), DeviceWeights(spec, 1, CPU)
    random = torch.Generator().manual_seed(4)
    swapped = []
    for tiles in placed.tiles:
        experts, columns, blocks = tiles.shape[:3]
        assert columns % 2 == 0
        swapped.append(torch.rand(experts, columns // 2, blocks, generator=random) < 0.5)
        tiles.fill_(99)
    placed.place(swapped)
    for round_ in range(2):  # what is loaded later takes the place of what was there
        experts = list(random_experts(spec, 0, 1, seed=round_))
        for expert in experts:
            plain.take(expert)
        for expert in reversed(experts):
            placed.take(expert)
    for of_plain, of_placed, words, bits in zip(
        plain.tiles, placed.tiles, placed.words, swapped, strict=True
    ):
        experts, columns, blocks = of_plain.shape[:3]
        first, second = pair_of(of_placed, maps)
        assert words.shape == (experts, columns, blocks // 64 + 1)
        told = words.numpy().view(np.uint64).reshape(experts * columns, -1)
        want = of_plain.numpy().reshape(experts * columns, blocks, TILE_N, 128)
        memory = of_placed.numpy().reshape(-1)
        for index in range(experts * columns):
            for kb in range(blocks):
                b = int(told[index, kb // 64]) >> kb % 64 & 1
                f = int(bits.view(-1, blocks)[index // 2, kb])
                assert b == f ^ index % 2  # even columns in A unless A is far from their SMs
                window = index // 2 * blocks + kb
                one, other = (second, first) if b else (first, second)
                stage = np.concatenate(
                    (
                        one.box(memory, (0, 0, 0, 0, window * 16 + b)),
                        other.box(memory, (0, 0, 0, 0, window * 16 + 9 - b)),
                    )
                )
                assert np.array_equal(stage, want[index, kb]), (index, kb, b)
                # And its bytes lie in the chunks of one half.
                chunks = memory.reshape(-1, 16, 4096)[window, list(CHUNKS_B if b else CHUNKS_A)]
                assert np.array_equal(chunks.reshape(TILE_N, 128), want[index, kb]), (index, kb, b)


def test_plain_tiles_have_one_map(maps):
    held = DeviceWeights(MoESpec(hidden=256, inter=384, num_experts=4, topk=2), 1, CPU)
    assert held.words is None
    for tiles in held.tiles:
        assert tiles.data_ptr() % WINDOW_BYTES == 0
        data = weight_maps(tiles, placed=False)
        assert len(data) == 256
        assert data[128:] == bytes(128)
        plain, memory = maps[data[:128]], tiles.fill_(3).view(-1, TILE_N, 128)
        for i in (0, 5, len(memory) - 1):
            memory[i] = torch.arange(128).to(torch.uint8) + i
            found = plain.box(tiles.numpy().reshape(-1), (0, i * TILE_N))
            assert np.array_equal(found, memory[i].numpy()), i
    held.place([torch.zeros(4, 1, 2, dtype=torch.bool)] * 2)
    held.free()
    assert held.tiles == []
    assert held.words is None


def test_bits_of_blocks():
    swapped = torch.zeros(1, 1, 70, dtype=torch.bool)
    swapped[0, 0, [0, 5, 63, 64, 69]] = True
    words = placed_words(swapped).numpy().view(np.uint64)
    assert words.tolist() == [
        [[1 | 1 << 5 | 1 << 63, 0x21], [~(1 | 1 << 5 | 1 << 63) % 2**64, 0x1E]]
    ]


def test_the_block_behind_the_last_has_a_bit():
    """The kernel looks ahead, and never past the table."""
    words = placed_words(torch.ones(2, 3, 64, dtype=torch.bool))
    assert words.shape == (2, 6, 2)
    assert words[0].tolist() == [[-1, 0], [0, 0]] * 3


def test_the_kernel_has_room_for_its_maps():
    assert ctypes.sizeof(MoEParams().w) == 4 * 128
    assert MoEParams.placed.size == 2 * 8
    assert ctypes.sizeof(MoEParams) <= 4096


# ------------------------------------------------------------ measuring


def measured(swapped: torch.Tensor, *, far=FAR, shift=0, seed=1):
    """Cycles of windows as SMs of both halves measure them; the pattern begins ``shift`` later."""
    rng = np.random.default_rng(seed)
    windows = len(swapped)
    half = torch.from_numpy(rng.integers(0, 2, windows).astype(np.int32))
    in_a = np.isin(np.arange(windows * 16) % 16, CHUNKS_A).reshape(windows, 16)
    of_chunk = np.where(in_a, swapped.numpy()[:, None], ~swapped.numpy()[:, None])
    of_chunk = np.roll(of_chunk.reshape(-1), shift).reshape(windows, 16)
    cycles = np.where(of_chunk != half.numpy()[:, None], far, NEAR)
    cycles = cycles + rng.normal(0, NOISE, cycles.shape)
    return torch.from_numpy(cycles.round().astype(np.int32)), half


def random_bits(windows: int = 3000) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).integers(0, 2, windows).astype(bool))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05])
def test_bits_are_found(share):
    """Also with chunks that took any time, of other kernels or of pages that had to come."""
    swapped = random_bits()
    cycles, half = measured(swapped)
    rng = np.random.default_rng(2)
    late = torch.from_numpy(rng.random(cycles.shape) < share / 2)
    cycles[late] += 4000
    found = swapped_windows(cycles, half)
    assert found is not None
    assert torch.equal(found, swapped)


@pytest.mark.parametrize("clock", [0.5, 2.0])
def test_no_clock_is_taken_for_granted(clock):
    swapped = random_bits()
    cycles, half = measured(swapped)
    found = swapped_windows((cycles * clock).int(), half)
    assert found is not None
    assert torch.equal(found, swapped)


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 6, 7, 8, 9, 12, 15])
def test_another_pattern_is_none(shift):
    assert swapped_windows(*measured(random_bits(), shift=shift)) is None


def test_what_is_unclear_is_none():
    swapped = random_bits()
    assert swapped_windows(*measured(swapped, far=NEAR)) is None, "no halves"
    assert swapped_windows(*measured(swapped, far=NEAR + 2 * NOISE)) is None, "a small gap"
    cycles, half = measured(swapped)
    cycles[::10] = cycles[::10].roll(1, dims=1)  # one window in ten
    assert swapped_windows(cycles, half) is None
    assert swapped_windows(torch.zeros(50, 16, dtype=torch.int32), half[:50]) is None


class FakeKernel:
    """Writes what the probe would, of memory whose windows' bits are ``bits``."""

    bits: list[torch.Tensor]
    shift = 0

    def __init__(self, _: object, name: str, **__: object) -> None:
        assert name == "megamoe_chunks"

    def launch(self, grid: int, params: ChunksParams, _: int) -> None:
        assert grid == 132
        assert list(params.near_half) == [1, 2, 3, 4, 5, 6]
        assert params.words % WINDOW_BYTES == 0
        swapped = self.bits.pop(0)
        assert params.num_windows == len(swapped)
        cycles, half = measured(swapped, shift=self.shift)
        ctypes.memmove(params.cycles, cycles.data_ptr(), cycles.nbytes)
        ctypes.memmove(params.half, half.data_ptr(), half.nbytes)


@pytest.fixture
def fake_kernel(monkeypatch):
    cubin = SimpleNamespace(image=b"", constant=lambda _: ctypes.sizeof(ChunksParams))
    monkeypatch.setattr(cuda_placing, "compile_probe", lambda: cubin)
    monkeypatch.setattr(cuda_placing, "load_probe", lambda _: None)
    monkeypatch.setattr(cuda_placing, "Kernel", FakeKernel)
    found = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))


@pytest.mark.parametrize("shift", [0, 3])
def test_each_window_of_the_weights_is_measured(shift, fake_kernel):
    held = DeviceWeights(MoESpec(hidden=1024, inter=768, num_experts=4, topk=2), 1, CPU)
    sizes = [(4, 3, 8), (4, 2, 6)]
    bits = [random_bits(int(np.prod(size))) for size in sizes]
    FakeKernel.bits, FakeKernel.shift = list(bits), shift
    swapped = find_swapped(held.tiles, [1, 2, 3, 4, 5, 6])
    if shift:
        assert swapped is None
        return
    assert swapped is not None
    for of_linear, size, want in zip(swapped, sizes, bits, strict=True):
        assert of_linear.shape == size
        assert torch.equal(of_linear.flatten(), want)


def test_without_memory_to_measure_with_tiles_are_plain(fake_kernel, monkeypatch):
    """Only the second Linear's do not fit, so there is something to throw away."""
    held = DeviceWeights(MoESpec(hidden=1024, inter=768, num_experts=4, topk=2), 1, CPU)
    FakeKernel.bits, FakeKernel.shift = [random_bits(4 * 3 * 8), random_bits(4 * 2 * 6)], 0
    calls = []

    def full(*of):
        calls.append(of)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return swapped_windows(*of)

    monkeypatch.setattr(cuda_placing, "swapped_windows", full)
    assert find_swapped(held.tiles, [1, 2, 3, 4, 5, 6]) is None
    assert len(calls) == 2
