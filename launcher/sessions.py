"""Sessions without the layer's checks and waits around them: for what times many calls."""

from __future__ import annotations

from torch import Tensor

from launcher.ranks import Group
from megamoe.backends.base import Session
from megamoe.spec import EpConfig, MoESpec
from megamoe.symmetric.base import find_rendezvous

__all__ = ["enqueue", "open_session"]


def open_session(group: Group, spec: MoESpec, config: EpConfig) -> Session:
    """Collective: a session on the group's device, without what ``megamoe tune`` may have found.

    Raises:
        MegaMoeError: as ``megamoe.layer.open_layer``.
    """
    rendezvous = group.rendezvous() or find_rendezvous(config.num_ranks)
    if group.device == "cpu":
        from megamoe.backends.cpu import CpuSession

        return CpuSession(spec, config, rendezvous)
    from megamoe.backends.cuda import CudaSession

    return CudaSession(spec, config, rendezvous)


def enqueue(session: Session, x: Tensor, ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """One call, staging included; on a GPU without waiting for it: ``session.check`` does.

    Args:
        session: with its weights loaded.
        x: BF16 [T, H].
        ids: int32 [T, K].
        weight: FP32 [T, K].
        out: BF16 [T, H].
    """
    session.stage(x, None)
    launch = getattr(session, "launch", session.run_moe)
    launch(ids, weight, out)
