"""Sorts racecheck's reports into explained ones and others; exit code 1 if there are others.

    python scripts/sanitizer_reports.py racecheck.log

racecheck takes an arrival at an mbarrier to order what the arriving thread itself did, and nothing
that other lanes did before a ``__syncwarp()`` with it. So it reports every hand-off in which lane 0
arrives for its warp. ``docs/protocol.md`` says why these are ordered all the same, and how the
reports show that this is what they are: lane 0's own accesses are missing from them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# One side, the other side: functions between which a hand-off of that kind lies.
EXPLAINED = (
    # Task slots: written by the feeder alone; given back by lane 0 of the math and publish warps.
    (
        r"\bmoe::post\(|\bring_position\(",
        r"\b(announce|find_targets|math|few_rows|linear[12]_\w+|L2Rows)\W|^megamoe_moe$",
    ),
    # Scales: bulk copies into a slot that lane 0 of each math warp has given back.
    (r"\bbulk_load\(", r"\bload_shared2?\("),
    # Targets of rows: written by the publish warp's lanes, announced by its lane 0, and read until
    # lane 0 of each math warp says so.
    (r"\bfind_targets\(", r"\blinear2_(few|many)\W"),
    # Attention-pre. Records and weight scales: written by the controller's lanes, given back by
    # lane 0 of every other role.
    (
        r"\battention::(run_controller|load_scales)\(",
        r"\battention::|\bload_shared2?\(|^megamoe_attention_pre$",
    ),
    # The same as kernels of their own: scales written by a loader's lanes, announced by its lane 0,
    # read until lane 0 of each math warp says so.
    (
        r"\battention::(WeightScales|load_inputs|load_queries)\b",
        r"\bload_shared2?\(|\battention::index_score\b|^megamoe_cmp$",
    ),
    # Scales of inputs: written by the input loader's lanes, read until lane 0 of each math warp
    # says so.
    (r"\battention::InputBlocks::load\(", r"\bload_shared2?\("),
)
_ACCESS = re.compile(r"(?:Race reported between|and) (?:Read|Write) access at (.*?)\+0x[0-9a-f]+")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warn")


def reports(log: str) -> list[tuple[str, str]]:
    """Pairs of functions that are said to race."""
    pairs, first = [], ""
    for line in log.splitlines():
        if found := _ACCESS.search(line):
            if "Race reported" in line:
                first = found[1]
            else:
                pairs.append((first, found[1]))
    return pairs


def explained(pair: tuple[str, str]) -> bool:
    """Whether the two lie on the two sides of a known hand-off."""
    return any(
        re.search(one, a) and re.search(other, b)
        for one, other in EXPLAINED
        for a, b in (pair, pair[::-1])
    )


def main(path: str) -> int:
    log = Path(path).read_text(errors="replace")
    pairs = reports(log)
    others = sorted({pair for pair in pairs if not explained(pair)})
    for a, b in others:
        print(f"not explained: {a} and {b}")
    summary = _SUMMARY.search(log)
    if summary is None:
        print("racecheck did not end")
        return 1
    shown, errors, warnings = (int(n) for n in summary.groups())
    if shown < errors + warnings:
        print(f"{errors + warnings - shown} of {errors + warnings} hazards are not in the log")
        return 1
    print(f"{shown} hazards, {len(pairs)} pairs of places, {len(others)} not explained")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
