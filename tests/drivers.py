"""Builds and runs the C++ drivers of tests/cpp that need no Python."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
#: Line tables for reports, and no more optimisation than a sanitizer repays.
SANITIZER_FLAGS = "-O1 -g1"


def _environment() -> dict[str, str]:
    programs = Path(sys.executable).parent  # cmake and ninja, where a test environment has them
    return os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def _call(*command: object, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env=_environment(),
    )


@functools.cache
def sanitizer_works(sanitizer: str) -> bool:
    """Whether the compiler of this machine links its runtime."""
    folder = ROOT / "build" / f"tests-{sanitizer.partition(',')[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "probe.cpp"
    source.write_text("int main() {}\n")
    compiler = os.environ.get("CXX", "c++")
    try:
        result = _call(compiler, f"-fsanitize={sanitizer}", source, "-o", folder / "probe")
    except FileNotFoundError:
        return False
    return result.returncode == 0


@functools.cache
def build(sanitizer: str, *targets: str) -> Path:
    """The folder with the targets of tests/cpp, up to date, in a build folder of its own."""
    folder = ROOT / "build" / f"tests-{sanitizer.partition(',')[0] or 'plain'}"
    options = ["-G", "Ninja"]
    options += [f"-DPython_EXECUTABLE={sys.executable}", f"-DMEGAMOE_SANITIZE={sanitizer}"]
    if sanitizer:
        options += ["-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={SANITIZER_FLAGS}"]
    for command in (
        ("cmake", "-S", ROOT, "-B", folder, *options),
        ("cmake", "--build", folder, "--target", *targets),
    ):
        result = _call(*command)
        assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-4000:]
    return folder / "tests" / "cpp"


def call(
    program: Path, *arguments: object, timeout: float
) -> tuple[subprocess.CompletedProcess[str], str]:
    """The finished process, and all that can be said of it."""
    command: list[object] = [program, *arguments]
    result = _call(*command, timeout=timeout)
    if "unexpected memory mapping" in result.stderr:
        # ThreadSanitizer of older compilers under kernels that randomise more address bits.
        command = ["setarch", platform.machine(), "-R", *command]
        result = _call(*command, timeout=timeout)
    text = f"{' '.join(map(str, command))}: {result.returncode}\n{result.stdout}{result.stderr}"
    return result, text[-12000:]


def run(program: Path, *arguments: object, timeout: float) -> list[dict[str, Any]]:
    """What the driver printed, one object per line. Fails with all of its output."""
    result, text = call(program, *arguments, timeout=timeout)
    if result.returncode != 0:
        pytest.fail(text)
    return [json.loads(line) for line in result.stdout.splitlines()]
