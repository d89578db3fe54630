"""What rank processes do in ``test_processes.py``; see ``processes.Place`` for ``place``."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import torch.distributed as dist

from megamoe.backends.cuda import CudaSession
from megamoe.backends.cuda_driver import check, copy_from_device, driver_api
from megamoe.errors import GroupBroken, PeerTimeout, SymmetricMemoryError
from megamoe.layer import MoELayer, open_layer
from megamoe.spec import EpConfig
from tests.cases import Case
from tests.gpu.hog import Hog
from tests.gpu.moe_runs import gpu, run_rank
from tests.gpu.processes import Place, join_group


def can_open(place: Place) -> str:
    """ "" or why this provider gives no window here."""
    from megamoe.symmetric.nvshmem import NvshmemMemory
    from megamoe.symmetric.torch_symm import TorchSymmetricMemory

    kind = {"torch": TorchSymmetricMemory, "nvshmem": NvshmemMemory}[place.provider]
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        kind(place.rendezvous(), device).allocate(4096)
    except SymmetricMemoryError as e:
        return str(e)
    return ""


def run_cases(place: Place, some: list[Case], config: EpConfig, calls: int) -> list[torch.Tensor]:
    """Each case in a layer of its own."""
    return [run_rank(case, config, place.rendezvous(), calls) for case in some]


def _open(place: Place, case: Case, config: EpConfig) -> MoELayer:
    config = replace(config, num_ranks=place.num_ranks)
    layer = open_layer(case.spec, config, backend="cuda", rendezvous=place.rendezvous())
    layer.load_weights(case.experts(place.rank))
    return layer


def open_kept(place: Place, case: Case, config: EpConfig) -> int:
    """Opens a layer that later jobs use; returns the bytes of its window."""
    place.left["case"] = case
    place.left["layer"] = _open(place, case, config)
    place.left["inputs"] = [gpu(v) for v in case.inputs(place.rank)]
    return place.left["layer"].counters().window_bytes


def close_kept(place: Place) -> None:
    place.left.pop("layer").close()


def call_kept(place: Place, delay_s: float = 0.0) -> dict:
    """A call of the kept layer, after a pause: its output, or the record of its fault."""
    time.sleep(delay_s)
    start = time.monotonic()
    try:
        y = place.left["layer"].run(*place.left["inputs"])
    except PeerTimeout as e:
        waited = time.monotonic() - start
        # The context lives: it still computes.
        alive = float(torch.arange(5, device="cuda").float().sum()) == 10.0
        return {"ok": False, "waited": waited, "alive": alive, **e.record.to_dict()}
    return {"ok": True, "y": y}


def loop_kept(place: Place) -> dict:
    """Calls until one fails."""
    while (answer := call_kept(place))["ok"]:
        pass
    return answer


def reset_kept(place: Place, limit_s: float) -> list[int]:
    """Ranks that are missing, or none."""
    try:
        place.left["layer"].reset(limit_s)
    except GroupBroken as e:
        return list(e.missing)
    return []


def look_at_window(place: Place, rank: int) -> dict:
    """Reads and writes another rank's window, by a copy and by a kernel of this process."""
    session: CudaSession = place.left["layer"]._session
    address = session._address("input", rank)
    seen: dict = {}
    try:
        seen["copied"] = len(copy_from_device(address, 1 << 16))
        size = 1 << 16
        check(driver_api().cuMemsetD8(address, 0x5A, size), "writing a window by a kernel")
        torch.cuda.synchronize()
        seen["written"] = copy_from_device(address, size) == b"\x5a" * size
    except Exception as e:  # noqa: BLE001 - what happens is what is asked
        seen["error"] = f"{type(e).__name__}: {e}"
    return seen


def new_group(place: Place, rank: int, num_ranks: int, store: str) -> None:
    """Leaves the group and joins another; the old layer's windows are kept mapped."""
    place.left["old"] = place.left.pop("layer", None)
    dist.destroy_process_group()
    join_group(rank, num_ranks, store)
    place.rank, place.num_ranks = rank, num_ranks


def run_in_new_group(place: Place, case: Case, config: EpConfig) -> torch.Tensor:
    """A case in a layer of the group joined last."""
    return run_rank(case, config, place.rendezvous())


# ---------------------------------------------------------------- graphs


def replay_graphs(place: Place, case: Case, config: EpConfig) -> list[str]:
    """Two graphs on one window, replayed in turn with new inputs, against eager calls.

    Ranks bring different numbers of tokens to each graph, rank 0 none to the second. Returns what
    differs.
    """
    rank = place.rank
    session = CudaSession(case.spec, replace(config, num_ranks=place.num_ranks), place.rendezvous())
    session.load_weights(case.experts(rank))
    x, ids, weight = (gpu(v) for v in case.inputs(rank))
    ids = ids.int()
    stream = torch.cuda.Stream()
    wrong = []
    with torch.cuda.stream(stream):
        graphs = []
        for tokens in (9 + 4 * rank, 11 * rank):
            inputs = [v[:tokens].clone() for v in (x, ids, weight)]
            y = torch.zeros(tokens, case.spec.hidden, dtype=torch.bfloat16, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                session.stage(inputs[0], None)
                session.launch(inputs[1], inputs[2], y)
            graphs.append((graph, tokens, inputs, y))
        for shift in (0, 7, 19):
            want = []
            for _, tokens, _, y in graphs:
                part = slice(shift, shift + tokens)
                eager = torch.full_like(y, float("nan"))
                session.stage(x[part], None)
                session.run_moe(ids[part].contiguous(), weight[part].contiguous(), eager)
                want.append(eager)
            # No meeting of ranks in here: each replays in its own time.
            for (graph, tokens, inputs, y), expected in zip(graphs, want, strict=True):
                part = slice(shift, shift + tokens)
                for held, source in zip(inputs, (x, ids, weight), strict=True):
                    held.copy_(source[part])
                y.fill_(float("nan"))
                for _ in range(4):
                    graph.replay()
                session.check()
                if not torch.equal(y.view(torch.int16), expected.view(torch.int16)):
                    wrong.append(f"rank {rank}: {tokens} tokens from {shift}")
    session.close()
    return wrong


# ---------------------------------------------------------------- other work on the GPU


def run_beside_hog(place: Place, case: Case, config: EpConfig, sms: int, seconds: float) -> dict:
    """Calls while another stream holds some SMs: the output, and whether the hog still ran."""
    layer = _open(place, case, config)
    inputs = [gpu(v) for v in case.inputs(place.rank)]
    layer.run(*inputs)
    hog = Hog()
    with torch.cuda.stream(torch.cuda.Stream()):
        ended = hog.hold(sms, seconds)
    time.sleep(0.05)
    dist.barrier()  # every rank's hog holds its SMs
    y = layer.run(*inputs)
    beside = not ended.query()
    ended.synchronize()
    layer.close()
    return {"y": y, "beside": beside}
