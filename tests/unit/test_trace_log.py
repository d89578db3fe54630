"""The recorder of traced GPU builds, compiled for the host: bounded buffers, the right tracks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++"))
    assert found, "a C++ compiler is part of every set-up"
    return found


def build(compiler: str, folder: Path, csrc: Path) -> subprocess.CompletedProcess[str]:
    """Compiles the test against the kernel's own recorder and runs it."""
    program = folder / "trace_log_test"
    tests = ROOT / "tests" / "cpp"
    includes = [f"-I{path}" for path in (tests / "host_cuda", csrc, ROOT / "csrc" / "include")]
    files = [str(tests / "trace_log_test.cpp"), "-o", str(program)]
    subprocess.run([compiler, "-std=c++20", "-O1", *includes, *files], check=True, timeout=100)
    return subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=20)


def test_events_are_where_they_belong_and_nowhere_else(compiler, tmp_path):
    done = build(compiler, tmp_path, ROOT / "csrc")
    assert done.stdout == "ok\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("part", "without"),
    [
        ("if (i >= capacity) return;", ""),
        ("recorded[uint32_t(TraceRole::kPull)] += ready;", ""),
        ("combine && threadIdx.x != 0", "false"),
    ],
)
def test_a_broken_recorder_is_found(compiler, tmp_path, part, without):
    source = (ROOT / "csrc" / "device" / "trace.cuh").read_text()
    assert source.count(part) == 1, part
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "trace.cuh").write_text(source.replace(part, without))
    done = build(compiler, tmp_path, tmp_path)
    assert done.returncode != 0, "the test passes without it"
