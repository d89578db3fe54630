"""``bench moe`` for GPUs, all but the GPU: two CPU ranks, with stand-ins for kernels and clocks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from launcher.ranks import Group
from tests.gpu.processes import RankProcesses
from tests.multirank import bench_rank

pytestmark = pytest.mark.multirank
FIGURES = (
    *("total_us", "p99_us", "launches", "peer", "peer_us", "unfused_us", "gemms_us", "floor_us"),
    *("fraction_of_floor", "tflops", "hbm_gbs", "nvlink_gbs", "joules_per_token", "sm_mhz"),
    *("throttle", "max_rel_err", "host_us", "window_bytes", "ring_tokens", "max_over_mean"),
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    running = RankProcesses(2, "torch", tmp_path_factory.mktemp("ranks"))
    yield running
    running.close()


def test_rows_of_two_ranks(ranks):
    cases = [("9", "zipf"), ("9", "hot_experts"), ("4,11", "all_to_one")]
    first, second = ranks.all(bench_rank.bench, cases, ["peer", "unfused"], 1.0, 0.5)
    assert [r["tokens"] for r in first] == [9, 9, [4, 11]]
    for row, other in zip(first, second, strict=True):
        assert row["ok"]
        assert row["reasons"] == {"stage_us": "staging is part of the kernel, and of total_us"}
        assert row["stage_us"] is None
        assert all(row[name] is not None for name in FIGURES)
        # Both ranks have one and the same row, but for their own windows.
        assert {k: row[k] for k in FIGURES} == {k: other[k] for k in FIGURES}
        errors = row["errors"]
        assert set(errors) == {"megamoe", "peer", "unfused"}
        assert all(0 <= e["rel_err"] < e["allowed"] for e in errors.values())
        # BF16 weights of the reduction: an exact zero would mean that ours was looked at.
        assert errors["unfused"]["rel_err"] > 1e-4
        assert row["peer"] == "sgl-deep-gemm 9.9"
        assert row["peer_window_bytes"] == 1234
        assert row["speedup"] == pytest.approx(row["peer_us"] / row["total_us"], rel=0.01)
        total = row["tokens"] * 2 if isinstance(row["tokens"], int) else sum(row["tokens"])
        assert row["joules_per_token"] == pytest.approx(3.0 / total)
    assert first[2]["max_over_mean"] == 2.0


def test_a_wrong_peer_gets_no_time_and_the_reason(ranks):
    rows = ranks.all(bench_rank.bench, [("5", "uniform")], ["peer"], 1.5, 0.0)[0]
    (row,) = rows
    assert not row["ok"]
    assert row["total_us"] is not None
    assert row["peer_us"] is row["speedup"] is None
    assert row["reasons"]["peer_us"].startswith("wrong: ")
    assert row["reasons"]["unfused_us"] == "not asked for"
    assert row["reasons"]["joules_per_token"] == "--sustain 0: no sustained run"
    assert row["errors"]["peer"]["rel_err"] > row["errors"]["peer"]["allowed"]


def test_masked_routes_are_not_asked_of_the_peers(ranks):
    case = [("5", "uniform+masked:0.5")]
    (row,) = ranks.all(bench_rank.bench, case, ["peer", "unfused"], 1.0, 0.0)[1]
    assert row["total_us"] is not None
    assert "masked" in row["reasons"]["peer_us"]
    assert "masked" in row["reasons"]["gemms_us"]


def test_a_rank_alone_brings_a_group_for_the_peers(monkeypatch):
    """Two models in a row, as a suite has them."""
    bench_rank.stand_in(monkeypatch.setattr, 1.0)
    try:
        for _ in range(2):
            rows = bench_rank.rows_of(Group(0, 1, "cpu"), [("6", "zipf")], ["peer"], 0.0)
            assert rows[0]["ok"]
            assert rows[0]["peer_us"] > 0
            assert rows[0]["max_over_mean"] == 1.0
            assert rows[0]["nvlink_gbs"] == 0.0
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
