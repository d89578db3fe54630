"""Where served layers come from: a checkpoint, or random weights of a named shape."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamoe.errors import SpecError
from megamoe.spec import ATTENTION_MODELS, MODELS, AttentionPreSpec, MoESpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from launcher.serving.attention import AttentionOptions
    from megamoe.checkpoint import Checkpoint
    from megamoe.router import Router
    from megamoe.spec import WeightDtype
    from megamoe.weights import ExpertWeights

__all__ = ["AttentionSource", "LayerSource", "random_spec"]


@dataclass(frozen=True)
class LayerSource:
    """Where the layer comes from: a checkpoint, or random weights."""

    checkpoint: Path | None
    layer: int | None
    random: str | None
    seed: int
    weight_dtype: WeightDtype | None

    def check(self) -> None:
        """Refuses what can be seen to be wrong before any process is started.

        Raises:
            SpecError: says what to give.
        """
        if (self.checkpoint is None) == (self.random is None):
            raise SpecError("give either --checkpoint DIR (with --layer N) or --random SHAPE")
        if self.weight_dtype not in (None, "fp8", "bf16"):
            raise SpecError(f"--weight-dtype {self.weight_dtype}: must be fp8 or bf16")
        if self.random is not None:
            random_spec(self.random)
            if self.weight_dtype is not None or self.layer is not None:
                raise SpecError(
                    "--layer and --weight-dtype go with --checkpoint: for random weights write "
                    "dtype=fp8 or dtype=bf16 in --random"
                )
        elif self.checkpoint is not None:
            if not self.checkpoint.is_dir():
                raise SpecError(f"--checkpoint {self.checkpoint}: there is no such folder")
            if not (self.checkpoint / "config.json").is_file():
                raise SpecError(f"--checkpoint {self.checkpoint} has no config.json")
            if self.layer is None:
                from megamoe.checkpoint import number_ranges

                layers = number_ranges(self._checkpoint().moe_layers)
                raise SpecError(f"--layer is missing: MoE layers of {self.checkpoint} are {layers}")

    @property
    def name(self) -> str:
        """For people."""
        if self.checkpoint is None:
            return f"random {self.random} (seed {self.seed})"
        return f"{self.checkpoint.name}, layer {self.layer}"

    def spec(self) -> MoESpec:
        """What the layer computes."""
        if self.random is not None:
            return random_spec(self.random)
        return self._checkpoint().moe_spec(self._layer(), self.weight_dtype)

    def experts(self, rank: int, num_ranks: int, device: str) -> Iterable[ExpertWeights]:
        """A rank's experts; random ones are drawn on ``device``."""
        from megamoe.weights import iter_local_experts, random_experts

        if self.random is not None:
            return random_experts(self.spec(), rank, num_ranks, self.seed, device=device)
        return iter_local_experts(
            self._checkpoint(), self._layer(), rank, num_ranks, self.weight_dtype
        )

    def router(self) -> Router | None:
        """The layer's router."""
        if self.random is None:
            return self._checkpoint().router(self._layer())
        import torch

        from megamoe.router import Router

        spec = self.spec()
        generator = torch.Generator().manual_seed(self.seed)
        weight = torch.randn(spec.num_experts, spec.hidden, generator=generator)
        return Router(weight=weight, topk=spec.topk, scoring="softmax", logits_fp32=True)

    def _layer(self) -> int:
        assert self.layer is not None  # see ``check``
        return self.layer

    def _checkpoint(self) -> Checkpoint:
        from megamoe.checkpoint import Checkpoint

        assert self.checkpoint is not None
        return Checkpoint.open(self.checkpoint)


@dataclass(frozen=True)
class AttentionSource:
    """An attention-pre layer of random weights: the name of a published one, or its sizes."""

    text: str
    num_pages: int
    seed: int

    def spec(self) -> AttentionPreSpec:
        """What the layer computes.

        Raises:
            SpecError: a word that is not understood, or a size that does not fit.
        """
        if self.text in ATTENTION_MODELS:
            return ATTENTION_MODELS[self.text]
        names = {
            "hidden": "hidden",
            "heads": "num_heads",
            "q_lora": "q_lora",
            "kv_lora": "kv_lora",
            "nope": "qk_nope",
            "rope": "qk_rope",
            "index_heads": "index_heads",
        }
        allowed = f"one of {', '.join(ATTENTION_MODELS)}, or {','.join(f'{n}=…' for n in names)}"
        given, rest = _sizes("--attention-pre", self.text, names, allowed)
        if rest or len(given) < len(names):
            wrong = ", ".join(rest) or ", ".join(n for n, f in names.items() if f not in given)
            raise SpecError(f"--attention-pre {self.text!r}: {wrong}: give {allowed}")
        try:
            return AttentionPreSpec(**given)
        except SpecError as e:
            told = str(e)
            for name, field in names.items():  # as they were given
                told = re.sub(rf"\b{field}\b", name, told)
            raise SpecError(f"--attention-pre {self.text!r}: {told}") from None

    def options(self) -> AttentionOptions:
        """For rank 0."""
        from launcher.serving.attention import AttentionOptions

        name = f"random {self.text} (seed {self.seed})"
        return AttentionOptions(
            name=name, spec=self.spec(), num_pages=self.num_pages, seed=self.seed
        )


def _sizes(
    option: str, text: str, names: dict[str, str], allowed: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields of ``name=number,…``, and the words that are none."""
    given: dict[str, Any] = {}
    rest: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if names.get(key) in given or key in rest:
            raise SpecError(f"{option} {text!r}: {key} is given twice")
        if key in names and value.isdigit():
            given[names[key]] = int(value)
        elif key in names or not value:
            raise SpecError(f"{option} {text!r}: {part!r} is not understood: give {allowed}")
        else:
            rest[key] = value
    return given, rest


def random_spec(text: str) -> MoESpec:
    """``hidden=256,inter=128,experts=8,topk=2``, or the name of a published shape.

    Raises:
        SpecError: a word that is not understood.
    """
    if text in MODELS:
        return MODELS[text]
    names = {
        "hidden": "hidden",
        "inter": "inter",
        "experts": "num_experts",
        "topk": "topk",
        "shared": "num_shared",
    }
    allowed = (
        f"one of {', '.join(MODELS)}, or hidden=…,inter=…,experts=…,topk=…[,shared=…][,dtype=…]"
    )
    given, rest = _sizes("--random", text, names, allowed)
    if "dtype" in rest:
        given["weight_dtype"] = rest.pop("dtype")
    if rest:
        raise SpecError(f"--random {text!r}: {', '.join(rest)} is not understood: give {allowed}")
    missing = {"hidden", "inter", "num_experts", "topk"} - set(given)
    if missing:
        raise SpecError(f"--random {text!r}: {', '.join(sorted(missing))} missing")
    return MoESpec(**given)
