"""Which half of L2 an SM is near to, from measured and from made-up cycles; when there are streams.

``halves_h200.json``: cycles of an atomic from each SM to 24 lines, of two H200s.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megamoe import native
from megamoe.backends import cuda_halves
from megamoe.backends.cuda_build import MOST_SMS, MoEParams
from megamoe.backends.cuda_halves import HalvesParams, near_half, split_halves, words_of
from megamoe.backends.cuda_pack import TILE_N
from megamoe.errors import MegaMoeError
from megamoe.spec import EpConfig, MoESpec

H200 = json.loads((Path(__file__).parent / "halves_h200.json").read_text())
NEAR, FAR, NOISE = 330, 525, 20


def measured(side: list[int], line: list[int], *, far: int = FAR, seed: int = 1) -> torch.Tensor:
    """Cycles of SMs and lines in halves 0 and 1, with offsets by SM and line, and noise."""
    rng = np.random.default_rng(seed)
    other = np.not_equal.outer(side, line)
    cycles = np.where(other, far, NEAR) + rng.normal(0, NOISE, other.shape)
    cycles += rng.normal(0, NOISE, (len(side), 1)) + rng.normal(0, NOISE, (1, len(line)))
    return torch.from_numpy(cycles.round().astype(np.int32))


def dealt(num: int, ones: int, seed: int = 2) -> list[int]:
    """So many ones among zeros; the first is a zero."""
    rng = np.random.default_rng(seed)
    return [0, *rng.permutation([1] * ones + [0] * (num - 1 - ones)).tolist()]


@pytest.mark.parametrize("gpu", H200)
def test_measured_halves(gpu):
    """As a singular vector tells them apart; and the two SMs of a TPC are neighbours."""
    cycles = torch.tensor(H200[gpu], dtype=torch.int32)
    halves = split_halves(cycles)
    assert halves is not None
    assert sum(halves) == 66
    assert halves[0::2] == halves[1::2]
    m = cycles.numpy().astype(float)
    u = np.linalg.svd(m - m.mean(0) - m.mean(1, keepdims=True) + m.mean())[0][:, 0]
    assert halves == (u * u[0] < 0).tolist()


@pytest.mark.parametrize("sms", [4, 78, 132])
@pytest.mark.parametrize("lines", [20, 48, 80])
def test_halves_are_found(sms, lines):
    side = dealt(sms, sms // 2)
    assert split_halves(measured(side, dealt(96, lines))) == [bool(s) for s in side]


@pytest.mark.parametrize("seed", range(20))
def test_no_halves_are_made_up(seed):
    line = dealt(96, 48)
    assert split_halves(measured([0] * 132, line, seed=seed)) is None
    assert split_halves(measured(dealt(132, 66), line, far=NEAR, seed=seed)) is None
    # Lines of one half: SMs differ by a constant, as they do anyway.
    assert split_halves(measured(dealt(132, 66), [0] * 96, seed=seed)) is None


def test_what_is_unclear_is_none():
    side, line = dealt(132, 66), dealt(96, 40)
    assert split_halves(measured(dealt(132, 64), line)) is None
    assert split_halves(measured(dealt(131, 65), line)) is None
    assert split_halves(measured(side, line, far=NEAR + 60)) is None, "a small gap"
    assert split_halves(torch.full((132, 96), 400)) is None
    cycles = measured(side, line)
    cycles[131] = cycles[131].flip(0)  # one SM belongs to neither
    assert split_halves(cycles) is None
    cycles = measured(side, line)
    cycles[7, 9] = 0
    assert split_halves(cycles) is None, "not measured"


def test_bits_of_sms():
    words = words_of([sm in (1, 32, 131) for sm in range(132)])
    assert words == [2, 1, 0, 0, 8, 0]
    assert len(words) * 32 == MOST_SMS == 32 * len(MoEParams().near_half)


SPEC = MoESpec(hidden=1024, inter=768, num_experts=4, topk=2)
SIDE = [sm % 4 > 1 for sm in range(132)]


def shape(units: int = 132, wave: int = 2) -> native.MoEShape:
    config = EpConfig(num_ranks=1, max_tokens=400, block_m=128, wave_blocks=wave).resolved(SPEC)
    return native.make_shape(SPEC, config, num_units=units, num_pullers=units, l2_tile_n=TILE_N)


@pytest.fixture
def of_132_sms(monkeypatch):
    device = torch.device("cuda", 0)
    found = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(cuda_halves, "_measured", lambda _: SIDE)
    monkeypatch.delenv("MEGAMOE_STREAMS", raising=False)
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    return device


def test_when_there_are_two_streams(of_132_sms, monkeypatch):
    assert near_half(shape(), of_132_sms, 2) == words_of(SIDE)
    monkeypatch.setattr(cuda_halves, "_measured", lambda _: None)
    assert near_half(shape(), of_132_sms, 2) is None


def test_without_memory_to_measure_with_there_is_one(of_132_sms, monkeypatch):
    def full(_: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(cuda_halves, "_measured", full)
    assert near_half(shape(), of_132_sms, 2) is None


def test_where_there_cannot_be_two_nothing_is_measured(of_132_sms, monkeypatch):
    def never(_: torch.device) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(cuda_halves, "_measured", never)
    assert near_half(shape(), of_132_sms, 1) is None
    assert near_half(shape(units=131), of_132_sms, 2) is None
    assert near_half(shape(wave=1), of_132_sms, 2) is None
    for name, value in (("MEGAMOE_STREAMS", "1"), ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")):
        with monkeypatch.context() as other:
            other.setenv(name, value)
            assert near_half(shape(), of_132_sms, 2) is None, name


class FakeKernel:
    """Writes cycles where the probe would, on this machine's memory."""

    made = 0
    cycles: torch.Tensor

    def __init__(self, *_: object, cooperative: bool, **__: object) -> None:
        assert cooperative, "a CTA for every SM"
        FakeKernel.made += 1

    def launch(self, grid: int, params: HalvesParams, _: int) -> None:
        if not self.cycles.numel():
            raise MegaMoeError("refused")
        assert (grid, params.lines) == tuple(self.cycles.shape)
        data = self.cycles.contiguous()
        ctypes.memmove(params.cycles, data.data_ptr(), 4 * data.numel())


def test_a_device_is_measured_once(monkeypatch):
    cpu = torch.device("cpu")
    cubin = SimpleNamespace(image=b"", constant=lambda _: ctypes.sizeof(HalvesParams))
    stream = SimpleNamespace(cuda_stream=0)
    found = SimpleNamespace(multi_processor_count=132)
    monkeypatch.delenv("MEGAMOE_STREAMS", raising=False)
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    monkeypatch.setattr(cuda_halves, "compile_probe", lambda: cubin)
    monkeypatch.setattr(cuda_halves, "load_probe", lambda _: None)
    monkeypatch.setattr(cuda_halves, "Kernel", FakeKernel)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    cuda_halves._measured.cache_clear()
    FakeKernel.cycles = torch.empty(0)
    with pytest.raises(MegaMoeError, match="refused"):  # what the driver says is not hidden
        near_half(shape(), cpu, 2)
    FakeKernel.cycles = measured([int(s) for s in SIDE], dealt(96, 40))
    assert [near_half(shape(), cpu, 2) for _ in range(3)] == [words_of(SIDE)] * 3
    assert FakeKernel.made == 2
    cuda_halves._measured.cache_clear()
