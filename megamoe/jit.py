"""CUDA C++ compiled by NVRTC at first use; cubins are cached on disk.

No GPU and no nvcc is needed to compile, so every kernel variant is compiled in the tests of any
machine. A cubin is keyed by all that decides it: sources, flags, compiler and libcu++ headers. It
appears in the cache under its key by an atomic rename: readers see all of it or nothing.

Cache: ``$MEGAMOE_CACHE``, or ``$XDG_CACHE_HOME/megamoe``, or ``~/.cache/megamoe``.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megamoe.errors import BackendUnavailable, MegaMoeError

__all__ = ["ARCH", "Cubin", "Resources", "cache_dir", "compile_cubin", "compile_ptx", "source_root"]

ARCH = "sm_90a"
"""Hopper with its own instructions (wgmma, setmaxnreg)."""
_FLAGS = (
    f"--gpu-architecture={ARCH}",
    "--std=c++20",
    "--ptxas-options=-v",
)
_USES = {"cmp": ("attention_pre",)}
"""Folders whose headers the units of another folder include."""
_SERIALISED = re.compile(r"C75(?:08|10|12|14|18)")


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel. Bytes for ``stack`` and the spills."""

    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Cubin:
    """A compiled unit.

    Attributes:
        image: the ELF file that the driver loads.
        log: what the compiler said, ptxas' resource report included.
        key: name in the cache.
    """

    image: bytes
    log: str
    key: str

    def resources(self) -> dict[str, Resources]:
        """Registers and spills by kernel."""
        found = {}
        pattern = re.compile(
            r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, "
            r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
            re.DOTALL,
        )
        for name, stack, stores, loads, registers in pattern.findall(self.log):
            numbers = (int(registers), int(stack), int(stores), int(loads))
            found[name] = Resources(name, *numbers)
        return found

    def warnings(self) -> list[str]:
        """Lines that say wgmma is serialised or setmaxnreg ignored."""
        return [line for line in self.log.splitlines() if _SERIALISED.search(line)]

    def constant(self, name: str) -> int:
        """A 32-bit ``extern "C" __device__ const`` of the unit, read from the ELF file.

        Raises:
            MegaMoeError: there is no such symbol.
        """
        image = self.image
        (table,) = struct.unpack_from("<Q", image, 0x28)
        entry_size, count = struct.unpack_from("<HH", image, 0x3A)
        sections = [
            struct.unpack_from("<IIQQQQIIQQ", image, table + i * entry_size) for i in range(count)
        ]
        for kind, offset, size, link in ((s[1], s[4], s[5], s[6]) for s in sections):
            if kind != 2:  # SHT_SYMTAB
                continue
            names = sections[link][4]
            for at in range(offset, offset + size, 24):
                name_at, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, at)
                start = names + name_at
                if image[start : image.index(b"\0", start)].decode() == name:
                    found: int = struct.unpack_from("<I", image, sections[section][4] + value)[0]
                    return found
        raise MegaMoeError(f"the compiled unit has no constant {name!r}")


def source_root() -> Path:
    """The folder of CUDA sources: of the installed package, or of the checkout."""
    package = Path(__file__).parent
    installed = package / "_csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def cache_dir() -> Path:
    """Where cubins are kept."""
    if chosen := os.environ.get("MEGAMOE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megamoe"


def compile_cubin(unit: str, defines: Mapping[str, int | str]) -> Cubin:
    """Compiles ``csrc/<unit>``, or takes the result from the cache.

    Processes that ask for the same cubin at once compile it once: the others wait for the first.

    Args:
        unit: a ``.cu`` file below the source root, e.g. ``"moe/moe.cu"``.
        defines: preprocessor macros.

    Raises:
        BackendUnavailable: NVRTC or the libcu++ headers are not installed.
        MegaMoeError: the compiler rejects the source; the message holds its log.
    """
    flags = [*_FLAGS, *(f"-D{name}={value}" for name, value in sorted(defines.items()))]
    key = _key(unit, flags)
    folder = cache_dir()
    path = folder / f"{key}.cubin"
    if path.exists():
        return _read(path, key)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            image, log = _nvrtc(unit, flags)
            _replace(path.with_suffix(".log"), log.encode())
            _replace(path, image)
    return _read(path, key)


def _read(path: Path, key: str) -> Cubin:
    return Cubin(path.read_bytes(), path.with_suffix(".log").read_text(), key)


def _replace(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
        f.write(data)
    os.replace(f.name, path)


def _key(unit: str, flags: list[str]) -> str:
    root = source_root()
    digest = hashlib.sha256()
    folders = ("include", "device", *_USES.get(Path(unit).parts[0], ()), Path(unit).parts[0])
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".hpp", ".cuh", ".cu"):
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    cuda, cccl = _headers()
    version = cccl / "cuda" / "std" / "__cccl" / "version.h"
    digest.update(json.dumps([unit, flags, _nvrtc_version()]).encode())
    digest.update(version.read_bytes() if version.exists() else str(cuda).encode())
    return f"{Path(unit).stem}-{digest.hexdigest()[:24]}"


@cache
def _headers() -> tuple[Path, Path]:
    """Include folders of CUDA and of libcu++."""
    roots = []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        roots += [Path(folder) / "cu13", Path(folder) / "cuda_cccl"]
    roots += [Path(os.environ[v]) for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    roots.append(Path("/usr/local/cuda"))
    for root in roots:
        include = root / "include"
        for cccl in (include / "cccl", include):
            if (cccl / "cuda" / "std" / "cstdint").exists():
                return include, cccl
    raise BackendUnavailable(
        "the libcu++ headers are not installed: pip install 'megamoe[nvrtc]', or point CUDA_HOME "
        "at a CUDA 13 toolkit"
    )


def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as e:
        raise BackendUnavailable(
            "cuda-bindings is not installed: pip install 'megamoe[nvrtc]'"
        ) from e
    return nvrtc


@cache
def _nvrtc_version() -> tuple[int, int]:
    nvrtc = _bindings()
    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as e:  # the library itself is missing
        raise BackendUnavailable(
            f"NVRTC cannot be loaded ({e}): pip install 'megamoe[nvrtc]'"
        ) from e
    assert int(error) == 0
    return int(major), int(minor)


def compile_ptx(unit: str, defines: Mapping[str, int | str]) -> str:
    """The PTX of ``csrc/<unit>``, for tests that read it; see ``compile_cubin``. Not cached."""
    flags = [f"--gpu-architecture={ARCH.replace('sm', 'compute')}", "--std=c++20"]
    flags += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    image, _ = _nvrtc(unit, flags, kind="PTX")
    return image.rstrip(b"\0").decode()


def _nvrtc(unit: str, flags: list[str], kind: str = "CUBIN") -> tuple[bytes, str]:
    nvrtc = _bindings()
    root = source_root()
    cuda, cccl = _headers()
    options = [*flags, f"-I{root / 'include'}", f"-I{root}", f"-I{cccl}", f"-I{cuda}"]
    source = (root / unit).read_bytes()
    error, program = nvrtc.nvrtcCreateProgram(source, unit.encode(), 0, [], [])
    assert int(error) == 0, error
    try:
        (error,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        raw = bytes(size)
        nvrtc.nvrtcGetProgramLog(program, raw)
        log = raw.rstrip(b"\0 \n").decode(errors="replace")
        if int(error) != 0:
            raise MegaMoeError(f"NVRTC rejects {unit} with {' '.join(flags)}:\n{log}")
        _, size = getattr(nvrtc, f"nvrtcGet{kind}Size")(program)
        image = bytes(size)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, image)
        return image, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)
