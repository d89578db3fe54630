"""Groups of rank processes: starting them with torchrun, and what a rank does inside.

A multi-rank command runs in two roles. Called by a person it starts torchrun, whose children run
the same module with the same options; there it finds itself a rank (``in_group``) and works.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import typer

from launcher.children import keep_folder_out
from launcher.console import EXIT_ERROR, errors_to_exit, explained, stderr
from launcher.endings import end_as_rank, leave
from megamoe.errors import BackendUnavailable, MegaMoeError, SpecError

if TYPE_CHECKING:
    import torch

    from megamoe.symmetric.base import Rendezvous
    from megamoe.telemetry import Sampler

__all__ = [
    "GRACE_S",
    "Group",
    "RankFailed",
    "arguments",
    "cores_per_rank",
    "device_of",
    "need_backend",
    "process_group",
    "run_in_group",
    "sampler_of",
    "torchrun",
]

T = TypeVar("T")
GRACE_S: Final = 2
"""What ranks get to end after Ctrl-C: one inside a call waits for peers that may have ended, up to
the call's limit. Torchrun's own grace is 30 s, which torch before 2.12 does not let one change."""
_NO_HOPPER: Final = (
    "--backend cuda needs a Hopper GPU (compute capability 9.0), and this machine has none: "
    "--backend cpu runs on CPU ranks"
)


class RankFailed(MegaMoeError):
    """A step failed on one rank or more; raised on all of them, printed by rank 0.

    Attributes:
        printed_elsewhere: this rank need not print it.
        hint: what to do about the first rank's error.
    """

    def __init__(self, message: str, *, printed_elsewhere: bool, hint: str | None = None) -> None:
        super().__init__(message)
        self.printed_elsewhere = printed_elsewhere
        self.hint = hint


@dataclass(frozen=True)
class Group:
    """The group that this process belongs to; one rank alone needs no process group.

    Attributes:
        rank: this rank.
        num_ranks: R.
        device: where this rank's tensors live: ``"cpu"`` or ``"cuda:N"``.
        members: its process group; None is the default one, or none where a rank is alone.
        which: of several groups that a process of thread ranks has.
    """

    rank: int
    num_ranks: int
    device: str
    members: Any = None
    which: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Collective: every rank's value (picklable), by rank."""
        if self.num_ranks == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.members)
        return values

    def part(self, size: int) -> Part | None:
        """Collective: this rank's group of ``size`` neighbours; None on ranks that are left over.

        Returns:
            The group, which of the groups it is, and how many there are.
        """
        if self.num_ranks == 1:
            return self, 0, 1
        import torch.distributed as dist

        which, number = self.rank // size, self.num_ranks // size
        # Every rank makes every group.
        made = [dist.new_group(list(range(i * size, (i + 1) * size))) for i in range(number)]
        if which >= number:
            return None
        return Group(self.rank % size, size, self.device, made[which]), which, number

    def rendezvous(self) -> Rendezvous | None:
        """What ``open_layer`` gets; None: let it find the group."""
        if self.members is None:
            return None
        from megamoe.symmetric.base import GroupRendezvous

        return GroupRendezvous(self.members)

    def barrier(self) -> None:
        """Collective: returns when every rank has come."""
        self.gather(None)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Collective over all groups of this process, which take turns inside."""
        yield

    def together(self, work: Callable[[], T]) -> T:
        """Collective: runs ``work`` on every rank; if it fails on any, all raise.

        Raises:
            RankFailed: names the ranks that failed and their errors.
        """
        result: list[T] = []
        error: Exception | None = None
        try:
            result.append(work())
        except Exception as e:  # noqa: BLE001 - every rank hears of it below
            error = e
        own = None if error is None else explained(error)
        if error is not None and own is None:  # a bug keeps its traceback on the rank that has it
            self.gather((f"{type(error).__name__}: {error}", None))
            raise error
        told = self.gather(own)
        failed = [one for one in told if one is not None]
        if failed:
            text, hint = _summary([one and one[0] for one in told]), failed[0][1]
            raise RankFailed(text, printed_elsewhere=not self.first, hint=hint) from error
        return result[0]

    def collect_rows(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor | None:
        """Collective: every rank's [T_r, ...] as one [sum T_r, ...] on rank 0, on the CPU.

        Args:
            rows: this rank's rows, ``counts[rank]`` of them.
            counts: rows of every rank.
        """
        import torch
        import torch.distributed as dist

        own = rows.cpu().contiguous()
        if not self.first:
            if counts[self.rank]:
                dist.send(own.view(torch.uint8), 0)
            return None
        out = own.new_empty((sum(counts), *own.shape[1:]))
        for rank, part in enumerate(out.split(counts)):
            if rank == 0:
                part.copy_(own)
            elif counts[rank]:
                dist.recv(part.view(torch.uint8), rank)
        return out


Part = tuple[Group, int, int]


def _summary(errors: list[str | None]) -> str:
    """Ranks with the same error share a line."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(errors):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if len(by_text) == 1 and len(next(iter(by_text.values()))) == len(errors):
        return next(iter(by_text))
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    )


