"""Route listing of the CUDA kernel, compiled for the host: every list and count, in order.

And the order in which a rank takes its experts, and how it foresees its beginning.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.host_cpp import ROOT, run_program


@pytest.fixture(scope="module")
def lister() -> str:
    """The class and the functions, as the kernel has them."""
    dispatch = (ROOT / "csrc" / "moe" / "dispatch.cuh").read_text()
    weights = (ROOT / "csrc" / "moe" / "weights.cuh").read_text()
    protocol = (ROOT / "csrc" / "include" / "megamoe" / "protocol.hpp").read_text()
    return "\n".join(
        source[begin : source.index(end, begin) + len(end)]
        for source, start, end in (
            (protocol, "inline constexpr uint32_t kWholeFlag", "\n}\n"),
            (dispatch, "class RouteLister {", "\n};\n"),
            (dispatch, "MEGAMOE_DEVICE void publish_counts(", "\n}\n"),
            (dispatch, "MEGAMOE_DEVICE void order_experts(", "\n}\n"),
            (weights, "inline constexpr uint32_t kNoExpert", "\n}\n"),
        )
        for begin in [source.index(start)]
    )


def run(lister: str, folder: Path) -> subprocess.CompletedProcess[str]:
    part = folder / "parts.inc"
    part.write_text(lister)
    return run_program("listing_test", folder, "-pthread", f'-DPARTS="{part}"')


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
        ("kWholeFlag % num_ctas", "0"),
        ("flag_share(blockIdx.x, gridDim.x)", "flag_share(0, gridDim.x)"),
        ("(own[e] == 0) == wanted", "(own[e] != 0) == wanted"),
        ("s.order[at + __popc", "s.order[__popc"),
        ("min(experts - first, 32u)", "32u"),
        ("order -= __popc(named)", "order -= 1"),
    ],
)
def test_a_broken_lister_is_found(lister, part, instead, tmp_path):
    assert lister.count(part) == 1, part
    done = run(lister.replace(part, instead), tmp_path)
    assert done.returncode != 0, "the test passes with it"
