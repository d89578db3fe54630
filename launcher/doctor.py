"""``megamoe doctor``: what this machine can run, and what is missing for the rest.

Exit code 1 when the CPU backend, which every machine is meant to run, cannot work here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from launcher.console import EXIT_WRONG, DebugFlag, JsonFlag, human_bytes, print_json, stdout
from megamoe.errors import MegaMoeError

__all__ = ["Finding", "command", "examine"]

Status = Literal["ok", "absent", "problem"]

_STYLE: Final[dict[str, str]] = {"ok": "green", "absent": "dim", "problem": "bold red"}
_SMALL_SHM: Final = 256 << 20
_PACKAGES: Final = (
    "torch",
    "transformers",
    "safetensors",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-ml-py",
    "nvshmem4py-cu13",
    "sgl-deep-gemm",
    "fastapi",
)


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        topic: what it is for: ``cpu``, ``cuda``, ``build``, ``service``, ``packages`` or
            ``verdict``.
        name: what was looked at.
        status: ``ok``, ``absent`` (an optional part that is not there) or ``problem``.
        detail: what was found, and for a problem what to do.
    """

    topic: str
    name: str
    status: Status
    detail: str

    def to_dict(self) -> dict[str, str]:
        """Plain JSON types."""
        return asdict(self)


