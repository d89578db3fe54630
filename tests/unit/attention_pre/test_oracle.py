"""The oracle against HF's GLM-5 modules: the model's mathematics, then the kernel's roundings.

Without quantisation both compute the same formulas, HF in FP32, so a difference is FP32 rounding:
a sum of K products errs by at most K * 2^-24 of the sum of magnitudes, in the mean by its root.
With quantisation HF runs on the dequantised weights, and what remains are the activations'
roundings to e4m3, each at most 2^-4 and in the root mean square at most 2^-3/sqrt(12) of a value.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megamoe.attention_pre.data import random_caches, random_inputs, random_weights
from megamoe.attention_pre.tiling import Batch
from megamoe.reference.attention_pre import (
    AttentionPreDetail,
    AttentionPreOracle,
    quantize,
    read_index,
    read_latent,
    rope_table,
    scaled_weight,
)
from megamoe.spec import ATTENTION_MODELS, AttentionPreSpec

SMALL = AttentionPreSpec(
    hidden=512,
    num_heads=4,
    q_lora=256,
    kv_lora=128,
    qk_nope=64,
    qk_rope=64,
    index_heads=8,
)
E4M3_RMS = 2**-3 / math.sqrt(12)
"""Root mean square of a rounding to e4m3, relative to the value: a step is at most 2^-3 of it."""
NEW, REQUESTS = 4, 2


class _CatchScores(TorchFunctionMode):
    """Records what HF's indexer hands to topk: the scores, which it does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.topk, torch.topk):
            self.scores.append(args[0].detach().clone())
        return function(*args, **(kwargs or {}))


def _hf_config(spec: AttentionPreSpec):
    from transformers import GlmMoeDsaConfig

    config = GlmMoeDsaConfig(
        hidden_size=spec.hidden,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_heads,
        q_lora_rank=spec.q_lora,
        kv_lora_rank=spec.kv_lora,
        qk_nope_head_dim=spec.qk_nope,
        qk_rope_head_dim=spec.qk_rope,
        v_head_dim=1,  # nothing here reads the values
        index_n_heads=spec.index_heads,
        index_head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        max_position_embeddings=4096,
    )
    config._attn_implementation = "eager"
    return config


@dataclass
class HfRun:
    """HF's intermediates of one layer call, [M, ...] in this kernel's shapes."""

    q_a: Tensor
    q_latent: Tensor
    kv_latent: Tensor
    q_b: Tensor
    absorbed: Tensor
    key_rope: Tensor
    scores: Tensor


def _run_hf(spec: AttentionPreSpec, w: dict[str, Tensor], normed: Tensor, history: Tensor) -> HfRun:
    """Runs GlmMoeDsaAttention on [B, S, H] with index keys [B, P, 128] and zero latents before."""
    from transformers import DynamicCache
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

    config = _hf_config(spec)
    with torch.device("meta"):
        layer = hf.GlmMoeDsaAttention(config, 0)
    layer = layer.to_empty(device="cpu").eval()
    latents = w["w_qkv_a"]
    kv_b = torch.zeros(spec.num_heads, spec.qk_nope + 1, spec.kv_lora)
    kv_b[:, : spec.qk_nope] = w["w_uk"]
    for parameter, value in {
        layer.q_a_proj.weight: latents[: spec.q_lora],
        layer.kv_a_proj_with_mqa.weight: latents[spec.q_lora :],
        layer.q_a_layernorm.weight: w["q_norm"],
        layer.kv_a_layernorm.weight: w["kv_norm"],
        layer.q_b_proj.weight: w["w_q_b"],
        layer.kv_b_proj.weight: kv_b.flatten(0, 1),
        layer.o_proj.weight: torch.zeros(layer.o_proj.weight.shape),
        layer.indexer.wq_b.weight: w["w_index_q"],
        layer.indexer.wk.weight: w["w_index_k"],
        layer.indexer.k_norm.weight: w["index_norm"],
        layer.indexer.k_norm.bias: w["index_norm_bias"],
        layer.indexer.weights_proj.weight: w["w_gate"],
    }.items():
        parameter.data.copy_(value)
    caught: dict[str, Tensor] = {}
    for name in ("q_a_proj", "q_a_layernorm", "kv_a_layernorm", "q_b_proj"):
        getattr(layer, name).register_forward_hook(
            lambda module, args, out, name=name: caught.__setitem__(
                name, out.detach().flatten(0, 1)
            )
        )
    requests, past = history.shape[:2]
    new = normed.shape[1]
    cache = DynamicCache(config=config)
    cache.update_indexer(history, 0)
    cache.update(
        torch.zeros(requests, 1, past, spec.kv_lora),
        torch.zeros(requests, 1, past, spec.qk_rope),
        0,
    )
    positions = torch.arange(past, past + new)[None].expand(requests, -1)
    cos, sin = hf.GlmMoeDsaRotaryEmbedding(config)(normed, positions)
    assert cos.shape[-1] == spec.qk_rope
    mask = torch.full((new, past + new), -torch.inf).triu(past + 1)
    with _CatchScores() as catch, torch.no_grad():
        layer(normed, (cos, sin), mask.expand(requests, 1, -1, -1), cache=cache)
    # Latents of the new tokens are expanded to keys by kv_b: q . k equals (q W_UK) . latent.
    q = caught["q_b_proj"].unflatten(1, (spec.num_heads, spec.head_dim))
    absorbed = torch.einsum("mnd,ndc->mnc", q[..., : spec.qk_nope], w["w_uk"])
    rope_keys = cache.layers[0].values[:, 0, past:].flatten(0, 1)
    return HfRun(
        caught["q_a_proj"],
        caught["q_a_layernorm"],
        caught["kv_a_layernorm"],
        q,
        absorbed,
        rope_keys,
        catch.scores[0],
    )


