"""Attention-pre cases, and the comparison of an implementation's buffers with the oracle's nodes.

Each node is compared on the implementation's own inputs to that node, so that one rounding to e4m3
that falls the other way does not hide behind, or excuse, an error further down. What is compared:

    BF16 results    within one BF16 step: both round, perhaps from different sides of a boundary
    e4m3 codes      the exact value lies within half a step of what the code stands for
    FP32 results    within 8 standard errors of an FP32 sum of K products
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.attention_pre.data import random_caches, random_inputs, random_weights
from megamoe.attention_pre.plan import Buffer
from megamoe.attention_pre.tiling import Batch
from megamoe.backends.attention_operands import TORCH_DTYPES
from megamoe.reference.attention_pre import AttentionPreOracle, read_index, read_latent
from megamoe.reference.quant import dequantize_1x128
from megamoe.spec import AttentionPreSpec

__all__ = ["SMALL", "AttentionCase", "check_attention", "poisoned"]

SMALL = AttentionPreSpec(
    hidden=512,
    num_heads=4,
    q_lora=256,
    kv_lora=128,
    qk_nope=64,
    qk_rope=64,
    index_heads=8,
)


def poisoned(buffers: Iterable[Buffer]) -> dict[str, Tensor]:
    """The buffers, every byte 0xff: NaN in every floating type."""
    made = {}
    for buffer in buffers:
        assert all(isinstance(d, int) for d in buffer.shape), buffer
        tensor = torch.empty(buffer.shape, dtype=TORCH_DTYPES[buffer.dtype])
        tensor.view(torch.uint8).fill_(0xFF)
        made[buffer.name] = tensor
    return made


@dataclass(frozen=True)
class AttentionCase:
    """A layer and a batch; every tensor follows from the seed."""

    spec: AttentionPreSpec
    batch: Batch
    seed: int = 0

    def weights(self) -> dict[str, Tensor]:
        """By the graph's names."""
        return random_weights(self.spec, self.batch.logits_stride, self.seed)

    def inputs(self) -> dict[str, Tensor]:
        """Inputs and caches, fresh."""
        made = random_inputs(self.spec, self.batch, self.seed + 1)
        return made | random_caches(self.spec, self.batch, self.seed + 2)


