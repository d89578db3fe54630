"""Result files: what a run was made on, and writing it as JSON.

A file is ``{"meta": {...}, "rows": [...]}``. Absent figures are null, and ``reasons`` of the row
(or of the meta) says why.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["cpu_name", "meta", "write"]


def meta(command: str, *, backend: str, device: str, notes: str = "") -> dict[str, Any]:
    """Where, when and with what a run was made.

    Args:
        command: what was typed.
        backend: ``"cpu"`` or ``"cuda"``.
        device: instruction set or GPU name.
        notes: anything a reader must know.
    """
    import torch

    cuda = backend == "cuda"
    reasons = {}
    if not cuda:
        why = "CPU ranks"
        reasons = dict.fromkeys(("gpu", "driver", "cuda", "clocks", "power"), why)
    return {
        "command": command,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "backend": backend,
        "gpu": device if cuda else None,
        "num_gpus": torch.cuda.device_count() if cuda else 0,
        "driver": None,
        "cuda": torch.version.cuda,
        "clocks": None,
        "power": None,
        "cpu": cpu_name(),
        "isa": None if cuda else device,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "notes": notes,
        "reasons": reasons,
    }


def write(path: Path, found: dict[str, Any]) -> None:
    """Writes a result file in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(path)


def cpu_name() -> str:
    """The processor's name as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str | None:
    """Commit of the source tree, with ``+`` when files differ from it; None outside git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
