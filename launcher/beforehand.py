"""What ranks would refuse, found out before they are started."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from launcher.workloads import route, tokens_per_rank
from megamoe.errors import SpecError
from megamoe.spec import EpConfig, MoESpec

__all__ = ["need_cases", "need_layer", "need_own_gpus"]


def need_layer(spec: MoESpec, config: EpConfig, device: str | None) -> None:
    """Refuses what opening a layer would.

    Args:
        spec: the layer.
        config: the group.
        device: of the ranks, as ``run_in_group`` gives it.

    Raises:
        SpecError: as ``megamoe.layer.open_layer``.
    """
    config.resolved(spec)
    if device not in (None, "cpu"):
        from megamoe.backends.cuda_build import cuda_config

        cuda_config(spec, config)


def need_own_gpus(num_ranks: int) -> None:
    """Refuses ranks that would share a GPU, which no time is worth measuring on.

    Raises:
        SpecError: there are fewer GPUs.
    """
    import torch

    gpus = torch.cuda.device_count()  # makes no CUDA context in this process
    if num_ranks > gpus:
        raise SpecError(
            f"{num_ranks} ranks on {gpus} GPU(s): a benchmark needs a GPU per rank; lower --ranks"
        )


def need_cases(
    spec: MoESpec,
    config: EpConfig,
    cases: Iterable[tuple[str, str]],
    seed: int,
    device: str | None,
) -> None:
    """Refuses calls that no group of so many ranks could make.

    Args:
        spec: the layer.
        config: the group; ``max_tokens`` is what the cases need.
        cases: token counts as ``tokens_per_rank`` reads them, and routings as ``route`` does.
        seed: of both.
        device: of the ranks, as ``run_in_group`` gives it.

    Raises:
        SpecError: as those functions, and as ``megamoe.layer.open_layer``.
    """
    for tokens, routing in cases:
        counts = tokens_per_rank(tokens, config.num_ranks, seed)
        need_layer(spec, replace(config, max_tokens=max(1, *counts)), device)
        route(routing, spec, config.num_ranks, 0, 0, seed)  # of no tokens: it reads and refuses
