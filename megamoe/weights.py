"""Expert weights of one rank in the layer's layout, and where they come from.

Local experts of a rank are its routed experts 0..E/R-1 (global id = rank * E/R + local), then the
shared experts. Shape legend: H hidden, I intermediate, E experts, R ranks, S shared experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.checkpoint import PROJECTIONS, Checkpoint, Projection, StoredWeight
from megamoe.errors import InputError, SpecError
from megamoe.reference.quant import dequantize_128x128, quantize_128x128
from megamoe.spec import GROUP, MoESpec, WeightDtype

__all__ = [
    "ExpertWeights",
    "check_expert",
    "iter_local_experts",
    "kind_of",
    "local_expert_ids",
    "need_values",
    "random_expert",
    "random_experts",
]

_CHUNK_ROWS = GROUP
"""Rows quantised at a time: bounds the FP32 temporaries of a large weight."""


@dataclass(frozen=True)
class ExpertWeights:
    """One local expert.

    Attributes:
        index: place among the rank's local experts, 0..E/R+S-1.
        w1: [2I, H], gate rows then up rows; e4m3 or BF16.
        w1_scale: FP32 [2I/128, H/128] of 128x128 blocks for e4m3, else None.
        w2: [H, I]; e4m3 or BF16.
        w2_scale: FP32 [H/128, I/128] for e4m3, else None.
    """

    index: int
    w1: Tensor
    w1_scale: Tensor | None
    w2: Tensor
    w2_scale: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.w1, self.w1_scale, self.w2, self.w2_scale)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def check_expert(spec: MoESpec, expert: ExpertWeights, num_ranks: int) -> None:
    """Checks an expert against the layer.

    Raises:
        InputError: index, a shape, a dtype, no values or a missing scale; the message names the
            tensor.
    """
    if not isinstance(expert, ExpertWeights):
        raise InputError(f"an expert is a {kind_of(expert)}: must be ExpertWeights")
    local = spec.experts_per_rank(num_ranks) + spec.num_shared
    if type(expert.index) is not int or not 0 <= expert.index < local:
        raise InputError(
            f"expert index {expert.index!r}: must be an int; this rank has local experts "
            f"0..{local - 1} ({local - spec.num_shared} routed, {spec.num_shared} shared)"
        )
    fp8 = spec.weight_dtype == "fp8"
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    shapes = {"w1": (2 * spec.inter, spec.hidden), "w2": (spec.hidden, spec.inter)}
    for name, shape in shapes.items():
        w, scale = getattr(expert, name), getattr(expert, f"{name}_scale")
        _check(expert.index, name, w, dtype, shape)
        if fp8:
            blocks = (shape[0] // GROUP, shape[1] // GROUP)
            _check(expert.index, f"{name}_scale", scale, torch.float32, blocks)
        elif scale is not None:
            raise InputError(f"expert {expert.index}: {name}_scale is given for BF16 weights")


def _check(
    index: int, name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if tensor is None:
        raise InputError(f"expert {index}: {name} is missing; want {dtype} {shape}")
    need_values(f"expert {index}: {name}", tensor)
    if tensor.is_meta:
        raise InputError(f"expert {index}: {name} is on meta, where nothing has values: load it")
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise InputError(
            f"expert {index}: {name} is {tensor.dtype} {tuple(tensor.shape)}; want {dtype} {shape}"
        )


def kind_of(given: object) -> str:
    """Type of a value, for a message."""
    return f"{type(given).__module__}.{type(given).__qualname__}".removeprefix("builtins.")


def need_values(name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose memory does not hold its values: backends read addresses.

    Raises:
        InputError: it is no tensor, is sparse, or is negated only when torch reads it.
    """
    given: object = tensor
    if not isinstance(given, Tensor):
        raise InputError(f"{name} is a {kind_of(given)}: must be a torch.Tensor")
    if tensor.layout != torch.strided:
        raise InputError(f"{name} is {tensor.layout}: must be torch.strided; pass its to_dense()")
    if tensor.is_neg():
        raise InputError(f"{name} is a lazily negated view: pass its resolve_neg()")


def local_expert_ids(spec: MoESpec, rank: int, num_ranks: int) -> range:
    """Global ids of the routed experts of a rank.

    Raises:
        SpecError: the ranks do not divide the experts, or there is no such rank.
    """
    local = spec.experts_per_rank(num_ranks)
    if not 0 <= rank < num_ranks:
        raise SpecError(f"rank = {rank}: must be in 0..{num_ranks - 1}")
    return range(rank * local, (rank + 1) * local)


