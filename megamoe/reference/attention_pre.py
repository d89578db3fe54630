"""The oracle of the attention-pre kernel: each node of the graph on whole tensors.

Shape legend: M token rows, H hidden, Lq/Lkv latents, R rotated columns, N main heads of D columns,
I index heads of 128 columns, L keys of a request.

Formulas: DeepSeek-V3.2-Exp ``inference/model.py`` (indexer, absorbed queries) with GLM-5's
interleaved RoPE in the indexer, as in transformers' ``modeling_glm_moe_dsa``. Values are computed
in FP64 and rounded only where the kernel stores them: BF16 for the residual, the normed hidden
state, main and absorbed queries and rotary keys; e4m3 with FP32 scales per 128 columns for GEMM
inputs and caches; FP32 for head weights and scores. ``quantize=False`` leaves every rounding out:
then the nodes are the model's own mathematics.

Cache layouts: the latent cache has a row per slot, e4m3 latent, FP32 scales, BF16 rotary key
(FlashMLA's ``fp8_ds_mla``, 656 bytes for GLM-5). The index cache has a row per page of 64 keys:
64 x 128 codes, then 64 FP32 scales (DeepGEMM's paged layout), not scale after code per key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.errors import InputError
from megamoe.reference.quant import E4M3_MAX, TINY_AMAX, dequantize_1x128, quantize_1x128
from megamoe.spec import GROUP, INDEX_DIM, INDEX_PAGE, AttentionPreSpec

__all__ = [
    "AttentionPreDetail",
    "AttentionPreOracle",
    "Coded",
    "layer_norm",
    "quantize",
    "read_index",
    "read_latent",
    "rms_norm",
    "rope_table",
    "rotate",
    "scaled_weight",
    "write_index",
    "write_latent",
]


class Coded(NamedTuple):
    """A tensor as it goes into an FP8 GEMM.

    Attributes:
        exact: FP64, before quantisation.
        value: FP64, what the codes stand for; ``exact`` without quantisation.
        codes: e4m3, or None without quantisation.
        scales: FP32 per 128 columns, or None.
    """

    exact: Tensor
    value: Tensor
    codes: Tensor | None
    scales: Tensor | None


def quantize(x: Tensor, *, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """e4m3 codes and FP32 scales per 128 columns; ``pow2`` rounds scales up to powers of two."""
    if not pow2:
        return quantize_1x128(x)
    groups = x.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().nan_to_num(0.0, torch.inf).amax(-1).clamp_min(TINY_AMAX)
    mantissa, exponent = torch.frexp(amax / torch.full_like(amax, E4M3_MAX))
    scales = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())
    codes = (groups / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scales


def scaled_weight(w: Tensor, scales: Tensor) -> Tensor:
    """FP64 values of an e4m3 weight [N, K] with FP32 scales per 128x128; N may end in a block."""
    n, k = w.shape
    if scales.shape != (-(-n // GROUP), k // GROUP):
        raise InputError(f"scales {tuple(scales.shape)} do not fit a weight {tuple(w.shape)}")
    rows = scales.double().repeat_interleave(GROUP, 0)[:n]
    values: Tensor = w.double().unflatten(1, (-1, GROUP)) * rows.unsqueeze(-1)
    return values.flatten(1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` per row, in the precision of ``x``."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm per row, in the precision of ``x``."""
    normed: Tensor = torch.nn.functional.layer_norm(
        x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps
    )
    return normed


def rope_table(spec: AttentionPreSpec, num_positions: int) -> Tensor:
    """FP32 [num_positions, R]: cosines, then sines, of position * theta**(-2i/R), i < R/2.

    Angles are FP32 products, as in the models' own code: at position 10**5 their rounding shows.
    """
    r = spec.qk_rope
    inverse = 1.0 / (spec.rope_theta ** (torch.arange(0, r, 2, dtype=torch.float) / r))
    angles = torch.arange(num_positions, dtype=torch.float)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], 1)


def rotate(x: Tensor, table_rows: Tensor) -> Tensor:
    """Rotates pairs (2i, 2i+1) of [M, ..., R] by the angles of ``table_rows`` [M, R], in place.

    HF moves even columns to the front and odd ones behind; vLLM, SGLang and this kernel leave them
    where they are. Dot products agree, cache bytes do not.
    """
    half = x.shape[-1] // 2
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    cos, sin = (part.to(x.dtype).reshape(shape) for part in table_rows.split(half, 1))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def write_latent(cache: Tensor, slots: Tensor, codes: Tensor, scales: Tensor, rope: Tensor) -> None:
    """Writes rows e4m3 [M, Lkv], FP32 [M, Lkv/128], BF16 [M, R] into bytes [slots, row]."""
    parts = (codes, scales, rope.bfloat16())
    cache[slots] = torch.cat([p.contiguous().view(torch.uint8) for p in parts], 1)


