"""The tile functions of the CPU backend, tested by a C++ driver that needs no Python.

tests/cpp/gemm_test.cpp says what is compared with what. It tests every instruction set of this
machine, and the AMX code on a model of the tile unit everywhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    """The driver, from the build of the extension if there is one (its objects are reused)."""
    programs = Path(sys.executable).parent  # cmake and ninja, where a test environment has them
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    folders = [f"editable-{sys.implementation.cache_tag}", "dev"]
    builds = [ROOT / "build" / name for name in folders]
    build = next((path for path in builds if (path / "CMakeCache.txt").exists()), None)
    if build is None:
        build = tmp_path_factory.mktemp("gemm")
        options = ("-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}")
        result = run("cmake", "-S", ROOT, "-B", build, *options, env=environment)
        assert result.returncode == 0, result.stdout + result.stderr
    result = run("cmake", "--build", build, "--target", "gemm_test", env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return build / "tests" / "cpp" / "gemm_test"


def test_tile_functions(driver):
    result = run(driver, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "portable\n" in result.stdout
    assert "amx, emulated tiles\n" in result.stdout
    assert "; 0 failures" in result.stdout


def test_a_forced_instruction_set_is_used_or_refused(driver):
    names = ("portable", "avx2", "avx512", "amx")
    available = {"portable"}
    for name in names:
        result = run(driver, "--best", env=os.environ | {"MEGAMOE_ISA": name})
        if result.returncode == 0:
            assert result.stdout.strip() == name
            available.add(name)
        else:
            assert f'MEGAMOE_ISA = "{name}": this machine and build have portable' in result.stderr
    environment = {key: value for key, value in os.environ.items() if key != "MEGAMOE_ISA"}
    result = run(driver, "--best", env=environment)
    assert result.stdout.strip() == [name for name in names if name in available][-1]
    result = run(driver, "--best", env=os.environ | {"MEGAMOE_ISA": "sse9"})
    assert result.returncode != 0
    listed = re.search(r"have ([a-z0-9, ]+);", result.stderr)
    assert listed is not None, result.stderr
    assert set(listed[1].split(", ")) == available