def random_expert(
    spec: MoESpec,
    global_id: int,
    index: int,
    seed: int,
    scale: float = 1.0,
    device: str | torch.device = "cpu",
) -> ExpertWeights:
    """One expert as a function of (seed, global id) alone; shared expert s has id E + s.

    Drawn on ``device``: a GPU takes milliseconds where a core takes a second, and draws others.

    Weights are normal with standard deviation ``scale / sqrt(columns)``, and each 128x128 block is
    multiplied by its own 2**u, u uniform in [-1.5, 1.5]: blocks then differ in scale by up to 8x,
    so that a wrong scale index shows.
    """
    generator = torch.Generator(device).manual_seed((seed * 1_000_003 + global_id) % (1 << 63))

    def weight(rows: int, cols: int) -> tuple[Tensor, Tensor | None]:
        w = torch.randn(rows, cols, generator=generator, device=device)
        u = torch.rand(rows // GROUP, cols // GROUP, generator=generator, device=device) * 3 - 1.5
        factor = torch.exp2(u) * (scale / cols**0.5)
        w.view(rows // GROUP, GROUP, cols // GROUP, GROUP).mul_(factor[:, None, :, None])
        if spec.weight_dtype == "bf16":
            return w.bfloat16(), None
        # By bands of rows, so that a large expert needs one FP32 copy of itself and not several.
        bands = [quantize_128x128(band) for band in w.split(_CHUNK_ROWS)]
        q, scales = zip(*bands, strict=True)
        codes = torch.cat([band.view(torch.uint8) for band in q]).view(torch.float8_e4m3fn)
        return codes, torch.cat(scales)

    w1, w1_scale = weight(2 * spec.inter, spec.hidden)
    w2, w2_scale = weight(spec.hidden, spec.inter)
    return ExpertWeights(index, w1, w1_scale, w2, w2_scale)


def random_experts(
    spec: MoESpec,
    rank: int,
    num_ranks: int,
    seed: int,
    scale: float = 1.0,
    device: str | torch.device = "cpu",
) -> Iterator[ExpertWeights]:
    """This rank's experts, routed then shared: the same experts whatever the number of ranks.

    Raises:
        SpecError: the ranks do not divide the experts, or there is no such rank.
    """
    ids = local_expert_ids(spec, rank, num_ranks)
    for index, global_id in enumerate(ids):
        yield random_expert(spec, global_id, index, seed, scale, device)
    for s in range(spec.num_shared):
        yield random_expert(spec, spec.num_experts + s, len(ids) + s, seed, scale, device)


def iter_local_experts(
    checkpoint: Checkpoint,
    layer: int,
    rank: int,
    num_ranks: int,
    weight_dtype: WeightDtype | None = None,
) -> Iterator[ExpertWeights]:
    """Reads this rank's experts of a layer, one at a time, routed then shared.

    BF16 weights become FP8 by 128x128 blocks, FP8 weights become BF16, if ``weight_dtype`` asks for
    it. Beside the expert that is yielded, memory holds the mapped pages of one projection and
    FP32 temporaries of 128 rows.

    Args:
        checkpoint: an opened checkpoint.
        layer: an MoE layer of it.
        rank: this rank.
        num_ranks: R.
        weight_dtype: None keeps what is stored; must be that of the layer's spec.

    Raises:
        CheckpointError: not an MoE layer, or a tensor is missing or has another shape.
        SpecError: the ranks do not divide the experts, or there is no such rank.
    """
    spec = checkpoint.moe_spec(layer, weight_dtype)
    ids = local_expert_ids(spec, rank, num_ranks)
    for index, global_id in enumerate(ids):
        blank = _empty(spec, index)
        for projection in PROJECTIONS:
            _fill(blank, projection, checkpoint.expert(layer, global_id, projection))
        yield blank
    for s in range(spec.num_shared):
        blank = _empty(spec, len(ids) + s)
        for projection in PROJECTIONS:
            stored = checkpoint.shared_experts(layer, projection)
            _fill(blank, projection, _side_by_side(stored, projection, s, spec.num_shared))
        yield blank


def _side_by_side(stored: StoredWeight, projection: Projection, s: int, count: int) -> StoredWeight:
    """Shared expert s of ``count`` that were stored as one wide expert."""
    axis = 1 if projection == "down" else 0
    scale = None if stored.scale is None else stored.scale.chunk(count, axis)[s]
    return StoredWeight(stored.weight.chunk(count, axis)[s], scale)


def _empty(spec: MoESpec, index: int) -> ExpertWeights:
    fp8 = spec.weight_dtype == "fp8"
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16

    def pair(rows: int, cols: int) -> tuple[Tensor, Tensor | None]:
        scale = torch.empty(rows // GROUP, cols // GROUP) if fp8 else None
        return torch.empty(rows, cols, dtype=dtype), scale

    return ExpertWeights(index, *pair(2 * spec.inter, spec.hidden), *pair(spec.hidden, spec.inter))


def _fill(expert: ExpertWeights, projection: Projection, stored: StoredWeight) -> None:
    """Copies or converts a stored projection into its place."""
    weight, scale = expert.w2, expert.w2_scale
    if projection != "down":
        half = 0 if projection == "gate" else 1
        weight = expert.w1.chunk(2)[half]
        scale = None if expert.w1_scale is None else expert.w1_scale.chunk(2)[half]
    if (scale is None) == (stored.scale is None):
        weight.copy_(stored.weight)
        if scale is not None and stored.scale is not None:
            scale.copy_(stored.scale)
        return
    for row in range(0, weight.shape[0], _CHUNK_ROWS):
        rows = slice(row, row + _CHUNK_ROWS)
        blocks = slice(row // GROUP, (row + _CHUNK_ROWS) // GROUP)
        if scale is not None:
            weight[rows], scale[blocks] = quantize_128x128(stored.weight[rows])
        else:
            assert stored.scale is not None
            weight[rows] = dequantize_128x128(stored.weight[rows], stored.scale[blocks])
