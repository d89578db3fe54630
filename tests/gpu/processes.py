"""Rank processes for GPU tests: each obeys the jobs that the test sends, one at a time.

Rank r has GPU r mod N. With fewer GPUs than ranks some share one, which torch's symmetric memory
allows when told to; their kernels then take turns on it. A job is a function ``job(place, *args)``
of an importable module; its result or its traceback comes back over a pipe, tensors as bits.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megamoe.symmetric.base import GroupRendezvous

# Ranks are forked off a server that has imported torch once, and has not touched a GPU.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])

ENVIRONMENT = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    # NVLink multicast is never used.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_SYMMETRIC_SIZE": str(1 << 30),
}


@dataclass
class Place:
    """What a job knows: its rank, its group, and whatever earlier jobs of the process left."""

    rank: int
    num_ranks: int
    provider: str
    store: str
    left: dict[str, Any]

    def rendezvous(self) -> GroupRendezvous:
        return GroupRendezvous()


class Bits:
    """A BF16 tensor on its way over a pipe."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._words = tensor.cpu().view(torch.int16).numpy()

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self._words).view(torch.bfloat16)


def _pack(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Bits(value)
    if isinstance(value, list):
        return [_pack(v) for v in value]
    if isinstance(value, dict):
        return {k: _pack(v) for k, v in value.items()}
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, Bits):
        return value.tensor()
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    if isinstance(value, dict):
        return {k: _unpack(v) for k, v in value.items()}
    return value


def join_group(rank: int, num_ranks: int, store: str) -> None:
    """A gloo group; NCCL would refuse ranks that share a GPU, and the layer needs none of it."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)


def _main(rank: int, num_ranks: int, provider: str, store: str, pipe: Connection) -> None:
    os.environ.update(ENVIRONMENT, MEGAMOE_SYMMETRIC=provider)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    join_group(rank, num_ranks, store)
    place = Place(rank, num_ranks, provider, store, {})
    while (message := pipe.recv()) is not None:
        job, args = message
        try:
            pipe.send((True, _pack(job(place, *args))))
        except Exception:  # noqa: BLE001 - the test shows it
            pipe.send((False, traceback.format_exc()))
    # Not the interpreter's way out: NVSHMEM's would wait for ranks that are gone.
    os._exit(0)


class JobFailed(AssertionError):
    """A rank's traceback."""


class RankProcesses:
    """A group of rank processes; ``close`` ends whatever still lives."""

    def __init__(self, num_ranks: int, provider: str, folder: Path) -> None:
        self.num_ranks, self.provider = num_ranks, provider
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            pipe, other = CONTEXT.Pipe()
            args = (rank, num_ranks, provider, str(folder / "store"), other)
            process = CONTEXT.Process(target=_main, args=args, daemon=True)
            process.start()
            other.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def send(self, rank: int, job: Callable[..., Any], *args: Any) -> None:
        """Starts a job on one rank."""
        self._pipes[rank].send((job, args))

    def answer(self, rank: int, limit_s: float = 40) -> Any:
        """The result of the rank's job.

        Raises:
            JobFailed: with the rank's traceback, or because it ended or does not answer.
        """
        if not self._pipes[rank].poll(limit_s):
            raise JobFailed(f"rank {rank} did not answer within {limit_s:g} s")
        try:
            ok, result = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            raise JobFailed(f"rank {rank} ended, exit code {code}") from None
        if not ok:
            raise JobFailed(f"rank {rank}:\n{result}")
        return _unpack(result)

    def all(self, job: Callable[..., Any], *args: Any, limit_s: float = 40) -> list[Any]:
        """Runs a job on every rank; results by rank."""
        for rank in range(self.num_ranks):
            self.send(rank, job, *args)
        return [self.answer(rank, limit_s) for rank in range(self.num_ranks)]

    def kill(self, rank: int) -> None:
        """Ends a rank as the system would, and waits until it is gone."""
        self._processes[rank].kill()
        self._processes[rank].join(20)
        assert self._processes[rank].exitcode is not None

    def close(self) -> None:
        """Asks all ranks to end, and kills those that have not within ten seconds."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if process.is_alive():
                try:
                    pipe.send(None)
                except OSError:
                    process.kill()
        limit = time.monotonic() + 10
        for process in self._processes:
            process.join(max(0.0, limit - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10)