def read_latent(cache: Tensor, slots: Tensor, spec: AttentionPreSpec) -> tuple[Tensor, Tensor]:
    """FP32 latent [M, Lkv] and BF16 rotary key [M, R] of cache rows."""
    rows = cache[slots]
    sizes = (spec.kv_lora, 4 * (spec.kv_lora // GROUP), 2 * spec.qk_rope)
    codes, scales, rope = (p.contiguous() for p in rows.split(sizes, 1))
    latent = dequantize_1x128(codes.view(torch.float8_e4m3fn), scales.view(torch.float32))
    return latent, rope.view(torch.bfloat16)


def _page_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [pages, 64, 128] and FP32 [pages, 64] of bytes [pages, 64 * 132], sharing memory."""
    codes = cache[:, : INDEX_PAGE * INDEX_DIM].unflatten(1, (INDEX_PAGE, INDEX_DIM))
    scales = cache.view(torch.float32)[:, INDEX_PAGE * INDEX_DIM // 4 :]
    return codes.view(torch.float8_e4m3fn), scales


def write_index(cache: Tensor, slots: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Writes keys e4m3 [M, 128], FP32 [M] into bytes [pages, 64 * 132] at page * 64 + place."""
    key_view, scale_view = _page_views(cache)
    page, place = slots // INDEX_PAGE, slots % INDEX_PAGE
    # e4m3 has no index_put on the CPU; bytes do.
    key_view.view(torch.uint8)[page, place] = codes.contiguous().view(torch.uint8)
    scale_view[page, place] = scales


def read_index(cache: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """e4m3 [length, 128] and FP32 [length]: the first keys of a request by its page numbers."""
    key_view, scale_view = _page_views(cache)
    wanted = pages[: -(-length // INDEX_PAGE)].long()
    codes = key_view.view(torch.uint8)[wanted].flatten(0, 1)[:length]
    return codes.view(torch.float8_e4m3fn), scale_view[wanted].flatten()[:length]


@dataclass(frozen=True)
class AttentionPreDetail:
    """A call with every node's results; the caches are written in place.

    Attributes:
        residual: [M, H] ``x + residual``.
        normed: [M, H].
        hidden: ``normed`` as GEMM input.
        query_latent: [M, Lq] after its norm.
        latent: [M, Lkv] after its norm.
        key_rope: [M, R].
        gate: [M, I], unscaled.
        index_key: [M, 128] after norm and rotation.
        index_query: [M, I, 128] after rotation.
        index_weights: FP64 [M, I], gate times the constants, without the query's scale.
        queries: [M, N, D], rotated.
        absorbed: [M, N, Lkv].
        scores: per request, [new tokens, L]; -inf where a token may not look.
    """

    residual: Tensor
    normed: Tensor
    hidden: Coded
    query_latent: Coded
    latent: Coded
    key_rope: Tensor
    gate: Tensor
    index_key: Coded
    index_query: Coded
    index_weights: Tensor
    queries: Tensor
    absorbed: Tensor
    scores: tuple[Tensor, ...]


class AttentionPreOracle:
    """The nodes of one layer.

    Args:
        spec: the layer.
        weights: by the names of ``attention_pre.graphs``: ``input_norm``, ``w_qkv_a`` and
            ``w_qkv_a_scales``, ``q_norm``, ``kv_norm``, ``w_gate``, ``w_index_k`` (+ scales),
            ``index_norm``, ``index_norm_bias``, ``w_index_q`` (+ scales), ``w_q_b`` (+ scales),
            ``w_uk``, ``rope_table``. An FP8 weight without scales is taken as it is.
        quantize: whether stored values are rounded.
    """

    def __init__(
        self, spec: AttentionPreSpec, weights: Mapping[str, Tensor], *, quantize: bool = True
    ) -> None:
        self.spec = spec
        self._weights = weights
        self._quantize = quantize

    def _matrix(self, name: str) -> Tensor:
        scales = self._weights.get(f"{name}_scales")
        w = self._weights[name]
        return w.double() if scales is None else scaled_weight(w, scales)

    def _bf16(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).double() if self._quantize else x

    def _coded(self, x: Tensor) -> Coded:
        if not self._quantize:
            return Coded(x, x, None, None)
        codes, scales = quantize(x.float(), pow2=self.spec.scale_pow2)
        return Coded(x, dequantize_1x128(codes, scales).double(), codes, scales)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Coded]:
        """A0: residual, normed hidden state, and the latter as GEMM input."""
        summed = self._bf16(x.double() + residual.double())
        normed = self._bf16(rms_norm(summed, self._weights["input_norm"], self.spec.input_eps))
        return summed, normed, self._coded(normed)

    def latents(self, hidden: Tensor, positions: Tensor) -> tuple[Coded, Coded, Tensor]:
        """B0: query latent, key/value latent (both normed), rotated key [M, R]."""
        s = self.spec
        out = hidden @ self._matrix("w_qkv_a").T
        q_a, kv_a, k_pe = out.split((s.q_lora, s.kv_lora, s.qk_rope), 1)
        query = self._coded(rms_norm(q_a, self._weights["q_norm"], s.latent_eps))
        latent = self._coded(rms_norm(kv_a, self._weights["kv_norm"], s.latent_eps))
        return query, latent, self._bf16(rotate(k_pe, self._table(positions)))

    def _table(self, positions: Tensor) -> Tensor:
        return self._weights["rope_table"][positions.long()]

    def gate(self, normed: Tensor) -> Tensor:
        """C0: [M, I]."""
        return normed @ self._weights["w_gate"].double().T

    def _rotate_index(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates the first R of the last 128 columns."""
        r = self.spec.qk_rope
        rotated = rotate(x[..., :r], self._table(positions))
        return torch.cat([rotated, x[..., r:]], -1)

    def index_key(self, hidden: Tensor, positions: Tensor) -> Coded:
        """B1: [M, 128]."""
        key = layer_norm(
            hidden @ self._matrix("w_index_k").T,
            self._weights["index_norm"],
            self._weights["index_norm_bias"],
            self.spec.index_eps,
        )
        return self._coded(self._rotate_index(key, positions))

    def index_query(self, query: Tensor, positions: Tensor) -> Coded:
        """D1: [M, I, 128]."""
        out = (query @ self._matrix("w_index_q").T).unflatten(1, (-1, INDEX_DIM))
        return self._coded(self._rotate_index(out, positions))

    def queries(self, query: Tensor, positions: Tensor) -> Tensor:
        """D0: [M, N, D], the last R columns of a head rotated."""
        s = self.spec
        out = (query @ self._matrix("w_q_b").T).unflatten(1, (s.num_heads, s.head_dim))
        nope, pe = out.split((s.qk_nope, s.qk_rope), -1)
        return self._bf16(torch.cat([nope, rotate(pe, self._table(positions))], -1))

    def absorb(self, queries: Tensor) -> Tensor:
        """D2: [M, N, Lkv]."""
        nope = queries[..., : self.spec.qk_nope]
        return self._bf16(torch.einsum("mnd,ndc->mnc", nope, self._weights["w_uk"].double()))

    def scores(self, query: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """E1 for tokens of one request: [T, L].

        Args:
            query: [T, I, 128].
            weights: [T, I], gate times constants.
            keys: [L, 128].
            visible: [T], keys that each token may look at.
        """
        dots = torch.einsum("tid,ld->til", query, keys.double()).relu()
        scores = torch.einsum("ti,til->tl", weights, dots)
        allowed = torch.arange(keys.shape[0]) < visible[:, None]
        return scores.masked_fill(~allowed, -torch.inf)

    def run(
        self,
        inputs: Mapping[str, Tensor],
        new_tokens: Sequence[int],
        *,
        key_history: Sequence[Tensor] | None = None,
    ) -> AttentionPreDetail:
        """All nodes of one call.

        Args:
            inputs: ``x``, ``residual`` [M, H]; ``positions`` int32 [M]; ``context_lens`` int32
                [B]; when quantising also ``latent_slots``, ``index_slots`` int64 [M],
                ``block_table`` int32 [B, pages], and the caches ``latent_cache`` and
                ``index_cache``, which are written.
            new_tokens: of each request, in the order of the rows.
            key_history: without quantisation, each request's earlier index keys [L - new, 128],
                rotated and in this kernel's column order.
        """
        s = self.spec
        positions = inputs["positions"]
        residual, normed, hidden = self.add_norm(inputs["x"], inputs["residual"])
        query, latent, key_rope = self.latents(hidden.value, positions)
        gate = self.gate(normed)
        index_key = self.index_key(hidden.value, positions)
        index_query = self.index_query(query.value, positions)
        weights = gate * s.index_weight_scale
        queries = self.queries(query.value, positions)
        if latent.codes is not None and latent.scales is not None:
            slots = inputs["latent_slots"]
            write_latent(inputs["latent_cache"], slots, latent.codes, latent.scales, key_rope)
        if index_key.codes is not None and index_key.scales is not None:
            codes, scales = index_key.codes, index_key.scales[:, 0]
            write_index(inputs["index_cache"], inputs["index_slots"], codes, scales)

        scores = []
        row = 0
        for b, new in enumerate(new_tokens):
            length = int(inputs["context_lens"][b])
            rows = slice(row, row + new)
            if key_history is not None:
                keys = torch.cat([key_history[b].double(), index_key.value[rows]])
            else:
                codes, scales = read_index(inputs["index_cache"], inputs["block_table"][b], length)
                keys = codes.double() * scales.double()[:, None]
            visible = length - new + 1 + torch.arange(new)
            scores.append(self.scores(index_query.value[rows], weights[rows], keys, visible))
            row += new
        return AttentionPreDetail(
            residual,
            normed,
            hidden,
            query,
            latent,
            key_rope,
            gate,
            index_key,
            index_query,
            weights,
            queries,
            self.absorb(queries),
            tuple(scores),
        )
