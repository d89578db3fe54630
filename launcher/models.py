"""Layers by the names of published models, as the commands take them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from megamoe.errors import SpecError
from megamoe.spec import MODELS, MoESpec

__all__ = ["published_layer"]


def published_layer(
    model: str,
    *,
    experts: int | None = None,
    hidden: int | None = None,
    inter: int | None = None,
    shared: int | None = 0,
    weight_dtype: str | None = None,
    copies: bool = False,
) -> MoESpec:
    """A published layer, with sizes of one's own.

    Args:
        model: a key of ``MODELS``.
        experts: routed experts; None or 0 takes the model's, and so for the other sizes.
        hidden: H.
        inter: I.
        shared: shared experts; None takes the model's.
        weight_dtype: None takes the model's.
        copies: ``experts`` may exceed the model's: copies of them, as serving systems place them.

    Raises:
        SpecError: an unknown model, or sizes that do not fit.
    """
    if model not in MODELS:
        raise SpecError(f"--model {model}: must be one of {', '.join(MODELS)}")
    most = MODELS[model].num_experts
    if experts and experts > most and not copies:
        raise SpecError(
            f"--experts {experts}: {model} has {most}; give at most as many, or leave it out"
        )
    topk = MODELS[model].topk
    if experts and experts < topk:
        raise SpecError(
            f"--experts {experts}: {model} routes a token to {topk}; give at least as many, or "
            "leave it out"
        )
    given: dict[str, Any] = {"num_experts": experts, "hidden": hidden, "inter": inter}
    changed = {name: value for name, value in given.items() if value}
    if shared is not None:
        changed["num_shared"] = shared
    if weight_dtype is not None:
        changed["weight_dtype"] = cast("Any", weight_dtype)
    return replace(MODELS[model], **changed)
