"""Routing: hidden states to (expert ids, weights), equal to the routers of Hugging Face models.

Shape legend: T tokens, H hidden, E experts, K routes per token, G expert groups.

The arithmetic follows transformers 5 (``modeling_deepseek_v3.py``, ``modeling_glm_moe_dsa.py``,
``modeling_qwen3_moe.py``, ``modeling_mixtral.py``, ``modeling_deepseek_v4.py``) operation by
operation, dtypes included, because a last bit decides which expert wins a tie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe.errors import InputError, SpecError

__all__ = [
    "Router",
    "Scoring",
    "deepseek_v4_router",
    "mixtral_router",
    "qwen_router",
    "sigmoid_router",
]

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Router:
    """A router: learned logits, a scoring function, and a choice of K experts.

    Attributes:
        weight: [E, H], any float dtype.
        topk: K.
        scoring: ``softmax`` (Mixtral, Qwen), ``sigmoid`` (DeepSeek-V3, GLM) or ``sqrtsoftplus``
            (DeepSeek-V4).
        bias: FP32 [E] added to the scores for the choice only, or None.
        num_groups: G; experts e*E/G..(e+1)*E/G-1 form group e.
        groups_kept: groups, of the best sum of two scores, that a token may choose from.
        normalise: divide a token's K weights by their sum.
        scaling: factor on the weights, after normalisation.
        logits_fp32: compute the logits in FP32 (DeepSeek-V3, GLM), else in the dtype of the
            hidden states.
        weights_in_input_dtype: round the weights to the dtype of the logits (Qwen).

    Raises:
        SpecError: shapes or settings that contradict each other.
    """

    weight: Tensor
    topk: int
    scoring: Scoring
    bias: Tensor | None = None
    num_groups: int = 1
    groups_kept: int = 1
    normalise: bool = True
    scaling: float = 1.0
    logits_fp32: bool = False
    weights_in_input_dtype: bool = False

    def __post_init__(self) -> None:
        if self.weight.dim() != 2:
            raise SpecError(f"router weight has shape {tuple(self.weight.shape)}: want [E, H]")
        if self.scoring not in ("softmax", "sigmoid", "sqrtsoftplus"):
            raise SpecError(f"scoring = {self.scoring!r}: must be softmax, sigmoid or sqrtsoftplus")
        if self.bias is not None and tuple(self.bias.shape) != (self.num_experts,):
            raise SpecError(
                f"router bias has shape {tuple(self.bias.shape)}: want [{self.num_experts}]"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise SpecError(
                f"num_groups = {self.num_groups} does not divide {self.num_experts} experts"
            )
        if not 1 <= self.groups_kept <= self.num_groups:
            raise SpecError(
                f"groups_kept = {self.groups_kept}: must be in 1..{self.num_groups} (num_groups)"
            )
        if self.num_groups > 1 and self.num_experts // self.num_groups < 2:
            raise SpecError(
                f"num_groups = {self.num_groups}: groups of fewer than 2 experts cannot be ranked"
            )
        candidates = self.num_experts // self.num_groups * self.groups_kept
        if not 1 <= self.topk <= candidates:
            raise SpecError(
                f"topk = {self.topk}: must be in 1..{candidates}, the experts of the kept groups"
            )

    @property
    def num_experts(self) -> int:
        """E."""
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routes tokens.

        Args:
            x: hidden states [T, H], BF16 or FP32.

        Returns:
            topk_idx int64 [T, K], distinct in a row, in the order of torch's top-k (the order of
            the combine); topk_weight FP32 [T, K].

        Raises:
            InputError: x has another shape.
        """
        if x.dim() != 2 or x.shape[1] != self.weight.shape[1]:
            raise InputError(
                f"router input has shape {tuple(x.shape)}: want [T, {self.weight.shape[1]}]"
            )
        dtype = torch.float32 if self.logits_fp32 else x.dtype
        logits = F.linear(x.to(dtype), self.weight.to(dtype))
        scores = self._scores(logits)
        # Softmax routers ask for sorted routes; the order is that of the combine, so it matters.
        by_weight = self.scoring == "softmax"
        ids = torch.topk(self._choice(scores), self.topk, dim=-1, sorted=by_weight).indices
        weights = scores.gather(1, ids)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + (0 if by_weight else 1e-20))
        if self.scaling != 1.0:
            weights = weights * self.scaling
        if self.weights_in_input_dtype:
            weights = weights.to(logits.dtype)
        return ids, weights.float()

    def _scores(self, logits: Tensor) -> Tensor:
        if self.scoring == "softmax":
            return logits.softmax(-1, dtype=torch.float32)
        return logits.sigmoid() if self.scoring == "sigmoid" else F.softplus(logits).sqrt()

    def _choice(self, scores: Tensor) -> Tensor:
        """Scores [T, E] by which experts are chosen: biased, and -inf outside the kept groups."""
        choice = scores if self.bias is None else scores + self.bias.float()
        if self.num_groups == 1:
            return choice
        per_group = self.num_experts // self.num_groups
        grouped = choice.view(-1, self.num_groups, per_group)
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.topk(group_scores, self.groups_kept, dim=-1, sorted=False).indices
        mask = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
        return choice.masked_fill(~mask.repeat_interleave(per_group, dim=1), float("-inf"))


def sigmoid_router(config: Mapping[str, Any], weight: Tensor, bias: Tensor | None) -> Router:
    """The router of DeepSeek-V3, V3.2, Kimi-K2, GLM-4 MoE and GLM-5, from ``config.json``."""
    return Router(
        weight=weight,
        bias=bias,
        topk=config["num_experts_per_tok"],
        scoring="sigmoid",
        num_groups=config.get("n_group") or 1,
        groups_kept=config.get("topk_group") or 1,
        normalise=config.get("norm_topk_prob", True),
        scaling=config.get("routed_scaling_factor", 1.0),
        logits_fp32=True,
    )


def qwen_router(config: Mapping[str, Any], weight: Tensor, bias: Tensor | None) -> Router:
    """The router of Qwen3-MoE; it has no bias."""
    return Router(
        weight=weight,
        bias=bias,
        topk=config["num_experts_per_tok"],
        scoring="softmax",
        normalise=config.get("norm_topk_prob", False),
        weights_in_input_dtype=True,
    )


def mixtral_router(config: Mapping[str, Any], weight: Tensor, bias: Tensor | None) -> Router:
    """The router of Mixtral; it has no bias."""
    return Router(weight=weight, bias=bias, topk=config["num_experts_per_tok"], scoring="softmax")


def deepseek_v4_router(config: Mapping[str, Any], weight: Tensor, bias: Tensor | None) -> Router:
    """The learned router of DeepSeek-V4 (its first layers route by token id instead)."""
    return Router(
        weight=weight,
        bias=bias,
        topk=config["num_experts_per_tok"],
        scoring=config.get("scoring_func", "sqrtsoftplus"),
        scaling=config.get("routed_scaling_factor", 1.0),
    )
