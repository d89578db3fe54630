"""The closed form of the ticket order against the walk, compiled for the host."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.host_cpp import ROOT, run_program

HEADER = Path("megamoe") / "schedule.hpp"


def build(folder: Path, include: Path) -> subprocess.CompletedProcess[str]:
    """Compiles the test against the headers in ``include`` and runs it."""
    return run_program("ticket_place_test", folder, f"-I{include}")


def test_every_ticket_leads_where_the_walk_does(tmp_path):
    done = build(tmp_path, ROOT / "csrc" / "include")
    assert done.stdout == "ok\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("s.l2_lag + 1 < s.ring_l2 ? s.l2_lag + 1 : s.ring_l2", "s.l2_lag + 1"),
        ("if (ahead > num_blocks) ahead = num_blocks;", ""),
        ("TileKind::kLinear1, ahead + turn, n - l2_tiles", "TileKind::kLinear1, ahead, n"),
        ("turns + ticket / l2_tiles", "ticket / l2_tiles"),
        ("if (s_.wave2.begin == s_.wave1.begin) return false;", ""),
        ("s_.wave1.begin >= s_.wave2.end", "s_.wave1.begin > s_.wave2.end"),
        ("s_.wave1.end > s_.wave2.begin + shape_.ring_l2", "false"),
    ],
)
def test_a_wrong_form_is_found(tmp_path, part, instead):
    source = (ROOT / "csrc" / "include" / HEADER).read_text()
    assert source.count(part) == 1, part
    (tmp_path / HEADER).parent.mkdir()
    (tmp_path / HEADER).write_text(source.replace(part, instead))
    assert build(tmp_path, tmp_path).returncode != 0, "the test passes with it"
