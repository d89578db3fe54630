"""What a layer computes (``MoESpec``, ``AttentionPreSpec``), how a group runs it (``EpConfig``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Final, Literal

from megamoe.errors import CapacityError, SpecError

__all__ = [
    "ATTENTION_MODELS",
    "GROUP",
    "INDEX_DIM",
    "INDEX_PAGE",
    "MAX_RANKS",
    "MAX_SHARED",
    "MAX_TOPK",
    "MAX_WORKERS",
    "MODELS",
    "AttentionPreSpec",
    "EpConfig",
    "MoESpec",
    "WeightDtype",
]

WeightDtype = Literal["fp8", "bf16"]

GROUP: Final = 128
"""Columns that share one activation scale, and side of a weight scale block."""
INDEX_DIM: Final = 128
"""Columns of an index head: one quantisation group."""
INDEX_PAGE: Final = 64
"""Keys of a page of the index cache."""
CPU_BLOCK_M: Final = 32
"""Rows of a ring block on CPU ranks where nothing else is asked for."""
TAILED_BLOCK_M: Final = 144
"""Rows that a ring block has room for if it may have a tail: 128, and 16 more."""
MAX_COLUMNS: Final = 1 << 16
MAX_EXPERTS: Final = 1 << 16
MAX_BLOCKS: Final = 1 << 24
MAX_WORKERS: Final = 1024
"""Far beyond any layer or machine: what exceeds them is a slip, and no 32-bit count overflows."""
MAX_TOPK: Final = 32
MAX_SHARED: Final = 8
MAX_RANKS: Final = 72
"""Ranks of the largest NVLink domain in sale."""


def _need(ok: bool, field: str, given: object, allowed: str) -> None:
    if not ok:
        raise SpecError(f"{field} = {given!r}: must be {allowed}")


def _need_whole(of: object, *fields: str) -> None:
    for field in fields:
        value = getattr(of, field)
        _need(isinstance(value, int) and not isinstance(value, bool), field, value, "an int")


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The mathematics of one MoE layer.

    ``y_t = sum_j p_tj * W2_e(SwiGLU(W1_e x_t)) + sum_s shared_s(x_t)``, j ascending, summed in
    FP32, stored as BF16.

    Attributes:
        hidden: H, columns of a token; a multiple of 128.
        inter: I, columns of the intermediate of one expert; a multiple of 128.
        num_experts: E, routed experts over all ranks.
        topk: K, routes per token, at most 32.
        num_shared: S, shared experts of the same inter, at most 8, computed on the token's own
            rank. A checkpoint whose one shared expert has n * inter columns is n of these.
        weight_dtype: ``"fp8"`` (e4m3 with FP32 scales per 128x128 block; activations e4m3 with
            FP32 scales per 1x128) or ``"bf16"`` (weights and activations).
        swiglu_clamp: c, or None. Gate is limited to at most c, up to [-c, c], before SwiGLU.

    Raises:
        SpecError: a field is out of its range; the message names it.
    """

    hidden: int
    inter: int
    num_experts: int
    topk: int
    num_shared: int = 0
    weight_dtype: WeightDtype = "fp8"
    swiglu_clamp: float | None = None

    def __post_init__(self) -> None:
        _need_whole(self, "hidden", "inter", "num_experts", "topk", "num_shared")
        for field in ("hidden", "inter"):
            value = getattr(self, field)
            columns_ok = 0 < value <= MAX_COLUMNS and value % GROUP == 0
            what = f"a multiple of {GROUP}, at most {MAX_COLUMNS}"
            _need(columns_ok, field, value, what)
        experts_ok = 1 <= self.num_experts <= MAX_EXPERTS
        _need(experts_ok, "num_experts", self.num_experts, f"in 1..{MAX_EXPERTS}")
        limit = min(MAX_TOPK, self.num_experts)
        _need(1 <= self.topk <= limit, "topk", self.topk, f"in 1..{limit}")
        shared_ok = 0 <= self.num_shared <= MAX_SHARED
        _need(shared_ok, "num_shared", self.num_shared, f"in 0..{MAX_SHARED}")
        _need(
            self.weight_dtype in ("fp8", "bf16"), "weight_dtype", self.weight_dtype, "fp8 or bf16"
        )
        clamp = self.swiglu_clamp
        clamp_ok = clamp is None or (isinstance(clamp, int | float) and clamp > 0)
        _need(clamp_ok, "swiglu_clamp", clamp, "None or positive")

    @property
    def num_slots(self) -> int:
        """Combine slots of a token: K routed, then the shared experts."""
        return self.topk + self.num_shared

    def experts_per_rank(self, num_ranks: int) -> int:
        """Routed experts on each rank.

        Raises:
            SpecError: ``num_experts`` is not divisible by ``num_ranks``.
        """
        if not 1 <= num_ranks <= MAX_RANKS:
            raise SpecError(f"num_ranks = {num_ranks}: must be in 1..{MAX_RANKS}")
        if self.num_experts % num_ranks:
            raise SpecError(
                f"num_experts = {self.num_experts} is not divisible by num_ranks = {num_ranks}: "
                "start a number of ranks that divides it"
            )
        return self.num_experts // num_ranks


