"""The kernel's tickets (csrc/moe/tickets.cuh), compiled for the host: streams and their end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.host_cpp import ROOT, run_program


@pytest.fixture(scope="module")
def tickets() -> str:
    """The class, as the kernel has it."""
    source = (ROOT / "csrc" / "moe" / "tickets.cuh").read_text()
    begin = source.index("class Tickets {")
    return source[begin : source.index("\n};\n", begin) + 4]


def run(tickets: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    part = folder / "tickets.inc"
    part.write_text(tickets)
    return run_program("tickets_test", folder, f'-DTICKETS="{part}"', *flags)


def test_every_tile_runs_once_and_nobody_waits_for_ever(tickets, tmp_path):
    done = run(tickets, tmp_path)
    assert done.stdout == "ok\n", done.stdout + done.stderr


def test_a_tile_that_has_not_begun_must_not_be_turned_behind(tickets, tmp_path):
    """Why kMostStreams is 1 where a tile has no more blocks of K than there are stages."""
    assert run(tickets, tmp_path, "-DEARLY").stdout.startswith("stuck")


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("of_stream(kL2Tiles), s.walk", "kL2Tiles, s.walk"),
        ("at.n * 2 + stream_", "at.n"),
        ("drawn_ < end)", "drawn_ <= end)"),
        ("drawn_ < end)", "drawn_ + 1 < end)"),
        ("stream_ ^= 1;", ""),
        ("stream_ ^= 1;\n        draw();", "stream_ ^= 1;"),
        ("s_.walk_kept = s_.walk;", ""),
        ("if (walk_.passed(drawn_)) walk_.start();", ""),
        ("num_streams() == 1 ? gridDim.x : 0", "gridDim.x"),
    ],
)
def test_wrong_tickets_are_found(tickets, part, instead, tmp_path):
    assert tickets.count(part) == 1, part
    done = run(tickets.replace(part, instead), tmp_path)
    assert done.returncode != 0, "the test passes with it"
