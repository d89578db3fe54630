"""Random tensors for a graph's inputs, weights and caches: for benchmarks, demos and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.attention_pre.tiling import Batch
from megamoe.reference.attention_pre import quantize, rope_table, write_index, write_latent
from megamoe.reference.quant import quantize_128x128
from megamoe.spec import GROUP, INDEX_DIM, INDEX_PAGE, AttentionPreSpec

__all__ = ["mlp_tensors", "random_caches", "random_fp8_weight", "random_inputs", "random_weights"]


def random_fp8_weight(n: int, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """e4m3 [n, k] and FP32 [ceil(n/128), k/128] of a matrix that keeps the scale of its input."""
    rows = -(-n // GROUP) * GROUP
    w = torch.randn(rows, k, generator=generator) * k**-0.5
    w[n:] = 0
    codes, scales = quantize_128x128(w)
    return codes[:n].contiguous(), scales


def random_weights(spec: AttentionPreSpec, num_positions: int, seed: int) -> dict[str, Tensor]:
    """Weights by the names of ``graphs.attention_pre_graph``."""
    g = torch.Generator().manual_seed(seed)
    s = spec

    def around_one(columns: int) -> Tensor:
        return (1 + 0.2 * torch.randn(columns, generator=g)).bfloat16()

    made: dict[str, Tensor] = {
        "input_norm": around_one(s.hidden),
        "q_norm": around_one(s.q_lora),
        "kv_norm": around_one(s.kv_lora),
        "index_norm": around_one(INDEX_DIM),
        "index_norm_bias": (0.2 * torch.randn(INDEX_DIM, generator=g)).bfloat16(),
        "rope_table": rope_table(spec, num_positions),
    }
    gate = torch.randn(s.index_heads, s.hidden, generator=g) * s.hidden**-0.5
    w_uk = torch.randn(s.num_heads, s.qk_nope, s.kv_lora, generator=g) * s.qk_nope**-0.5
    made |= {"w_gate": gate.bfloat16(), "w_uk": w_uk.bfloat16()}
    for name, n, k in (
        ("w_qkv_a", s.qkv_a_dim, s.hidden),
        ("w_index_k", INDEX_DIM, s.hidden),
        ("w_index_q", s.index_heads * INDEX_DIM, s.q_lora),
        ("w_q_b", s.num_heads * s.head_dim, s.q_lora),
    ):
        made[name], made[f"{name}_scales"] = random_fp8_weight(n, k, g)
    return made


def random_inputs(spec: AttentionPreSpec, batch: Batch, seed: int) -> dict[str, Tensor]:
    """Inputs of one call; pages of the requests are scattered over the index cache.

    Latent slots are those of the index cache, so that both caches are paged alike.
    """
    g = torch.Generator().manual_seed(seed)
    requests = len(batch.requests)
    pages = [-(-keys // INDEX_PAGE) for _, keys in batch.requests]
    order = torch.randperm(sum(pages), generator=g).int()
    table = torch.zeros(requests, batch.table_pages, dtype=torch.int32)
    positions, slots, used = [], [], 0
    for b, (new, keys) in enumerate(batch.requests):
        table[b, : pages[b]] = order[used : used + pages[b]]
        used += pages[b]
        place = torch.arange(keys - new, keys)
        positions.append(place)
        slots.append(table[b, place // INDEX_PAGE].long() * INDEX_PAGE + place % INDEX_PAGE)
    slot = torch.cat(slots)
    return {
        "x": torch.randn(batch.rows, spec.hidden, generator=g).bfloat16(),
        "residual": torch.randn(batch.rows, spec.hidden, generator=g).bfloat16(),
        "positions": torch.cat(positions).int(),
        "latent_slots": slot,
        "index_slots": slot.clone(),
        "context_lens": torch.tensor([keys for _, keys in batch.requests], dtype=torch.int32),
        "block_table": table,
    }


def random_caches(spec: AttentionPreSpec, batch: Batch, seed: int) -> dict[str, Tensor]:
    """Caches of ``random_inputs``' pages, filled with keys; new tokens' slots hold garbage."""
    g = torch.Generator().manual_seed(seed)
    pages = sum(-(-keys // INDEX_PAGE) for _, keys in batch.requests)
    every = torch.arange(pages * INDEX_PAGE)
    index = torch.zeros(pages, INDEX_PAGE * (INDEX_DIM + 4), dtype=torch.uint8)
    keys = torch.randn(len(every), INDEX_DIM, generator=g)
    codes, scales = quantize(keys, pow2=spec.scale_pow2)
    write_index(index, every, codes, scales[:, 0])
    latent = torch.zeros(len(every), spec.latent_row_bytes, dtype=torch.uint8)
    codes, scales = quantize(torch.randn(len(every), spec.kv_lora, generator=g))
    rope = torch.randn(len(every), spec.qk_rope, generator=g)
    write_latent(latent, every, codes, scales, rope)
    return {"latent_cache": latent, "index_cache": index}


def mlp_tensors(hidden: int, inter: int, rows: int, seed: int) -> dict[str, Tensor]:
    """Weights and input of ``graphs.dense_mlp_graph``."""
    g = torch.Generator().manual_seed(seed)
    w1, w1_scales = random_fp8_weight(2 * inter, hidden, g)
    w2, w2_scales = random_fp8_weight(hidden, inter, g)
    return {
        "x": torch.randn(rows, hidden, generator=g).bfloat16(),
        "norm": (1 + 0.2 * torch.randn(hidden, generator=g)).bfloat16(),
        "w1": w1,
        "w1_scales": w1_scales,
        "w2": w2,
        "w2_scales": w2_scales,
    }
