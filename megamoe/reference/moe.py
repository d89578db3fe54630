"""The oracle of the MoE layer: one process, the whole batch, the contract step by step.

Shape legend: T tokens, H hidden, I intermediate, E experts, K routes per token, S shared experts,
M rows of one expert.

Exactness. Everything the contract fixes is followed bit by bit: quantisation, FP32 fma over the
128-column partials in ascending order, SwiGLU in FP32, BF16 slots, the FP32 fma chain of the
combine, BF16 rounding of y. Inside one 128-column partial the sum is formed in FP64 and rounded
once to FP32, where a kernel rounds after each product; that, and the last bits of ``exp``, are the
only differences an implementation may show (``tolerance.py`` derives what they amount to).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megamoe.errors import InputError
from megamoe.reference.quant import fma32, quantize_1x128
from megamoe.spec import GROUP, MoESpec

__all__ = [
    "Expert",
    "MoEDetail",
    "combine",
    "expert_forward",
    "moe_forward",
    "moe_forward_detail",
    "scaled_matmul",
    "swiglu",
]

Activations = Tensor | tuple[Tensor, Tensor]


class Expert(Protocol):
    """One expert's weights: what ``megamoe.weights.ExpertWeights`` and tests provide."""

    @property
    def w1(self) -> Tensor:
        """[2I, H]: gate rows, then up rows; e4m3 or BF16."""

    @property
    def w1_scale(self) -> Tensor | None:
        """FP32 [2I/128, H/128] for e4m3 weights, else None."""

    @property
    def w2(self) -> Tensor:
        """[H, I]; e4m3 or BF16."""

    @property
    def w2_scale(self) -> Tensor | None:
        """FP32 [H/128, I/128] for e4m3 weights, else None."""


@dataclass(frozen=True)
class MoEDetail:
    """A call with its intermediates. Masked slots hold zeros.

    Attributes:
        y: BF16 [T, H].
        slots: BF16 [T, K+S, H], what each expert wrote for the combine.
        inter: e4m3 or BF16 [T, K+S, I], input of the second linear.
        inter_scale: FP32 [T, K+S, I/128] for FP8 weights, else None.
    """

    y: Tensor
    slots: Tensor
    inter: Tensor
    inter_scale: Tensor | None