def _hf_order(x: Tensor) -> Tensor:
    """Rotated columns in HF's order: even ones, then odd ones."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


def _case(spec: AttentionPreSpec, past: int):
    batch = Batch(((NEW, past + NEW),) * REQUESTS)
    return batch, _weights(spec, past), random_inputs(spec, batch, seed=2)


@functools.lru_cache(maxsize=1)
def _weights(spec: AttentionPreSpec, past: int) -> dict[str, Tensor]:
    return random_weights(spec, past + NEW, seed=1)


def _dense(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights in FP32, FP8 ones dequantised."""
    made = {}
    for name, w in weights.items():
        scales = weights.get(f"{name}_scales")
        if not name.endswith("_scales"):
            made[name] = (scaled_weight(w, scales) if scales is not None else w).float()
    return made


def _close(actual: Tensor, expected: Tensor, k: int, what: str) -> None:
    """FP32 against FP64 after sums of K: within 8 standard errors of the largest value."""
    bound = 8 * math.sqrt(k) * 2**-24 * expected.abs().max().item()
    error = (actual.double() - expected.double()).abs()
    at = divmod(int(error.argmax()), max(1, error.shape[-1]))
    assert error.max() <= bound, (
        f"{what}: {error.max():.3e} > {bound:.3e} at {at}: "
        f"{actual.flatten()[error.argmax()]} against {expected.flatten()[error.argmax()]}"
    )


def _rms_close(actual: Tensor, expected: Tensor, roundings: int, what: str) -> None:
    """Independent e4m3 roundings on the way: their mean squares add up."""
    bound = E4M3_RMS * math.sqrt(roundings)
    error = (actual.double() - expected.double()).square().mean().sqrt()
    relative = (error / expected.double().square().mean().sqrt()).item()
    assert relative <= bound, f"{what}: relative rms {relative:.4f} > {bound:.4f}"
    assert relative > 1e-5, f"{what}: nothing was rounded, the comparison compares nothing"


def _compare_exact(spec: AttentionPreSpec, past: int) -> None:
    batch, weights, inputs = _case(spec, past)
    dense = _dense(weights)
    oracle = AttentionPreOracle(spec, dense, quantize=False)
    history = torch.randn(REQUESTS, past, 128, generator=torch.Generator().manual_seed(3))
    new_tokens = [new for new, _ in batch.requests]
    got = oracle.run(inputs, new_tokens, key_history=list(history))
    normed = got.normed.float().unflatten(0, (REQUESTS, NEW))
    r = spec.qk_rope
    hf_history = torch.cat([_hf_order(history[..., :r]), history[..., r:]], -1)
    hf = _run_hf(spec, dense, normed, hf_history)

    _close(hf.q_latent, got.query_latent.exact, spec.hidden, "q_a after its norm")
    _close(hf.kv_latent, got.latent.exact, spec.hidden, "kv_a after its norm")
    _close(hf.key_rope, _hf_order(got.key_rope), spec.hidden, "rotary key")
    depth = spec.hidden + spec.q_lora
    _close(hf.q_b[..., : spec.qk_nope], got.queries[..., : spec.qk_nope], depth, "q_b, nope")
    _close(hf.absorbed, got.absorbed, depth + spec.qk_nope, "absorbed q")
    expected = torch.stack(got.scores).float()
    assert torch.equal(hf.scores.isinf(), expected.isinf()), "causal limits differ"
    seen = ~expected.isinf()
    _close(hf.scores[seen], expected[seen], depth + 128 + spec.index_heads, "index scores")


def _quantised(spec: AttentionPreSpec, past: int) -> tuple[AttentionPreDetail, HfRun, dict]:
    batch, weights, inputs = _case(spec, past)
    inputs |= random_caches(spec, batch, seed=4)
    lengths = inputs["context_lens"]
    history = []
    for b in range(REQUESTS):
        codes, scales = read_index(inputs["index_cache"], inputs["block_table"][b], int(lengths[b]))
        history.append((codes.float() * scales[:, None])[:past])
    got = AttentionPreOracle(spec, weights).run(inputs, [new for new, _ in batch.requests])
    normed = got.normed.float().unflatten(0, (REQUESTS, NEW))
    keys = torch.stack(history)
    r = spec.qk_rope
    hf_keys = torch.cat([_hf_order(keys[..., :r]), keys[..., r:]], -1)
    return got, _run_hf(spec, _dense(weights), normed, hf_keys), inputs


