"""What ``bench moe`` times on GPUs: our layer, and public kernels that do the same work.

All start from the same quantised activations in the caller's memory, so that staging is in every
contender's time. Index work is in our time and in the fused peer's; the unfused pipeline has all of
it done before. Weights are shared: [E_l, N, K] of this rank.

Shape legend: T tokens, H hidden, I intermediate, E experts, E_l of this rank, K routes per token.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.contenders import Unavailable
from launcher.ranks import Group
from megamoe.backends.cuda import CudaSession
from megamoe.spec import EpConfig, MoESpec
from megamoe.symmetric.base import GroupRendezvous
from megamoe.weights import ExpertWeights, random_experts

__all__ = ["GpuBatch", "GpuContender", "GpuWeights", "OurKernel", "PeerKernel", "Unfused"]

_FP8 = torch.float8_e4m3fn
_NO_CLAMP = 65504.0
"""What a contender gets whose kernel always clamps: far beyond any gate or up value here."""


@dataclass(frozen=True)
class GpuBatch:
    """A call's inputs on this rank.

    Attributes:
        spec: the layer.
        counts: T of every rank.
        x: BF16 [T, H], what the oracle starts from.
        values: e4m3 [T, H] and its scales FP32 [T, H/128]; BF16 [T, H] and None for BF16 layers.
        scale: see values.
        ids: int64 [T, K].
        weight: FP32 [T, K].
        sample: int64 [N], rows that are compared.
    """

    spec: MoESpec
    counts: list[int]
    x: Tensor
    values: Tensor
    scale: Tensor | None
    ids: Tensor
    weight: Tensor
    sample: Tensor


class GpuWeights:
    """This rank's experts in one tensor each, drawn on the GPU.

    Attributes:
        w1, w2: [E_l, 2I, H] and [E_l, H, I].
        w1_scale, w2_scale: FP32 [E_l, N/128, K/128], or None for BF16 weights.
    """

    def __init__(self, group: Group, spec: MoESpec, seed: int) -> None:
        local = spec.experts_per_rank(group.num_ranks)
        experts = random_experts(spec, group.rank, group.num_ranks, seed, device=group.device)
        for e, expert in enumerate(experts):
            if e == 0:
                self.w1, self.w1_scale = _many(local, expert.w1), _many(local, expert.w1_scale)
                self.w2, self.w2_scale = _many(local, expert.w2), _many(local, expert.w2_scale)
            for whole, part in (
                (self.w1, expert.w1),
                (self.w2, expert.w2),
                (self.w1_scale, expert.w1_scale),
                (self.w2_scale, expert.w2_scale),
            ):
                if whole is not None and part is not None:
                    whole[e].copy_(part)

    def experts(self) -> Iterator[ExpertWeights]:
        """As ``load_weights`` takes them; views, no copies."""
        s1, s2 = self.w1_scale, self.w2_scale
        for e in range(self.w1.shape[0]):
            yield ExpertWeights(
                e,
                self.w1[e],
                None if s1 is None else s1[e],
                self.w2[e],
                None if s2 is None else s2[e],
            )

    def pairs(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(weight, scale) of both linears.

        Raises:
            Unavailable: weights are BF16.
        """
        if self.w1_scale is None or self.w2_scale is None:
            raise Unavailable("its kernels take FP8 weights")
        return (self.w1, self.w1_scale), (self.w2, self.w2_scale)


def _many(count: int, one: Tensor | None) -> Any:
    return None if one is None else one.new_empty((count, *one.shape))


class GpuContender(Protocol):
    """One of those that are timed. Methods are collective."""

    name: str

    def prepare(self, batch: GpuBatch) -> None:
        """Takes a new batch.

        Raises:
            Unavailable: it cannot run this shape here.
        """
        ...

    def call(self) -> Tensor:
        """Enqueues the timed work; BF16 [T, H]."""
        ...

    def done(self) -> None:
        """Frees what ``prepare`` took."""
        ...


