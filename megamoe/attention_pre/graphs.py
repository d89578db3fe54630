"""The graphs that ship: the attention-pre half of a layer, and a dense MLP block."""

from __future__ import annotations

from megamoe.attention_pre.op_graph import OpGraph
from megamoe.spec import GROUP, INDEX_DIM, INDEX_PAGE, AttentionPreSpec

__all__ = ["attention_pre_graph", "dense_mlp_graph"]


def attention_pre_graph(spec: AttentionPreSpec) -> OpGraph:
    """Add + RMSNorm + Quant to the paged index scores, as eight stages A0 to E1.

    Inputs: ``x``, ``residual`` BF16 [M, H]; ``positions`` int32 [M]; ``latent_slots`` and
    ``index_slots`` int64 [M] (rows of the caches that the new tokens get); ``context_lens`` int32
    [B] (new tokens included); ``block_table`` int32 [B, pages]. Outputs: the residual, absorbed
    and rotated main queries, and the scores; both caches are written in place.
    """
    s = spec
    g = OpGraph("attention_pre")
    x = g.runtime_arg("x", ("M", s.hidden))
    residual = g.runtime_arg("residual", ("M", s.hidden))
    positions = g.runtime_arg("positions", ("M",), "int32")
    latent_slots = g.runtime_arg("latent_slots", ("M",), "int64")
    index_slots = g.runtime_arg("index_slots", ("M",), "int64")
    lengths = g.runtime_arg("context_lens", ("B",), "int32")
    block_table = g.runtime_arg("block_table", ("B", "?"), "int32")
    table = g.bound_weight("rope_table", ("?", s.qk_rope), "fp32")
    latent_cache = g.cache("latent_cache", ("?", s.latent_row_bytes))
    index_cache = g.cache("index_cache", ("?", INDEX_PAGE * (INDEX_DIM + 4)))

    def fp8(name: str, rows: int, columns: int) -> tuple:  # type: ignore[type-arg]
        scales = (-(-rows // GROUP), columns // GROUP)
        return (
            g.bound_weight(name, (rows, columns), "e4m3"),
            g.bound_weight(f"{name}_scales", scales, "fp32"),
        )

    with g.stage("A0"):
        summed = g.add(x, residual)
        normed = g.rmsnorm(summed, g.bound_weight("input_norm", (s.hidden,)), s.input_eps)
        hidden = g.quant(normed, pow2=s.scale_pow2)
    with g.stage("B0"):
        latents = g.gemm_fp8(*hidden, *fp8("w_qkv_a", s.qkv_a_dim, s.hidden))
        q_a, kv_a, k_pe = g.split(latents, (s.q_lora, s.kv_lora, s.qk_rope))
        q_norm = g.bound_weight("q_norm", (s.q_lora,))
        query = g.quant(g.rmsnorm(q_a, q_norm, s.latent_eps), pow2=s.scale_pow2)
        latent = g.rmsnorm(kv_a, g.bound_weight("kv_norm", (s.kv_lora,)), s.latent_eps)
        k_pe = g.rope(k_pe, positions, table, first=0)
        g.write_latent(latent_cache, latent_slots, latent, k_pe)
    with g.stage("C0"):
        gate = g.gemm(normed, g.bound_weight("w_gate", (s.index_heads, s.hidden)))
    with g.stage("B1"):
        key = g.gemm_fp8(*hidden, *fp8("w_index_k", INDEX_DIM, s.hidden))
        k_norm = g.bound_weight("index_norm", (INDEX_DIM,))
        k_bias = g.bound_weight("index_norm_bias", (INDEX_DIM,))
        key = g.layernorm(key, k_norm, k_bias, s.index_eps)
        index_key = g.quant(g.rope(key, positions, table, first=0), pow2=s.scale_pow2)
        index_cache = g.write_index(index_cache, index_slots, *index_key)
    with g.stage("D1"):
        iq = g.gemm_fp8(*query, *fp8("w_index_q", s.index_heads * INDEX_DIM, s.q_lora))
        iq = g.rope(g.heads(iq, s.index_heads), positions, table, first=0)
        iq8, iq_scales = g.quant(iq, pow2=s.scale_pow2)
        weights = g.fold(gate, iq_scales, s.index_weight_scale)
    with g.stage("D0"):
        q = g.gemm_fp8(*query, *fp8("w_q_b", s.num_heads * s.head_dim, s.q_lora))
        q = g.rope(g.heads(q, s.num_heads), positions, table, first=s.qk_nope)
    with g.stage("D2"):
        absorbed = g.bmm(q, g.bound_weight("w_uk", (s.num_heads, s.qk_nope, s.kv_lora)))
    with g.stage("E1"):
        scores = g.paged_logits(iq8, weights, index_cache, block_table, lengths)
    g.set_outputs(summed, q, absorbed, scores)
    return g


def dense_mlp_graph(hidden: int, inter: int, eps: float = 1e-5) -> OpGraph:
    """``x + W2 (SwiGLU (W1 rmsnorm(x)))`` with FP8 weights: RMSNorm, GEMM, SwiGLU, GEMM, add.

    Captured without stage labels. ``w1`` holds gate rows, then up rows.
    """
    g = OpGraph("dense_mlp")
    x = g.runtime_arg("x", ("M", hidden))
    w1 = g.bound_weight("w1", (2 * inter, hidden), "e4m3")
    w1_scales = g.bound_weight("w1_scales", (2 * inter // GROUP, hidden // GROUP), "fp32")
    w2 = g.bound_weight("w2", (hidden, inter), "e4m3")
    w2_scales = g.bound_weight("w2_scales", (hidden // GROUP, inter // GROUP), "fp32")
    normed = g.quant(g.rmsnorm(x, g.bound_weight("norm", (hidden,)), eps))
    inner = g.quant(g.swiglu(g.gemm_fp8(*normed, w1, w1_scales)))
    g.set_outputs(g.add(g.gemm_fp8(*inner, w2, w2_scales), x))
    return g
