"""What ``scripts/sanitizer_reports.py`` makes of racecheck's words (from a run on an H200)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "sanitizer_reports.py"
_spec = importlib.util.spec_from_file_location("sanitizer_reports", PATH)
assert _spec is not None
assert _spec.loader is not None
sanitizer_reports = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sanitizer_reports)

P = "const megamoe::moe::MoEParams &, megamoe::moe::SharedStorage &"
SCALES = """\
========= Error: Race reported between Write access at megamoe::ptx::bulk_load(void *, const void *)+0x42380 in ptx.cuh:73
=========     and Read access at megamoe::ptx::load_shared2(unsigned int)+0xb1b0 in ptx.cuh:158 [288 hazards]
=========     and Read access at megamoe::ptx::load_shared2(unsigned int)+0xd4a0 in ptx.cuh:158 [64 hazards]
"""  # noqa: E501
TASKS = f"""\
========= Error: Race reported between Read access at megamoe::moe::math({P})+0x6330 in math.cuh:94
=========     and Write access at megamoe::moe::post({P}, const megamoe::Tile &)+0x3e250 in feed.cuh:86 [10 hazards]
========= Error: Race reported between Write access at megamoe::ring_position(megamoe::RingPosition, unsigned int, unsigned int)+0x3ddd0 in protocol.hpp:81
=========     and Read access at megamoe_moe+0xc750 [4 hazards]
=========     and Read access at megamoe::moe::L2Rows::L2Rows(const megamoe::moe::MoEParams &, const megamoe::moe::Task &)+0x73e0 in linear1.cuh:38 [4 hazards]
=========     and Read access at megamoe::moe::find_targets({P}, const megamoe::moe::Task &, unsigned int *(&)[4])+0x429d0 in publish.cuh:19 [4 hazards]
"""  # noqa: E501
TARGETS = f"""\
========= Error: Race reported between Write access at megamoe::moe::find_targets({P}, unsigned int *(&)[4])+0x42e60 in publish.cuh:20
=========     and Read access at void megamoe::moe::linear2_few<(int)8>(megamoe::moe::SharedStorage &)+0xb600 in linear2.cuh:31 [192 hazards]
"""  # noqa: E501
NEW = f"""\
========= Error: Race reported between Write access at megamoe::moe::find_targets({P})+0x42e60 in publish.cuh:20
=========     and Write access at megamoe::ptx::bulk_load(void *, const void *)+0x40510 in ptx.cuh:73 [4 hazards]
"""  # noqa: E501


def summary(shown: int, errors: int) -> str:
    return f"========= RACECHECK SUMMARY: {shown} hazards displayed ({errors} errors, 0 warnings)\n"


def verdict(tmp_path, capsys, log: str) -> tuple[int, str]:
    path = tmp_path / "log"
    path.write_text(log)
    code = sanitizer_reports.main(str(path))
    return code, capsys.readouterr().out


def test_known_hand_offs_are_explained(tmp_path, capsys):
    log = SCALES + TASKS + TARGETS + summary(4, 4)
    assert len(sanitizer_reports.reports(log)) == 7
    assert verdict(tmp_path, capsys, log) == (
        0,
        "4 hazards, 7 pairs of places, 0 not explained\n",
    )


def test_another_pair_is_not(tmp_path, capsys):
    code, said = verdict(tmp_path, capsys, SCALES + NEW + summary(2, 2))
    assert code == 1
    assert "not explained: megamoe::moe::find_targets" in said


@pytest.mark.parametrize(
    ("log", "said"),
    [(SCALES + summary(1, 3), "2 of 3 hazards are not in the log"), (SCALES, "did not end")],
)
def test_what_cannot_be_seen_is_no_pass(tmp_path, capsys, log, said):
    code, printed = verdict(tmp_path, capsys, log)
    assert code == 1
    assert said in printed