class OurKernel:
    """A call of the layer, staging included, enqueued without waiting.

    Attributes:
        session: the layer.
    """

    name = "megamoe"

    def __init__(self, spec: MoESpec, config: EpConfig, weights: GpuWeights) -> None:
        self.session = CudaSession(spec, config, GroupRendezvous())
        self.session.load_weights(weights.experts())
        self._inputs: tuple[Tensor, Tensor | None, Tensor, Tensor] | None = None
        self._y = torch.empty(0)

    def prepare(self, batch: GpuBatch) -> None:
        """Keeps the inputs, and an output of NaN."""
        self._inputs = (batch.values, batch.scale, batch.ids.int().contiguous(), batch.weight)
        self._y = torch.full_like(batch.x, float("nan"))

    def call(self) -> Tensor:
        """Enqueues the fused kernel."""
        assert self._inputs is not None, "prepare first"
        x, scale, ids, weight = self._inputs
        self.session.stage(x, scale)
        self.session.launch(ids, weight, self._y)
        return self._y

    def done(self) -> None:
        """Nothing: the session is closed by its owner."""


def _deep_gemm() -> tuple[Any, str]:
    """The module of sgl-deep-gemm and its version."""
    # Ranks that compile at once do not meet in a folder of their own.
    rank = os.environ.get("RANK", "0")
    os.environ.setdefault(
        "DG_JIT_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"megamoe_deep_gemm_{rank}")
    )
    try:
        import deep_gemm

        return deep_gemm, importlib.metadata.version("sgl-deep-gemm")
    except (ImportError, OSError, RuntimeError) as e:
        raise Unavailable(
            f"sgl-deep-gemm cannot be imported ({type(e).__name__}: {e}): "
            "pip install 'megamoe[peers]'"
        ) from e


class PeerKernel:
    """sgl-deep-gemm's fused SM90 kernel, with the four copies into its buffer that it needs."""

    name = "peer"

    def __init__(self, spec: MoESpec, weights: GpuWeights) -> None:
        self._gemm, version = _deep_gemm()
        self.version = f"sgl-deep-gemm {version}"
        self._spec = spec
        pairs = weights.pairs()
        self._weights = self._gemm.transform_weights_for_mega_moe_sm90(*pairs)
        self._buffer: Any = None

    def prepare(self, batch: GpuBatch) -> None:
        """Makes its symmetric buffer for the largest rank's tokens."""
        s, tokens = self._spec, batch.x.shape[0]
        if int((batch.ids < 0).any()):
            raise Unavailable("masked routes are not asked of it here")
        self._inputs = (batch.values, batch.scale, batch.ids, batch.weight)
        most = max(*batch.counts, 128)
        self._buffer = self._gemm.get_symm_buffer_for_sm90_mega_moe(
            dist.group.WORLD, s.num_experts, most, s.topk, s.hidden, s.inter
        )
        b = self._buffer
        self._targets = [t[:tokens] for t in (b.x, b.x_sf, b.topk_idx, b.topk_weights)]
        self._y = torch.full_like(batch.x, float("nan"))

    @property
    def window_bytes(self) -> int | None:
        """Its symmetric memory per rank."""
        whole = getattr(self._buffer, "buffer", None)
        return None if whole is None else whole.numel() * whole.element_size()

    def call(self) -> Tensor:
        """Copies, then the kernel."""
        for target, source in zip(self._targets, self._inputs, strict=True):
            target.copy_(source)
        self._gemm.fp8_mega_moe(
            self._y,
            *self._weights,
            self._buffer,
            recipe=(128, 128, 128),
            activation_clamp=self._spec.swiglu_clamp or _NO_CLAMP,
            fast_math=True,
        )
        return self._y

    def done(self) -> None:
        """Frees its buffer."""
        if self._buffer is not None:
            self._targets = []
            self._buffer.destroy()
            self._buffer = None


