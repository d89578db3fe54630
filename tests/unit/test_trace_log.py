"""The recorder of traced GPU builds, compiled for the host: bounded buffers, the right tracks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.host_cpp import ROOT, run_program


def build(folder: Path, csrc: Path) -> subprocess.CompletedProcess[str]:
    """Compiles the test against the kernel's own recorder and runs it."""
    host = ROOT / "tests" / "cpp" / "host_cuda"
    return run_program("trace_log_test", folder, f"-I{host}", f"-I{csrc}")


def test_events_are_where_they_belong_and_nowhere_else(tmp_path):
    done = build(tmp_path, ROOT / "csrc")
    assert done.stdout == "ok\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("part", "without"),
    [
        ("if (i >= capacity) return;", ""),
        ("recorded[uint32_t(TraceRole::kPull)] += ready;", ""),
        ("combine && threadIdx.x != 0", "false"),
    ],
)
def test_a_broken_recorder_is_found(tmp_path, part, without):
    source = (ROOT / "csrc" / "device" / "trace.cuh").read_text()
    assert source.count(part) == 1, part
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "trace.cuh").write_text(source.replace(part, without))
    done = build(tmp_path, tmp_path)
    assert done.returncode != 0, "the test passes without it"