def cores_per_rank(num_ranks: int) -> int:
    """Cores of this process's affinity mask, shared out over the ranks of the machine."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def arguments(context: typer.Context) -> list[str]:
    """The options of a command as its rank processes are to get them, ``--ranks`` left out."""
    found = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name == "ranks" or value is None:
            continue
        if isinstance(value, bool):
            found += (parameter.opts if value else parameter.secondary_opts)[:1]
        else:
            many = value if isinstance(value, list | tuple) else [value]
            for one in many:
                found += [parameter.opts[0], str(one)]
    return found


def run_in_group(
    context: typer.Context,
    module: str,
    ranks: int | None,
    options: Callable[[int, str | None], T],
    work: Callable[[Group, T], int],
    *,
    default_ranks: int,
    backend: str,
    debug: bool,
) -> None:
    """Runs ``work`` on every rank of a group, starting the group where there is none yet.

    Args:
        context: of the command; its options go to the ranks.
        module: run by ``python -m`` in each rank process.
        ranks: R as asked for, or None.
        options: reads the command's options, given R and the ranks' device, and raises where no
            run could take them. Called by each rank, and by the first process before ranks are
            started; there the device is None where ``"auto"`` depends on the kind of GPU.
        work: gets the group and what ``options`` returned; returns the exit code.
        default_ranks: R where nothing is asked for.
        backend: ``"cpu"`` keeps ranks off the GPUs.
        debug: show tracebacks.

    Raises:
        typer.Exit: always; code 0 when every rank returned 0.
    """

    def on_rank(group: Group) -> int:
        return work(group, group.together(lambda: options(group.num_ranks, group.device)))

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        faulthandler.enable()  # an abort inside a library says what the rank was at
        size = int(os.environ["WORLD_SIZE"])
        with errors_to_exit(debug=debug, rank=int(os.environ["RANK"])):
            if ranks not in (None, size):
                raise SpecError(f"--ranks {ranks}, but torchrun started {size}: leave --ranks out")
            with process_group(size, backend) as group:
                end_as_rank()
                code = on_rank(group)
        leave(code)
    num_ranks = ranks or default_ranks
    with errors_to_exit(debug=debug):
        need_backend(backend)
        if num_ranks == 1:
            raise typer.Exit(on_rank(Group(0, 1, device_of(0, backend))))
        options(num_ranks, _foreseen_device(backend))
    sys.stderr.write(f"starting {num_ranks} ranks\n")  # imports take seconds
    sys.stderr.flush()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    code = torchrun(module, arguments(context), num_ranks, debug=debug)
    stderr.show_cursor()  # a rank that was ended may have hidden it
    raise typer.Exit(code)


def _foreseen_device(backend: str) -> str | None:
    """What ``device_of`` will say on the ranks; None where only a CUDA context could tell."""
    if backend == "cpu":
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return "cuda" if backend == "cuda" else None


def torchrun(
    module: str, argv: list[str], num_ranks: int, *, debug: bool, max_restarts: int = 0
) -> int:
    """Starts rank processes of a module and waits for them.

    Args:
        module: run by ``python -m`` in each.
        argv: its arguments.
        num_ranks: R.
        debug: let torchrun tell what it does.
        max_restarts: how often the group may start anew after a rank has failed.

    Returns:
        The first failure's exit code, 128 + the number of a signal that ended it, or 0.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    keep_folder_out()
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_per_rank(num_ranks)))
    if not debug:
        # Ranks say what went wrong; torchrun's account, by loggers of own levels, would bury it.
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    start = ["--standalone", "--nproc-per-node", str(num_ranks)]
    try:
        main([*start, "--max-restarts", str(max_restarts), "-m", module, *argv])
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            sys.stderr.write(f"error: rank {rank} was ended by signal {-failure.exitcode}\n")
            return EXIT_ERROR
        return failure.exitcode
    except SignalException as told:  # torchrun has ended the ranks
        return 128 + told.sigval
    return 0


def need_backend(backend: str) -> None:
    """Refuses, once and before ranks are started, a backend that they could not have.

    Raises:
        SpecError: no such backend.
        BackendUnavailable: ``"cuda"`` on a machine without a GPU.
    """
    if backend not in ("auto", "cpu", "cuda"):
        raise SpecError(f"--backend {backend}: must be auto, cpu or cuda")
    if backend == "cuda":
        import torch

        if not torch.cuda.is_available():  # makes no CUDA context in this process
            raise BackendUnavailable(_NO_HOPPER)


def device_of(local_rank: int, backend: str) -> str:
    """Where a rank's tensors live, ``"cpu"`` or ``"cuda:N"``, which becomes torch's device.

    Raises:
        SpecError: no such backend.
        BackendUnavailable: ``"cuda"`` without a Hopper GPU: never the CPU in its place.
    """
    need_backend(backend)
    if backend == "cpu":
        return "cpu"
    import torch

    from megamoe.backends.base import hopper_available

    if not torch.cuda.is_available():
        return "cpu"
    device = f"cuda:{local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    if hopper_available():
        return device
    if backend == "cuda":
        raise BackendUnavailable(_NO_HOPPER)
    return "cpu"


def sampler_of(device: str) -> Sampler:
    """The sensors of a rank's GPU, found by UUID: NVML also counts GPUs that are hidden from torch.

    Args:
        device: ``"cpu"`` or ``"cuda:N"``.
    """
    from megamoe.telemetry import Sampler

    if device == "cpu":
        return Sampler(None)
    import torch

    return Sampler(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


@contextmanager
def process_group(size: int, backend: str) -> Iterator[Group]:
    """Joins torchrun's group: gloo for values, NCCL beside it where ranks have GPUs.

    Args:
        size: R.
        backend: ``"cpu"`` keeps ranks off the GPUs.
    """
    import torch
    import torch.distributed as dist

    device = device_of(int(os.environ.get("LOCAL_RANK", "0")), backend)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    torch.set_num_threads(cores_per_rank(local_size))
    if device != "cpu" and local_size > torch.cuda.device_count():
        # Ranks that share a GPU take turns on it: for protocol tests. Torch refuses it otherwise.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield Group(dist.get_rank(), size, device)
    finally:
        dist.destroy_process_group()
