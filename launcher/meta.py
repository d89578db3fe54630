"""What a result file says about the run that made it."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["mig_mode", "run_meta", "typed_command"]


def run_meta(**more: Any) -> dict[str, Any]:
    """Commit, date, machine and versions; ``more`` adds shape, notes and what was sampled.

    What cannot be read is None: a CPU-only machine has no ``gpu``.
    """
    import torch

    from megamoe import native

    cuda = torch.cuda.is_available()
    return {
        # A copy without its history is told the commit.
        "commit": _git("rev-parse", "HEAD") or os.environ.get("COMMIT"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "num_gpus": torch.cuda.device_count() if cuda else 0,
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_isas": native.describe()["cpu_isas"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": _command(),
        **more,
    }


def typed_command(name: str, num_ranks: int) -> str:
    """A multi-rank command as a person would type it: ``megamoe NAME --ranks R …``.

    Args:
        name: like ``"bench moe"``.
        num_ranks: R; ranks that torchrun has started do not find it among their arguments.
    """
    words = sys.argv[1:]
    if words[: len(name.split())] == name.split():
        words = words[len(name.split()) :]
    ranks = [] if "--ranks" in words else ["--ranks", str(num_ranks)]
    return " ".join(["megamoe", name, *ranks, *words])


def mig_mode(device: str) -> str | None:
    """Whether a GPU is partitioned: "off" or "on"; None where NVML does not say.

    Args:
        device: ``"cuda:N"``.
    """
    import torch

    from megamoe.telemetry import open_nvml

    nvml = open_nvml()
    if isinstance(nvml, str):
        return None
    try:
        uuid = torch.cuda.get_device_properties(device).uuid
        now, _ = nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except nvml.NVMLError:
        return None
    return "on" if now else "off"


def _command() -> str:
    """How this process was started, without the places of programs on this machine."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        start = Path(sys.argv[0]).name
    elif "WORLD_SIZE" in os.environ:
        start = f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']} -m {spec.name}"
    else:
        start = f"python -m {spec.name}"
    return " ".join([start, *sys.argv[1:]])


def _git(*args: str) -> str | None:
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", *args], cwd=root, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _driver() -> str | None:
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build …"
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", line)
    return version and version.group()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")