def command(
    compile_kernels: Annotated[
        bool, typer.Option("--compile", help="Also compile the CUDA kernels (tens of seconds).")
    ] = False,
    as_json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show what this machine can run: CPU ranks, GPUs, compilers, memory, versions."""
    findings = examine(compile_kernels=compile_kernels)
    broken = any(f.status == "problem" and f.topic == "cpu" for f in findings)
    if as_json:
        print_json({"ok": not broken, "findings": [f.to_dict() for f in findings]})
    else:
        topic = ""
        for f in findings:
            if f.topic != topic:
                topic = f.topic
                stdout.print(topic, style="bold")
            stdout.print(f"  {f.status:8}", style=_STYLE[f.status], end="")
            stdout.print(f"{f.name:22} {f.detail}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_WRONG if broken else 0)


def examine(*, compile_kernels: bool) -> list[Finding]:
    """Everything that is looked at, in the order to be read."""
    findings = [
        _system(),
        _native(),
        _cores(),
        _shared_memory(),
        _memory(),
        _process_groups(),
        *_packages(),
    ]
    gpus = _gpus()
    findings += [*gpus, _nvml(), _nvrtc(), *_compilers(), _service()]
    if compile_kernels:
        findings.append(_compile())
    cpu = not any(f.status == "problem" for f in findings if f.topic == "cpu")
    hopper = any(f.name.startswith("GPU ") and f.status == "ok" for f in gpus)
    findings.append(
        Finding("verdict", "CPU ranks", "ok" if cpu else "problem", "megamoe demo --backend cpu")
    )
    findings.append(
        Finding(
            "verdict",
            "GPU ranks",
            "ok" if hopper else "absent",
            "megamoe demo" if hopper else "needs a Hopper GPU",
        )
    )
    return findings


def _system() -> Finding:
    detail = f"{platform.python_version()} on {platform.system()} {platform.release()}"
    return Finding("cpu", "Python", "ok", detail)


def _native() -> Finding:
    try:
        from launcher.meta import run_meta

        found = run_meta()
    except ImportError as error:
        return Finding(
            "cpu", "compiled extension", "problem", f"{error}: install the package (make demo)"
        )
    isas = ", ".join(found["cpu_isas"])
    return Finding("cpu", "processor", "ok", f"{found['cpu']}: {isas}")


def _cores() -> Finding:
    load = os.getloadavg()[0]
    usable, every = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return Finding("cpu", "cores", "ok", f"{usable} usable of {every}; load {load:.1f}")


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("cpu", "/dev/shm", "problem", "missing: mount a tmpfs there")
    usage = shutil.disk_usage(folder)
    detail = f"{human_bytes(usage.free)} free of {human_bytes(usage.total)}"
    if usage.free < _SMALL_SHM:
        detail += "; windows need more: mount -o remount,size=2G /dev/shm (docker: --shm-size)"
        return Finding("cpu", "/dev/shm", "problem", detail)
    return Finding("cpu", "/dev/shm", "ok", detail)


def _memory() -> Finding:
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) * 1024
    detail = f"{human_bytes(found['MemAvailable'])} available of {human_bytes(found['MemTotal'])}"
    return Finding("cpu", "memory", "ok", detail)


def _process_groups() -> Finding:
    import torch.distributed as dist

    if dist.is_available() and dist.is_gloo_available():
        nccl = ", nccl" if dist.is_nccl_available() else ""
        return Finding("cpu", "process groups", "ok", f"gloo{nccl}")
    return Finding("cpu", "process groups", "problem", "this torch has no gloo: several ranks fail")


def _packages() -> list[Finding]:
    findings = []
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
            findings.append(Finding("packages", package, "ok", version))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding("packages", package, "absent", "not installed"))
    return findings


def _gpus() -> list[Finding]:
    import torch

    if torch.version.cuda is None:
        return [Finding("cuda", "GPUs", "absent", "this torch is built without CUDA")]
    if not torch.cuda.is_available():
        return [Finding("cuda", "GPUs", "absent", "torch finds none")]
    findings = []
    count = torch.cuda.device_count()
    for i in range(count):
        found = torch.cuda.get_device_properties(i)
        hopper = (found.major, found.minor) == (9, 0)
        detail = (
            f"{found.name}, {found.multi_processor_count} SMs, {human_bytes(found.total_memory)}, "
            f"compute capability {found.major}.{found.minor}"
        )
        if not hopper:
            detail += "; the kernels are for 9.0"
        findings.append(Finding("cuda", f"GPU {i}", "ok" if hopper else "absent", detail))
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    missing = [p for p in pairs if not torch.cuda.can_device_access_peer(*p)]
    if pairs:
        detail = "all pairs" if not missing else f"missing between {missing}"
        findings.append(Finding("cuda", "peer access", "problem" if missing else "ok", detail))
    return findings


def _nvml() -> Finding:
    from megamoe.telemetry import open_nvml

    found = open_nvml()
    if isinstance(found, str):
        return Finding("cuda", "NVML", "absent", found)
    driver = found.nvmlSystemGetDriverVersion()
    return Finding("cuda", "NVML", "ok", f"driver {driver}")


def _nvrtc() -> Finding:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        lacks = " ".join(str(error).split())  # of several lines
        return Finding("cuda", "NVRTC", "absent", f"{lacks}: pip install 'megamoe[nvrtc]'")
    return Finding("cuda", "NVRTC", "ok", f"{major}.{minor}; --compile tries it")


def _compilers() -> list[Finding]:
    """What a change to the C++ sources needs; an installed package runs without."""
    findings = []
    for name, candidates, for_what in (
        ("C++ compiler", (os.environ.get("CXX", ""), "c++", "g++", "clang++"), "to build"),
        ("CMake", ("cmake",), "to build"),
        ("Ninja", ("ninja",), "to build"),
        ("nvcc", ("nvcc",), "not needed: NVRTC compiles the kernels"),
        ("ptxas", ("ptxas",), "not needed"),
    ):
        found = next(filter(None, (shutil.which(c) for c in candidates if c)), None)
        if found is None:
            findings.append(Finding("build", name, "absent", f"not on the PATH ({for_what})"))
            continue
        try:
            said = subprocess.run(
                [found, "--version"], capture_output=True, text=True, timeout=10, check=False
            ).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            findings.append(Finding("build", name, "absent", f"{found}: {error}"))
            continue
        number = re.search(r"\d+(\.\d+)+", said)
        findings.append(
            Finding("build", name, "ok", f"{number[0] if number else 'unknown'}, {found}")
        )
    return findings


def _service() -> Finding:
    """Whether ``megamoe serve`` has its packages."""
    missing = [
        name
        for name in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        detail = f"{', '.join(missing)} not installed: pip install 'megamoe[service]'"
        return Finding("service", "megamoe serve", "absent", detail)
    detail = "its packages are here; " + (
        "pynvml too" if importlib.util.find_spec("pynvml") else "no pynvml: no GPU telemetry"
    )
    return Finding("service", "megamoe serve", "ok", detail)


def _compile() -> Finding:
    """Compiles the MoE kernel of a published shape, as a session would; needs no GPU."""
    from megamoe.backends.cuda import compile_moe
    from megamoe.spec import MODELS

    start = time.perf_counter()
    try:
        cubin = compile_moe(MODELS["qwen3-30b"])
    except MegaMoeError as error:
        return Finding("cuda", "kernels", "absent", " ".join(str(error).split())[:300])
    kernels = cubin.resources().values()
    spilled = [r.kernel for r in kernels if r.spill_stores or r.spill_loads]
    seconds = time.perf_counter() - start
    detail = f"{len(kernels)} of the MoE layer compiled, or found in the cache, in {seconds:.1f} s"
    if spilled:
        return Finding("cuda", "kernels", "problem", f"{detail}; spills in {', '.join(spilled)}")
    return Finding("cuda", "kernels", "ok", detail)
