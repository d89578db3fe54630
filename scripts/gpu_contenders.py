"""What ``gpu_bench_moe.py`` times: our layer and public kernels, from the same FP8 activations."""

# ruff: noqa: D102

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megamoe.backends.cuda import CudaSession, cuda_config
from megamoe.spec import EpConfig
from megamoe.symmetric.base import GroupRendezvous
from megamoe.weights import ExpertWeights

F8 = torch.float8_e4m3fn
CLAMP = 10.0


class Ours:
    """Staging kernel and the fused kernel."""

    def __init__(self, spec, weights, max_tokens, setting):
        block_m, b1, b2, wave, lag = (int(v) for v in setting.split(":"))
        rendezvous = GroupRendezvous()
        config = EpConfig(
            num_ranks=rendezvous.num_ranks,
            max_tokens=max_tokens,
            block_m=block_m,
            ring_l1_blocks=b1,
            ring_l2_blocks=b2,
            wave_blocks=wave,
            l2_lag_blocks=lag,
            timeout_s=5.0,
        )
        self.config = cuda_config(spec, config)
        self.session = CudaSession(spec, config, rendezvous)
        (w1, s1), (w2, s2) = weights
        local = range(w1.shape[0])
        self.session.load_weights(ExpertWeights(e, w1[e], s1[e], w2[e], s2[e]) for e in local)

    def prepare(self, x8, sx, ids, weight):
        self.inputs = (x8, sx, ids.int().contiguous(), weight)
        self.y = torch.full(x8.shape, float("nan"), device="cuda").bfloat16()

    def stage(self):
        self.session.stage(self.inputs[0], self.inputs[1])

    def __call__(self):
        self.stage()
        self.session.launch(self.inputs[2], self.inputs[3], self.y)
        return self.y


class Peer:
    """sgl-deep-gemm's fused SM90 kernel, its four copies included."""

    def __init__(self, spec, weights):
        import deep_gemm

        self.gemm, self.spec = deep_gemm, spec
        self.weights = deep_gemm.transform_weights_for_mega_moe_sm90(*weights)

    def prepare(self, x8, sx, ids, weight):
        s, tokens = self.spec, x8.shape[0]
        self.inputs = (x8, sx, ids, weight)
        self.buffer = self.gemm.get_symm_buffer_for_sm90_mega_moe(
            dist.group.WORLD, s.num_experts, max(tokens, 128), s.topk, s.hidden, s.inter
        )
        self.y = torch.full(x8.shape, float("nan"), device="cuda").bfloat16()

    def __call__(self):
        b, tokens = self.buffer, self.y.shape[0]
        targets = (b.x, b.x_sf, b.topk_idx, b.topk_weights)
        for target, source in zip(targets, self.inputs, strict=True):
            target[:tokens].copy_(source)
        self.gemm.fp8_mega_moe(
            self.y,
            *self.weights,
            b,
            recipe=(128, 128, 128),
            activation_clamp=CLAMP,
            fast_math=True,
        )
        return self.y

    def done(self):
        self.buffer.destroy()


class Unfused:
    """NCCL all-to-all around DeepGEMM's grouped GEMMs; ``gemms`` is the GEMMs alone."""

    def __init__(self, spec, weights):
        import deep_gemm
        import triton
        import triton.language as tl

        self.gemm, self.spec, self.weights = deep_gemm, spec, weights

        @triton.jit
        def swiglu(x, y, s, inter: tl.constexpr):
            row = tl.program_id(0).to(tl.int64)
            j = tl.program_id(1)
            o = j * 128 + tl.arange(0, 128)
            g = tl.minimum(tl.load(x + row * 2 * inter + o).to(tl.float32), 10.0)
            u = tl.load(x + row * 2 * inter + inter + o).to(tl.float32)
            u = tl.minimum(tl.maximum(u, -10.0), 10.0)
            v = g * tl.sigmoid(g) * u
            a = tl.maximum(tl.max(tl.abs(v), 0), 1e-10) / 448.0
            tl.store(y + row * inter + o, (v / a).to(tl.float8e4nv))
            tl.store(s + row * (inter // 128) + j, a)

        self.swiglu = swiglu

    def prepare(self, x8, sx, ids, weight):
        s, ranks, rank = self.spec, dist.get_world_size(), dist.get_rank()
        local = s.num_experts // ranks
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        count = torch.bincount(flat, minlength=s.num_experts)
        every = torch.empty(ranks, s.num_experts, dtype=torch.int64, device="cuda")
        dist.all_gather_into_tensor(every, count)
        self.send = count.view(ranks, local).sum(1).tolist()
        mine = every[:, rank * local : (rank + 1) * local]
        self.receive = mine.sum(1).tolist()
        total = sum(self.receive)
        per = mine.sum(0).tolist()
        padded = [math.ceil(c / 128) * 128 for c in per]
        rows = max(128, sum(padded))
        start = [sum(padded[:e]) for e in range(local)]
        self.layout = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
        position, fill = torch.empty(max(total, 1), dtype=torch.int64), start.copy()
        at = 0
        for of_source in mine.tolist():
            for e, c in enumerate(of_source):
                position[at : at + c] = torch.arange(fill[e], fill[e] + c)
                fill[e] += c
                at += c
        for e in range(local):
            self.layout[start[e] : start[e] + per[e]] = e
        self.token, self.position = order // s.topk, position[:total].cuda()
        self.inverse = torch.empty_like(order)
        self.inverse[order] = torch.arange(flat.numel(), device="cuda")
        new = lambda *shape, dtype=torch.uint8: torch.zeros(*shape, dtype=dtype, device="cuda")  # noqa: E731
        groups = s.hidden // 128
        self.got = (new(total, s.hidden), new(total, groups, dtype=torch.float32))
        self.a = (new(rows, s.hidden), new(rows, groups, dtype=torch.float32))
        self.h = new(rows, 2 * s.inter, dtype=torch.bfloat16)
        self.b = (new(rows, s.inter).view(F8), new(rows, s.inter // 128, dtype=torch.float32))
        self.d = new(rows, s.hidden, dtype=torch.bfloat16)
        self.back = new(flat.numel(), s.hidden, dtype=torch.bfloat16)
        self.x8, self.sx, self.weight = x8, sx, weight.bfloat16()

    def gemms(self):
        grouped = self.gemm.m_grouped_fp8_gemm_nt_contiguous
        grouped((self.a[0].view(F8), self.a[1]), self.weights[0], self.h, self.layout)
        grouped(self.b, self.weights[1], self.d, self.layout)

    def __call__(self):
        s = self.spec
        x = self.x8.view(torch.uint8).index_select(0, self.token)
        dist.all_to_all_single(self.got[0], x, self.receive, self.send)
        scale = self.sx.index_select(0, self.token)
        dist.all_to_all_single(self.got[1], scale, self.receive, self.send)
        for a, got in zip(self.a, self.got, strict=True):
            a.index_copy_(0, self.position, got)
        grouped = self.gemm.m_grouped_fp8_gemm_nt_contiguous
        grouped((self.a[0].view(F8), self.a[1]), self.weights[0], self.h, self.layout)
        self.swiglu[(self.h.shape[0], s.inter // 128)](
            self.h, self.b[0], self.b[1], s.inter, num_warps=1
        )
        grouped(self.b, self.weights[1], self.d, self.layout)
        dist.all_to_all_single(
            self.back, self.d.index_select(0, self.position), self.send, self.receive
        )
        slots = self.back.index_select(0, self.inverse).view(len(self.x8), s.topk, s.hidden)
        return torch.bmm(self.weight.unsqueeze(1), slots).squeeze(1)
