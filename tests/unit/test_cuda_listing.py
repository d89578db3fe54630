"""Route listing of the CUDA kernel, compiled for the host: every list and count, in order."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lister() -> str:
    """The class, as the kernel has it."""
    source = (ROOT / "csrc" / "moe" / "dispatch.cuh").read_text()
    begin = source.index("class RouteLister {")
    return source[begin : source.index("\n};\n", begin) + 4]


def run(lister: str, folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler, "a C++ compiler is part of every set-up"
    program, part = folder / "listing_test", folder / "route_lister.inc"
    part.write_text(lister)
    source = str(ROOT / "tests" / "cpp" / "listing_test.cpp")
    flags = ("-std=c++20", "-O1", "-pthread", f'-DROUTE_LISTER="{part}"')
    subprocess.run([compiler, *flags, source, "-o", str(program)], check=True, timeout=100)
    return subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)


def test_lists_are_in_order(lister, tmp_path):
    done = run(lister, tmp_path)
    assert done.stdout == "ok\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("w < warp ? v.y : 0", "0"),
        ("list + at + before", "list + at"),
        ("by_four_ && ", ""),
        ("i + kWords <= end_", "i < end_"),
    ],
)
def test_a_broken_lister_is_found(lister, part, instead, tmp_path):
    assert lister.count(part) == 1, part
    done = run(lister.replace(part, instead), tmp_path)
    assert done.returncode != 0, "the test passes with it"
