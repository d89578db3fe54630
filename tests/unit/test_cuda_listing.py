"""Route listing of the CUDA kernel, compiled for the host: every list and count, in order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.host_cpp import ROOT, run_program


@pytest.fixture(scope="module")
def lister() -> str:
    """The class, as the kernel has it."""
    source = (ROOT / "csrc" / "moe" / "dispatch.cuh").read_text()
    begin = source.index("class RouteLister {")
    return source[begin : source.index("\n};\n", begin) + 4]


def run(lister: str, folder: Path) -> subprocess.CompletedProcess[str]:
    part = folder / "route_lister.inc"
    part.write_text(lister)
    return run_program("listing_test", folder, "-pthread", f'-DROUTE_LISTER="{part}"')


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