@dataclass(frozen=True, kw_only=True)
class EpConfig:
    """How an expert-parallel group runs a layer. Equal on every rank.

    Attributes:
        num_ranks: R.
        max_tokens: the most tokens that one rank may bring to a call.
        block_m: rows of a ring block, the unit in which experts' rows are scheduled; 0 takes the
            backend's choice (32 on CPU ranks, 128 or 144 on GPUs). A block with room for 144
            rows takes 128, and more only where that saves an expert a block.
        ring_l1_blocks: B1, blocks of the ring of pulled tokens; 0 picks the recommendation.
        ring_l2_blocks: B2, blocks of the ring of intermediates; 0 picks the recommendation.
        wave_blocks: consecutive blocks of one expert that share a pass over its weights; 0 picks
            the recommendation. At most min(B1, B2).
        l2_lag_blocks: blocks by which Linear 2 trails Linear 1; 0 picks half of B2. At most B2 less
            a wave.
        num_workers: CPU worker threads per rank (the CTAs of the CPU backend); 0 divides the
            cores over the ranks. A GPU uses its SM count less ``reserved_sms``.
        reserved_sms: SMs left to other streams (GPU).
        timeout_s: limit of every wait inside a call, in seconds.
    """

    num_ranks: int
    max_tokens: int
    block_m: int = 0
    ring_l1_blocks: int = 0
    ring_l2_blocks: int = 0
    wave_blocks: int = 0
    l2_lag_blocks: int = 0
    num_workers: int = 0
    reserved_sms: int = 0
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _need_whole(self, *(f.name for f in fields(self) if f.name != "timeout_s"))
        _need(1 <= self.num_ranks <= MAX_RANKS, "num_ranks", self.num_ranks, f"in 1..{MAX_RANKS}")
        _need(1 <= self.max_tokens < 1 << 24, "max_tokens", self.max_tokens, "in 1..2**24-1")
        blocks = (0, 8, 16, 32, 64, 128, TAILED_BLOCK_M, 256)
        _need(
            self.block_m in blocks,
            "block_m",
            self.block_m,
            "8, 16, 32, 64, 128, 144, 256, or 0 (choose)",
        )
        for field in ("ring_l1_blocks", "ring_l2_blocks"):
            value = getattr(self, field)
            if value < 0:
                raise CapacityError(
                    f"{field} = {value}: the smallest ring has 1 block ({self._rows} tokens); "
                    "0 picks the recommendation"
                )
            _need(value <= MAX_BLOCKS, field, value, f"at most {MAX_BLOCKS}")
        most = {"wave_blocks": MAX_BLOCKS, "l2_lag_blocks": MAX_BLOCKS, "num_workers": MAX_WORKERS}
        for field, limit in {**most, "reserved_sms": MAX_WORKERS}.items():
            value = getattr(self, field)
            _need(0 <= value <= limit, field, value, f"0 (choose) or at most {limit}")
        finite = isinstance(self.timeout_s, int | float) and 0 < self.timeout_s < math.inf
        _need(finite, "timeout_s", self.timeout_s, "positive and finite")

    @property
    def _rows(self) -> int:
        return self.block_m or CPU_BLOCK_M

    @property
    def tail_rows(self) -> int:
        """Rows of a block that are taken only where that saves an expert a block."""
        return 16 if self.block_m == TAILED_BLOCK_M else 0

    def max_blocks(self, spec: MoESpec) -> int:
        """The most blocks that one rank can receive in one call."""
        local = spec.experts_per_rank(self.num_ranks)
        # A masked or duplicate id never adds routes, so R * T_max * K bounds the routed rows; each
        # expert wastes less than one block.
        routed = self.num_ranks * self.max_tokens * spec.topk
        rows = self._rows - self.tail_rows
        shared = spec.num_shared * -(-self.max_tokens // rows)
        return min(routed, routed // rows + local) + shared

    def resolved(self, spec: MoESpec) -> EpConfig:
        """The same configuration with every 0 replaced by the recommended value.

        Raises:
            SpecError: ranks do not divide the experts, or a wave exceeds a ring.
        """
        most = self.max_blocks(spec)
        mean_rows = self.max_tokens * spec.topk * self.num_ranks // spec.num_experts
        wave = self.wave_blocks or max(1, min(8, -(-mean_rows // self._rows)))
        # One wave each for pulling, Linear 1 and Linear 2, and one spare; never more than the load.
        recommended = min(most, max(4 * wave, 16))
        b1 = self.ring_l1_blocks or recommended
        b2 = self.ring_l2_blocks or recommended
        wave = self.wave_blocks or min(wave, b1, b2)
        if wave > min(b1, b2):
            raise CapacityError(
                f"wave_blocks = {wave} exceeds a ring (L1 {b1}, L2 {b2} blocks): "
                f"ask for waves of at most {min(b1, b2)} blocks, or rings of at least {wave} "
                f"({wave * self._rows} tokens)"
            )
        return replace(
            self,
            block_m=self._rows,
            ring_l1_blocks=b1,
            ring_l2_blocks=b2,
            wave_blocks=wave,
            l2_lag_blocks=min(self.l2_lag_blocks or max(1, b2 // 2), b2 - wave),
        )


# hidden, inter, experts, top-k, shared: design values of the published configurations.
MODELS: Final[dict[str, MoESpec]] = {
    "deepseek-v3": MoESpec(hidden=7168, inter=2048, num_experts=256, topk=8, num_shared=1),
    "glm-5": MoESpec(hidden=6144, inter=2048, num_experts=256, topk=8, num_shared=1),
    "v4-flash": MoESpec(hidden=4096, inter=2048, num_experts=256, topk=6, swiglu_clamp=10.0),
    "v4-pro": MoESpec(hidden=7168, inter=3072, num_experts=384, topk=6, swiglu_clamp=10.0),
    "kimi-k2": MoESpec(hidden=7168, inter=2048, num_experts=384, topk=8, num_shared=1),
    "qwen3-235b": MoESpec(hidden=4096, inter=1536, num_experts=128, topk=8),
    "qwen3-30b": MoESpec(hidden=2048, inter=768, num_experts=128, topk=8),
}
"""Published layers by name; benchmarks of routed work drop ``num_shared``."""


@dataclass(frozen=True, kw_only=True)
class AttentionPreSpec:
    """What a DeepSeek-sparse-attention layer computes before top-k: projections, caches, scores.

    RoPE rotates neighbouring pairs (2i, 2i+1) and leaves them in place: the last ``qk_rope``
    columns of a main head and of the latent row, the first ``qk_rope`` of an index head.

    Attributes:
        hidden: H, columns of a token; a multiple of 128.
        num_heads: main attention heads.
        q_lora: Lq, columns of the query latent; a multiple of 128.
        kv_lora: Lkv, columns of the key/value latent; a multiple of 128.
        qk_nope: columns of a main head without position; ``qk_nope + qk_rope`` is a multiple
            of 128.
        qk_rope: R, rotated columns; even, at most 128.
        index_heads: heads of the indexer.
        rope_theta: base of the rotation frequencies.
        input_eps: epsilon of the first RMSNorm.
        latent_eps: epsilon of the RMSNorms of both latents. HF's module uses 1e-6 whatever the
            configuration says, vLLM and SGLang use the configuration's ``rms_norm_eps``.
        index_eps: epsilon of the index key's LayerNorm.
        scale_pow2: round activation scales up to powers of two (the ``ue8m0`` checkpoints' rule).

    Raises:
        SpecError: a field is out of its range; the message names it.
    """

    hidden: int
    num_heads: int
    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    index_heads: int
    rope_theta: float = 8e6
    input_eps: float = 1e-5
    latent_eps: float = 1e-6
    index_eps: float = 1e-6
    scale_pow2: bool = False

    def __post_init__(self) -> None:
        whole = ("hidden", "num_heads", "q_lora", "kv_lora", "qk_nope", "qk_rope", "index_heads")
        _need_whole(self, *whole)
        for field in ("hidden", "q_lora", "kv_lora"):
            value = getattr(self, field)
            _need(value > 0 and value % GROUP == 0, field, value, f"a positive multiple of {GROUP}")
        for field in ("num_heads", "index_heads", "rope_theta"):
            _need(getattr(self, field) > 0, field, getattr(self, field), "positive")
        rope_ok = 0 < self.qk_rope <= GROUP and self.qk_rope % 2 == 0
        _need(rope_ok, "qk_rope", self.qk_rope, f"even and in 2..{GROUP}")
        _need(self.qk_nope > 0, "qk_nope", self.qk_nope, "positive")
        _need(
            self.head_dim % GROUP == 0,
            "qk_nope + qk_rope",
            self.head_dim,
            f"a multiple of {GROUP}",
        )
        _need(self.index_heads <= GROUP, "index_heads", self.index_heads, f"at most {GROUP}")

    @property
    def head_dim(self) -> int:
        """D, columns of a main query head."""
        return self.qk_nope + self.qk_rope

    @property
    def qkv_a_dim(self) -> int:
        """Rows of the fused first projection: query latent, key/value latent, rotary key."""
        return self.q_lora + self.kv_lora + self.qk_rope

    @property
    def index_weight_scale(self) -> float:
        """Constant factor of a head's weight: index_heads**-0.5 * 128**-0.5."""
        return float(self.index_heads**-0.5 * INDEX_DIM**-0.5)

    @property
    def latent_row_bytes(self) -> int:
        """A token in the latent cache: e4m3 latent, FP32 scale per 128, BF16 rotary key."""
        return self.kv_lora + 4 * (self.kv_lora // GROUP) + 2 * self.qk_rope


ATTENTION_MODELS: Final[dict[str, AttentionPreSpec]] = {
    name: AttentionPreSpec(
        hidden=6144,
        num_heads=64,
        q_lora=2048,
        kv_lora=512,
        qk_nope=192,
        qk_rope=64,
        index_heads=32,
        rope_theta=theta,
    )
    for name, theta in {"glm-5": 1e6, "glm-5.2": 8e6}.items()
}
"""Published layers with interleaved RoPE in the indexer; GLM-5.2 raised the base to 8e6."""