def _fail(what: str, bad: Tensor, actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    index = tuple(bad.nonzero()[0].tolist())
    raise AssertionError(
        f"{what}: {int(bad.sum())} of {bad.numel()} differ; at {index}: actual "
        f"{actual[index].item()!r}, expected {expected[index].item()!r}, allowed {bound[index]:.3e}"
    )


def _check_values(what: str, actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} against {expected.shape}"
    limit = torch.as_tensor(bound, dtype=torch.double).expand(expected.shape)
    bad = ~((actual.double() - expected.double()).abs() <= limit)
    bad &= ~((actual == expected) & expected.isinf())
    if bool(bad.any()):
        _fail(what, bad, actual.double(), expected.double(), limit)


def _check_bf16(what: str, actual: Tensor, expected: Tensor, noise: float) -> None:
    _check_values(what, actual, expected, 2**-7 * expected.abs() + noise)


def _check_codes(what: str, codes: Tensor, scales: Tensor, exact: Tensor, noise: float) -> None:
    """Half a step is 2^-4 of the value's power of two, and 2^-10 of the scale when subnormal."""
    value = dequantize_1x128(codes, scales)
    step = scales.double().repeat_interleave(128, -1)
    power = torch.exp2(torch.floor(torch.log2((exact.abs() / step).clamp_min(2**-6))))
    _check_values(what, value, exact, power * step * 2**-4 * (1 + 2**-20) + noise)


def _noise(k: int, expected: Tensor, bits: int = 24) -> float:
    """FP32 sums of K products; ``bits`` where a tensor core keeps fewer in partials of 128."""
    largest = float(expected[~expected.isinf()].abs().max())
    return (8 * math.sqrt(k) * 2**-24 + (2.0 ** (3 - bits) if bits < 24 else 0)) * largest


def check_attention(
    case: AttentionCase,
    got: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    *,
    fp8_bits: int = 24,
) -> None:
    """Compares every node present in ``got`` (buffers after a run) with the oracle.

    ``fp8_bits``: what the FP8 GEMMs keep of a partial sum (``FP8_TENSOR_CORE_BITS`` on Hopper).
    """
    s, batch, bits = case.spec, case.batch, fp8_bits
    oracle = AttentionPreOracle(s, weights)
    clean = case.inputs()
    positions = clean["positions"]

    if "A0.quant.codes" in got:
        summed, normed, _ = oracle.add_norm(clean["x"], clean["residual"])
        _check_bf16("A0 residual", got["A0.add.out"], summed, 0)
        hidden = dequantize_1x128(got["A0.quant.codes"], got["A0.quant.scales"]).double()
        if "A0.rmsnorm.out" in got:
            _check_bf16("A0 normed", got["A0.rmsnorm.out"], normed, _noise(s.hidden, normed))
        codes, scales = got["A0.quant.codes"], got["A0.quant.scales"]
        _check_codes("A0 codes", codes, scales, normed, float(normed.abs().max()) * 2**-8)
    if "B0.partials" in got:
        q, latent, rope = oracle.latents(hidden, positions)
        noise = _noise(s.hidden, q.exact, bits)
        codes, scales = got["B0.quant.codes"], got["B0.quant.scales"]
        _check_codes("B0 codes", codes, scales, q.exact, noise)
        value, key_rope = read_latent(got["latent_cache"], clean["latent_slots"], s)
        step = value.abs() * 2**-4 + latent.exact.abs().amax(-1, keepdim=True) / 448 * 2**-10
        _check_values("latent cache", value, latent.exact, step * (1 + 2**-3) + noise)
        _check_bf16("rotary key", key_rope, rope, _noise(s.hidden, rope, bits))
        kept = torch.ones(len(clean["latent_cache"]), dtype=torch.bool)
        kept[clean["latent_slots"]] = False
        assert torch.equal(got["latent_cache"][kept], clean["latent_cache"][kept])
    if "C0.gemm.out" in got and "A0.rmsnorm.out" in got:
        gate = oracle.gate(got["A0.rmsnorm.out"].double())
        _check_values("C0 gate", got["C0.gemm.out"].sum(1), gate, _noise(s.hidden, gate))
    if "w_index_k" in got and "A0.quant.codes" in got:
        key = oracle.index_key(hidden, positions)
        page, place = clean["index_slots"] // 64, clean["index_slots"] % 64
        for token in range(batch.rows):
            codes, scales = read_index(got["index_cache"], page[token : token + 1], 64)
            at = int(place[token])
            found = codes[at : at + 1], scales[at : at + 1, None]
            exact = key.exact[token : token + 1]
            _check_codes(
                f"index key of token {token}", *found, exact, _noise(s.hidden, exact, bits)
            )
    if "B0.quant.codes" in got:
        query = dequantize_1x128(got["B0.quant.codes"], got["B0.quant.scales"]).double()
    if "D1.fold.out" in got:
        iq = oracle.index_query(query, positions)
        # The kernel keeps the query's scale in the weight alone.
        parts = got["C0.gemm.out"].double().reshape(batch.rows, -1, s.index_heads)
        amax = iq.exact.abs().amax(-1)
        scales = (amax / 448).float().unsqueeze(-1)
        factor = s.index_weight_scale / 448
        expected = parts.sum(1) * amax * factor
        bound = parts.sum(1).abs() * _noise(s.q_lora, iq.exact, bits) * factor
        bound += _noise(parts.shape[1], parts) * amax * factor + expected.abs() * 2**-21
        _check_values("D1 weights", got["D1.fold.out"], expected, bound)
        noise = _noise(s.q_lora, iq.exact, bits) + float(amax.max()) * 2**-20
        _check_codes("D1 codes", got["D1.quant.codes"], scales, iq.exact, noise)
    if "D0.rope.out" in got and "B0.quant.codes" in got:
        queries = oracle.queries(query, positions)
        _check_bf16("D0", got["D0.rope.out"], queries, _noise(s.q_lora, queries, bits))
    if "D2.bmm.out" in got:
        absorbed = oracle.absorb(got["D0.rope.out"].double())
        _check_bf16("D2", got["D2.bmm.out"], absorbed, _noise(s.qk_nope, absorbed))
    if "E1.paged_logits.out" in got:
        _check_scores(case, oracle, got, clean, bits)


def _check_scores(
    case: AttentionCase,
    oracle: AttentionPreOracle,
    got: Mapping[str, Tensor],
    clean: Mapping[str, Tensor],
    bits: int,
) -> None:
    row = 0
    for b, (new, length) in enumerate(case.batch.requests):
        rows = slice(row, row + new)
        codes, scales = read_index(got["index_cache"], clean["block_table"][b], length)
        keys = codes.double() * scales.double()[:, None]
        visible = length - new + 1 + torch.arange(new)
        query = got["D1.quant.codes"][rows].double()
        weights = got["D1.fold.out"][rows].double()
        expected = oracle.scores(query, weights, keys, visible)
        found = got["E1.paged_logits.out"][rows]
        bound = _noise(128 + case.spec.index_heads, expected, bits)
        _check_values(f"E1 of request {b}", found[:, :length], expected, bound)
        end = case.batch.kv_tiles(b) * 256
        beyond = found[:, length:end]
        assert bool((beyond == -torch.inf).all()), f"E1 of request {b}: keys past {length}"
        row += new