def _compare_quantised(spec: AttentionPreSpec, past: int) -> None:
    got, hf, inputs = _quantised(spec, past)
    nope = spec.qk_nope
    _rms_close(got.query_latent.exact, hf.q_latent, 1, "q_a: hidden rounded")
    _rms_close(got.latent.exact, hf.kv_latent, 1, "kv_a: hidden rounded")
    _rms_close(got.queries[..., :nope], hf.q_b[..., :nope], 2, "q_b: hidden and latent rounded")
    _rms_close(got.absorbed, hf.absorbed, 2, "absorbed q")
    seen = ~hf.scores.isinf()
    scores = torch.stack(got.scores)
    assert torch.equal(scores.isinf(), ~seen)
    # hidden, latent, query; hidden and key of new tokens; the gate's input is BF16.
    _rms_close(scores[seen], hf.scores[seen], 5, "index scores")

    latent, rope = read_latent(inputs["latent_cache"], inputs["latent_slots"], spec)
    _rms_close(latent, hf.kv_latent, 2, "latent cache: hidden and latent rounded")
    _rms_close(_hf_order(rope), hf.key_rope, 2, "rotary key in the cache: hidden, then BF16")


def test_the_mathematics_is_hf():
    _compare_exact(SMALL, past=70)


def test_the_roundings_are_all_that_differs_from_hf():
    _compare_quantised(SMALL, past=70)


@pytest.mark.slow
def test_full_dimensions():
    _compare_exact(ATTENTION_MODELS["glm-5.2"], past=1000)
    _compare_quantised(ATTENTION_MODELS["glm-5.2"], past=1000)


def test_the_epsilon_trap():
    """HF's latent norms use 1e-6 whatever the configuration says; ours is a field of the spec."""
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

    with torch.device("meta"):
        layer = hf.GlmMoeDsaAttention(_hf_config(SMALL), 0)
    assert layer.q_a_layernorm.variance_epsilon == SMALL.latent_eps
    assert layer.kv_a_layernorm.variance_epsilon == SMALL.latent_eps
    assert layer.indexer.k_norm.eps == SMALL.index_eps
    assert _hf_config(SMALL).rms_norm_eps == SMALL.input_eps


def test_cache_rows_and_pages():
    """Bytes where the layouts say: 656 per token; per page all codes, then all scales."""
    spec = ATTENTION_MODELS["glm-5.2"]
    assert spec.latent_row_bytes == 656
    got, _, inputs = _quantised(SMALL, past=70)
    row = inputs["latent_cache"][inputs["latent_slots"][1]]
    assert got.latent.codes is not None
    assert got.latent.scales is not None
    kv = SMALL.kv_lora
    assert torch.equal(row[:kv], got.latent.codes[1].view(torch.uint8))
    assert row[kv : kv + 4].view(torch.float32) == got.latent.scales[1, 0]
    assert torch.equal(row[kv + 4 :].view(torch.bfloat16).double(), got.key_rope[1])

    assert got.index_key.codes is not None
    assert got.index_key.scales is not None
    for token, slot in enumerate(inputs["index_slots"].tolist()):
        page = inputs["index_cache"][slot // 64]
        place = slot % 64
        codes = page[place * 128 : (place + 1) * 128]
        assert torch.equal(codes, got.index_key.codes[token].view(torch.uint8)), token
        scale = page[64 * 128 + 4 * place : 64 * 128 + 4 * place + 4].view(torch.float32)
        assert scale == got.index_key.scales[token, 0], token


def test_pow2_scales_lose_at_most_one_bit_and_are_powers():
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(5))
    x[0, :128] = 0
    x[1, :128] = torch.arange(128) * 3.5  # amax 444.5
    x[2, 0] = 448 * 2.0**-9  # the scale is a power of two already
    x[2, 1:128] = 0
    codes, scales = quantize(x, pow2=True)
    _, plain = quantize(x)
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all()
    assert (scales >= plain).all()
    assert (scales < 2 * plain).all()
    assert scales[2, 0] == 2.0**-9
    assert codes[2, 0].float() == 448
    back = codes.float().unflatten(1, (-1, 128)) * scales.unsqueeze(-1)
    error = (back.flatten(1) - x).abs()
    assert (error <= 2**-4 * x.abs() + scales.repeat_interleave(128, 1) * 2**-10).all()


def test_rope_table_is_exact_at_far_positions():
    spec = replace(SMALL, rope_theta=8e6)
    table = rope_table(spec, 131072)
    angle = torch.tensor(131071.0) * torch.tensor(1.0 / 8e6 ** (2 / 64), dtype=torch.float)
    assert abs(table[131071, 1].item() - math.cos(angle.item())) < 2**-23
    assert abs(table[131071, 33].item() - math.sin(angle.item())) < 2**-23
