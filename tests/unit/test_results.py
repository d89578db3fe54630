"""Every file of ``benchmarks/results`` says what made it: a revision and a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


def said(entry: dict[str, Any], name: str) -> bool:
    """In its own words or in those of its ``meta``."""
    return bool(entry.get(name) or entry.get("meta", {}).get(name))


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_who_made_it(path):
    found = json.loads(path.read_text())
    for name in ("commit", "command"):
        if said(found, name):
            continue
        lists = [v for v in found.values() if isinstance(v, list) and v]
        assert lists, f"{path.name}: neither meta nor any row has {name!r}"
        for rows in lists:
            missing = [i for i, row in enumerate(rows) if not said(row, name)]
            assert not missing, f"{path.name}: no {name!r} in rows {missing[:5]}"


def test_there_are_results():
    assert len(RESULTS) >= 10
