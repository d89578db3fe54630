"""Programs of ``tests/cpp`` that try a header of the kernels on the host."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_program(name: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Compiles ``tests/cpp/NAME.cpp`` into ``folder`` and runs it.

    Args:
        name: of the program.
        folder: where it goes.
        flags: of the compiler; what they include comes before ``csrc/include``.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler, "a C++ compiler is part of every set-up"
    source, program = ROOT / "tests" / "cpp" / f"{name}.cpp", folder / name
    include = f"-I{ROOT / 'csrc' / 'include'}"
    command = [compiler, "-std=c++20", "-O1", *flags, include, str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=100)
    return subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)
