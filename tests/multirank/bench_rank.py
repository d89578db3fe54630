"""``gpu_rows.bench`` on CPU ranks, for ``test_gpu_bench.py``: what stands in for a GPU.

Ours is the CPU backend. The public kernels are replaced below their Python calls, so that the index
work, the exchange and the checks around them are the real ones.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from rich.progress import Progress

from launcher import gpu_contenders, gpu_rows
from launcher.gpu_timing import Sustained
from launcher.moe_rows import BenchOptions
from launcher.ranks import Group
from launcher.timing import take_turns
from megamoe.layer import open_layer
from megamoe.reference.moe import combine, expert_forward, scaled_matmul, swiglu
from megamoe.reference.quant import quantize_1x128
from megamoe.spec import MoESpec
from megamoe.weights import random_experts

SPEC = MoESpec(hidden=256, inter=128, num_experts=8, topk=3, swiglu_clamp=1.0)


class Ours:
    name = "megamoe"

    def __init__(self, spec, config, weights) -> None:
        self._layer = open_layer(spec, config, backend="cpu")
        self._layer.load_weights(weights.experts())
        self.session = self._layer._session

    def prepare(self, batch) -> None:
        self._batch = batch

    def call(self) -> torch.Tensor:
        return self._layer.run(self._batch.x, self._batch.ids, self._batch.weight)

    def done(self) -> None:
        pass


class Buffer:
    """What the fused kernel's four inputs are copied into."""

    def __init__(self, tokens: int, topk: int, hidden: int) -> None:
        self.x = torch.zeros(tokens, hidden, dtype=torch.float8_e4m3fn)
        self.x_sf = torch.zeros(tokens, hidden // 128)
        self.topk_idx = torch.zeros(tokens, topk, dtype=torch.int64)
        self.topk_weights = torch.zeros(tokens, topk)
        self.buffer = torch.zeros(1234, dtype=torch.uint8)

    def destroy(self) -> None:
        del self.x


class Gemm:
    """The names of sgl-deep-gemm that are used. ``broken`` changes the fused kernel's result."""

    def __init__(self, broken: float) -> None:
        self._broken = broken

    def transform_weights_for_mega_moe_sm90(self, first, second):
        return first, second

    def get_symm_buffer_for_sm90_mega_moe(self, group, experts, tokens, topk, hidden, inter):
        assert group is dist.group.WORLD
        assert experts == SPEC.num_experts
        assert inter == SPEC.inter
        return Buffer(tokens, topk, hidden)

    def fp8_mega_moe(self, y, w1, w2, buffer, *, recipe, activation_clamp, fast_math) -> None:
        assert activation_clamp == SPEC.swiglu_clamp
        tokens = y.shape[0]
        ids = buffer.topk_idx[:tokens]
        every = list(random_experts(SPEC, 0, 1, seed=1))  # no exchange: it makes all experts
        slots = torch.zeros(tokens, SPEC.topk, SPEC.hidden, dtype=torch.bfloat16)
        for e in range(SPEC.num_experts):
            t, j = (ids == e).nonzero(as_tuple=True)
            slots[t, j] = expert_forward(SPEC, buffer.x[t], buffer.x_sf[t], every[e])[0]
        y.copy_(combine(slots, ids, buffer.topk_weights[:tokens]) * self._broken)

    def m_grouped_fp8_gemm_nt_contiguous(self, a, w, out, layout) -> None:
        for e in range(w[0].shape[0]):
            rows = (layout == e).nonzero().squeeze(1)
            out[rows] = scaled_matmul(a[0][rows], a[1][rows], w[0][e], w[1][e]).bfloat16()


class Swiglu:
    """The Triton kernel, which is launched as ``swiglu[grid](…)``."""

    def __getitem__(self, grid):
        def launch(h, q, scale, clamp, inter, num_warps) -> None:
            assert grid == (h.shape[0], inter // 128)
            values, scales = quantize_1x128(swiglu(h.float(), clamp))
            q.copy_(values)
            scale.copy_(scales)

        return launch


class Timer:
    def __init__(self, group) -> None:
        self._group = group

    def bursts(self, calls, rounds, per_round):
        return take_turns(self._group, calls, rounds=rounds, calls_per_round=per_round)

    def sustained(self, call, seconds) -> Sustained:
        call()
        return Sustained(
            us=50.0,
            joules=3.0,
            sm_mhz=1500.0,
            watts=900.0,
            throttle=["sw_power_cap"],
            counters={"sm_active": 0.9},
        )

    def host_us(self, call) -> float:
        call()
        return 7.0


def stand_in(setter, broken: float) -> None:
    """Replaces what needs a GPU; ``setter(module, name, value)``."""
    setter(gpu_rows, "GpuTimer", Timer)
    setter(gpu_rows, "OurKernel", Ours)
    setter(gpu_contenders, "_deep_gemm", lambda: (Gemm(broken), "9.9"))
    setter(gpu_contenders, "_swiglu_kernel", Swiglu)


def rows_of(group, cases, against, sustain: float) -> list[dict]:
    """Rows of ``gpu_rows.bench``; checks that ``on_row`` got them one by one."""
    options = BenchOptions(
        model="small",
        spec=SPEC,
        cases=cases,
        against=against,
        block_m=8,
        ring_blocks=0,
        workers=1,
        sustain=sustain,
        rounds=1,
        calls=2,
        turn_s=10.0,
        sample=3,
        seed=1,
        backend="cpu",
    )
    grown: list[int] = []
    bar = Progress(disable=True)
    rows, backend, _ = gpu_rows.bench(group, options, bar, lambda rows: grown.append(len(rows)))
    assert backend == "cpu"
    assert grown == list(range(1, len(cases) + 1))
    return rows


def bench(place, cases, against, broken: float, sustain: float) -> list[dict]:
    """The job of a rank process."""
    stand_in(setattr, broken)
    return rows_of(Group(place.rank, place.num_ranks, "cpu"), cases, against, sustain)