def _swiglu_kernel() -> Any:
    """Triton: SwiGLU with clamp, and e4m3 by groups of 128; one program per row and group."""
    try:
        import triton
        import triton.language as tl
    except ImportError as e:
        raise Unavailable(f"triton cannot be imported: {e}") from e

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu(x, y, s, clamp, inter: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        j = tl.program_id(1)
        o = j * 128 + tl.arange(0, 128)
        g = tl.minimum(tl.load(x + row * 2 * inter + o).to(tl.float32), clamp)
        u = tl.load(x + row * 2 * inter + inter + o).to(tl.float32)
        u = tl.minimum(tl.maximum(u, -clamp), clamp)
        v = g * tl.sigmoid(g) * u
        a = tl.maximum(tl.max(tl.abs(v), 0), 1e-30) / 448.0
        tl.store(y + row * inter + o, (v / a).to(tl.float8e4nv))
        tl.store(s + row * (inter // 128) + j, a)

    return swiglu


class Unfused:
    """NCCL all-to-all around DeepGEMM's grouped GEMMs, and a Triton SwiGLU between them.

    Counts, permutations and buffers are made before: its time holds no index work.
    """

    name = "unfused"

    def __init__(self, group: Group, spec: MoESpec, weights: GpuWeights) -> None:
        self._gemm, _ = _deep_gemm()
        self._group, self._spec, self._weights = group, spec, weights.pairs()
        self._swiglu = _swiglu_kernel()

    def prepare(self, batch: GpuBatch) -> None:
        """Does the index work and takes the buffers."""
        if int((batch.ids < 0).any()):
            raise Unavailable("masked routes are not asked of it here")
        assert batch.scale is not None
        s, ranks, rank = self._spec, self._group.num_ranks, self._group.rank
        local, device = s.num_experts // ranks, batch.x.device
        flat = batch.ids.flatten()
        order = flat.argsort(stable=True)
        count = torch.bincount(flat, minlength=s.num_experts)
        every = torch.stack(self._group.gather(count.cpu()))
        self._send = count.view(ranks, local).sum(1).tolist()
        mine = every[:, rank * local : (rank + 1) * local]
        self._receive = mine.sum(1).tolist()
        total = sum(self._receive)
        per = mine.sum(0).tolist()
        padded = [math.ceil(c / 128) * 128 for c in per]
        rows = max(128, sum(padded))
        start = [sum(padded[:e]) for e in range(local)]
        self._layout = torch.full((rows,), -1, dtype=torch.int32, device=device)
        position, fill, at = torch.empty(total, dtype=torch.int64), start.copy(), 0
        for of_source in mine.tolist():
            for e, c in enumerate(of_source):
                position[at : at + c] = torch.arange(fill[e], fill[e] + c)
                fill[e] += c
                at += c
        for e in range(local):
            self._layout[start[e] : start[e] + per[e]] = e
        self._token, self._position = order // s.topk, position.to(device)
        self._inverse = torch.empty_like(order)
        self._inverse[order] = torch.arange(flat.numel(), device=device)

        def new(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        groups = s.hidden // 128
        self._got = (new(total, s.hidden), new(total, groups, dtype=torch.float32))
        self._a = (new(rows, s.hidden), new(rows, groups, dtype=torch.float32))
        self._h = new(rows, 2 * s.inter, dtype=torch.bfloat16)
        self._b = (new(rows, s.inter).view(_FP8), new(rows, s.inter // 128, dtype=torch.float32))
        self._d = new(rows, s.hidden, dtype=torch.bfloat16)
        self._back = new(flat.numel(), s.hidden, dtype=torch.bfloat16)
        self._x, self._scale = batch.values.view(torch.uint8), batch.scale
        self._weight = batch.weight.bfloat16()

    def gemms(self) -> None:
        """The two grouped GEMMs alone."""
        self._linear1()
        self._linear2()

    def _linear1(self) -> None:
        a, scale = self._a
        pair = (a.view(_FP8), scale)
        self._gemm.m_grouped_fp8_gemm_nt_contiguous(pair, self._weights[0], self._h, self._layout)

    def _linear2(self) -> None:
        self._gemm.m_grouped_fp8_gemm_nt_contiguous(
            self._b, self._weights[1], self._d, self._layout
        )

    def call(self) -> Tensor:
        """Gather, all-to-all, both linears, all-to-all, reduction."""
        s = self._spec
        for source, got, a in zip((self._x, self._scale), self._got, self._a, strict=True):
            sent = source.index_select(0, self._token)
            dist.all_to_all_single(got, sent, self._receive, self._send)
            a.index_copy_(0, self._position, got)
        self._linear1()
        self._swiglu[(self._h.shape[0], s.inter // 128)](
            self._h, *self._b, s.swiglu_clamp or _NO_CLAMP, s.inter, num_warps=1
        )
        self._linear2()
        back = self._d.index_select(0, self._position)
        dist.all_to_all_single(self._back, back, self._send, self._receive)
        slots = self._back.index_select(0, self._inverse).view(len(self._x), s.topk, s.hidden)
        return torch.bmm(self._weight.unsqueeze(1), slots).squeeze(1)

    def done(self) -> None:
        """Frees the buffers."""
        self._got = self._a = self._b = (torch.empty(0), torch.empty(0))
        self._h = self._d = self._back = torch.empty(0)