def scaled_matmul(x: Tensor, x_scale: Tensor | None, w: Tensor, w_scale: Tensor | None) -> Tensor:
    """``x @ w.T`` with two-level accumulation.

    Args:
        x: [M, K] e4m3 with x_scale FP32 [M, K/128], or BF16 with None.
        x_scale: see x.
        w: [N, K] e4m3 with w_scale FP32 [N/128, K/128], or BF16 with None.
        w_scale: see w.

    Returns:
        FP32 [M, N]: ``acc = fma(partial_kb, x_scale * w_scale, acc)``, kb ascending. BF16 operands
        have scale 1.
    """
    acc = torch.zeros(x.shape[0], w.shape[0])
    one = torch.ones(())
    for kb in range(x.shape[1] // GROUP):
        cols = slice(kb * GROUP, (kb + 1) * GROUP)
        # Products of e4m3 are multiples of 2**-18 below 2**18: their sum is exact in FP64.
        partial = (x[:, cols].double() @ w[:, cols].double().T).float()
        scale = one
        if x_scale is not None and w_scale is not None:
            per_row = w_scale[:, kb].repeat_interleave(GROUP)
            scale = x_scale[:, kb, None] * per_row[None, :]
        acc = fma32(partial, scale, acc)
    return acc


def swiglu(gate_up: Tensor, clamp: float | None) -> Tensor:
    """FP32 [M, 2I] (gate columns, then up columns) to FP32 [M, I].

    ``h = g / (1 + exp(-g)) * u``, with ``g = min(g, c)`` and ``u`` limited to [-c, c] before it
    when a clamp c is given. NaN stays NaN.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate / (1 + torch.exp(-gate)) * up


def expert_forward(
    spec: MoESpec, x: Tensor, x_scale: Tensor | None, expert: Expert
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One expert on M rows.

    Returns:
        BF16 [M, H]; the second linear's input (e4m3 or BF16 [M, I]); its scales or None.
    """
    h = swiglu(scaled_matmul(x, x_scale, expert.w1, expert.w1_scale), spec.swiglu_clamp)
    inter, inter_scale = h.bfloat16(), None
    if spec.weight_dtype == "fp8":
        inter, inter_scale = quantize_1x128(h)
    out = scaled_matmul(inter, inter_scale, expert.w2, expert.w2_scale)
    return out.bfloat16(), inter, inter_scale


def combine(slots: Tensor, topk_idx: Tensor, topk_weight: Tensor) -> Tensor:
    """Reduces BF16 slots [T, K+S, H] to BF16 [T, H].

    FP32 fma chain from 0: routed slots in ascending j with their FP32 weight, masked ones skipped
    (not multiplied by 0: a masked slot may hold NaN), then the shared slots with weight 1.
    """
    num_tokens, num_slots, hidden = slots.shape
    topk = topk_idx.shape[1]
    y = torch.zeros(num_tokens, hidden)
    for j in range(num_slots):
        if j < topk:
            rows = (topk_idx[:, j] >= 0).nonzero().squeeze(1)
            weight = topk_weight[rows, j, None]
        else:
            rows, weight = torch.arange(num_tokens), torch.ones(num_tokens, 1)
        y[rows] = fma32(weight, slots[rows, j].float(), y[rows])
    return y.bfloat16()


def _prepare(spec: MoESpec, x: Activations) -> tuple[Tensor, Tensor | None]:
    """The layer's input as the experts read it."""
    if isinstance(x, tuple):
        values, scale = x
        if spec.weight_dtype != "fp8" or values.dtype != torch.float8_e4m3fn:
            raise InputError(
                f"x is a pair with {values.dtype} values and the layer's weights are "
                f"{spec.weight_dtype}: a pair is (e4m3, FP32 scales) for an fp8 layer"
            )
        want = (*values.shape[:-1], spec.hidden // GROUP)
        if scale.dtype != torch.float32 or tuple(scale.shape) != want:
            raise InputError(f"x scales are {scale.dtype} {tuple(scale.shape)}: want FP32 {want}")
    else:
        values, scale = x, None
        if values.dtype != torch.bfloat16:
            raise InputError(f"x is {values.dtype}: give BF16, or (e4m3, FP32 scales)")
    if values.dim() != 2 or values.shape[1] != spec.hidden:
        raise InputError(f"x has shape {tuple(values.shape)}: want [T, {spec.hidden}]")
    if scale is None and spec.weight_dtype == "fp8":
        values, scale = quantize_1x128(values)
    return values, scale


def _check_routes(spec: MoESpec, tokens: int, topk_idx: Tensor, topk_weight: Tensor) -> None:
    want = (tokens, spec.topk)
    if tuple(topk_idx.shape) != want or topk_idx.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"topk_idx is {topk_idx.dtype} {tuple(topk_idx.shape)}: want int32 or int64 {want}"
        )
    if tuple(topk_weight.shape) != want or topk_weight.dtype != torch.float32:
        raise InputError(
            f"topk_weight is {topk_weight.dtype} {tuple(topk_weight.shape)}: want float32 {want}"
        )
    bad = ((topk_idx < -1) | (topk_idx >= spec.num_experts)).nonzero()
    if len(bad):
        t, j = bad[0].tolist()
        raise InputError(
            f"topk_idx[{t}, {j}] = {int(topk_idx[t, j])}: must be -1 (masked) or an expert in "
            f"0..{spec.num_experts - 1}"
        )


def moe_forward_detail(
    spec: MoESpec,
    x: Activations,
    topk_idx: Tensor,
    topk_weight: Tensor,
    experts: Sequence[Expert] | Mapping[int, Expert],
    shared: Sequence[Expert] = (),
) -> MoEDetail:
    """``moe_forward`` with every slot and intermediate; see there."""
    values, scale = _prepare(spec, x)
    tokens = values.shape[0]
    _check_routes(spec, tokens, topk_idx, topk_weight)
    if len(shared) != spec.num_shared:
        raise InputError(f"{len(shared)} shared experts given: the spec has {spec.num_shared}")

    slots = torch.zeros(tokens, spec.num_slots, spec.hidden, dtype=torch.bfloat16)
    fp8 = spec.weight_dtype == "fp8"
    inter_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    inter = torch.zeros(tokens, spec.num_slots, spec.inter, dtype=inter_dtype)
    inter_scale = torch.zeros(tokens, spec.num_slots, spec.inter // GROUP) if fp8 else None

    def run(t: Tensor, j: Tensor, expert: Expert) -> None:
        row_scale = None if scale is None else scale[t]
        slots[t, j], h, h_scale = expert_forward(spec, values[t], row_scale, expert)
        # index_put_ has no e4m3 kernel; the bytes are what is stored.
        (inter.view(torch.uint8) if fp8 else inter)[t, j] = h.view(torch.uint8) if fp8 else h
        if inter_scale is not None and h_scale is not None:
            inter_scale[t, j] = h_scale

    for e in sorted(set(topk_idx.flatten().tolist())):
        if e >= 0:
            t, j = (topk_idx == e).nonzero(as_tuple=True)
            run(t, j, experts[e])
    every = torch.arange(tokens)
    for s, expert in enumerate(shared):
        run(every, torch.full_like(every, spec.topk + s), expert)

    y = combine(slots, topk_idx, topk_weight)
    return MoEDetail(y=y, slots=slots, inter=inter, inter_scale=inter_scale)


def moe_forward(
    spec: MoESpec,
    x: Activations,
    topk_idx: Tensor,
    topk_weight: Tensor,
    experts: Sequence[Expert] | Mapping[int, Expert],
    shared: Sequence[Expert] = (),
) -> Tensor:
    """The MoE layer on all tokens at once.

    Args:
        spec: the layer.
        x: BF16 [T, H] (quantised here for an fp8 layer), or a pair of e4m3 [T, H] and FP32 scales
            [T, H/128]. T may be 0.
        topk_idx: int32 or int64 [T, K]; -1 is masked, duplicates in a row count each time.
        topk_weight: FP32 [T, K].
        experts: routed experts by global id; a mapping may leave out experts without routes.
        shared: the spec's ``num_shared`` shared experts.

    Returns:
        BF16 [T, H]. A token whose routes are all masked, without shared experts, gets zeros.

    Raises:
        InputError: a shape, dtype or expert id breaks the contract.
    """
    return moe_forward_detail(spec, x, topk_idx, topk_weight, experts, shared).y
