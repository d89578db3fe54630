"""Where the regions of a window are, for three shapes, byte by byte.

The table is committed: ranks of different builds, saved dumps and the host's view of a window all
rely on it, so a change of the layout must be seen and meant. To renew it, print
``native.window_layout`` of each shape in the file.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from megamoe import native

GOLDEN = json.loads((Path(__file__).parent / "layout_golden.json").read_text())


@pytest.fixture(params=GOLDEN)
def golden(request):
    return GOLDEN[request.param]


def test_layout_is_the_committed_one(golden):
    shape = native.MoEShape(**golden["shape"])
    regions, num_bytes = native.window_layout(shape)
    for have, want in zip(regions, golden["regions"], strict=True):
        assert list(have) == want, f"{have[0]}: (offset, count, stride) differ"
    assert num_bytes == golden["num_bytes"]
    assert list(native.clear_span(shape)) == golden["clear"]


def test_regions_have_room_for_their_data(golden):
    """Bytes of each region from the shape's numbers, without the layout's code."""
    s = golden["shape"]
    rows1, rows2 = s["ring_l1"] * s["block_m"], s["ring_l2"] * s["block_m"]
    local, ranks = s["num_experts"] // s["num_ranks"], s["num_ranks"]
    element = 1 if s["is_fp8"] else 2
    # FP8 rows have one FP32 scale per 128 columns, BF16 rows none.
    x_scale = 4 * s["hidden"] // 128 * s["is_fp8"]
    h_scale = 4 * s["inter"] // 128 * s["is_fp8"]
    line = 128
    want = {
        "host_barrier": ranks * line,
        "control": 8 * line,
        "fault": ranks * line,
        "counts_flag": ranks * line,
        "l1_full": s["ring_l1"] * line,
        "l1_empty": s["ring_l1"] * line,
        "l2_full": s["ring_l2"] * line,
        "l2_empty": s["ring_l2"] * line,
        "token_arrived": s["max_tokens"] * 4,
        "unit_count": s["num_units"] * s["num_experts"] * 4,
        "recv_count": 2 * ranks * local * 4,
        "route": 2 * ranks * s["max_tokens"] * s["topk"] * 4,
        "input": s["max_tokens"] * s["hidden"] * element,
        "input_scale": s["max_tokens"] * x_scale,
        "l1_ring": rows1 * s["hidden"] * element,
        "l1_scale": rows1 * x_scale,
        "l2_ring": rows2 * s["inter"] * element,
        "l2_scale": rows2 * h_scale,
        "combine": (s["topk"] + s["num_shared"]) * s["max_tokens"] * s["hidden"] * 2,
    }
    have = {name: count * stride for name, _, count, stride in golden["regions"]}
    assert have == want


def test_regions_are_disjoint_and_aligned(golden):
    for (name, offset, count, stride), after in pairwise(golden["regions"]):
        assert offset + count * stride <= after[1], f"{name} runs into {after[0]}"
    for name, offset, _, _ in golden["regions"]:
        assert offset % 1024 == 0, f"{name} at {offset}"
    name, offset, count, stride = golden["regions"][-1]
    assert offset + count * stride <= golden["num_bytes"]
    assert golden["num_bytes"] % 4096 == 0


def test_reset_clears_protocol_words_and_no_data(golden):
    begin, end = golden["clear"]
    cleared = [name for name, offset, _, _ in golden["regions"] if begin <= offset < end]
    words = ["control", "fault", "counts_flag", "l1_full", "l1_empty", "l2_full", "l2_empty"]
    assert cleared == [*words, "token_arrived"]
