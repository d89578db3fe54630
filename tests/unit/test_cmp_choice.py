"""The engine that the layer takes is the one that was measured to be faster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megamoe.cmp import choice
from megamoe.cmp.choice import EVIDENCE, Evidence, choose_engine
from megamoe.errors import SpecError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "attention_pre_h200.json"


def test_evidence_is_what_the_results_say():
    rows = [r for r in json.loads(RESULTS.read_text())["rows"] if r["l2"] == "cold"]
    for e in EVIDENCE:
        here = {r["variant"]: r["us"] for r in rows if (r["m"], r["kv"]) == (e.rows, e.keys)}
        # The layer runs `branches_pdl`; the megakernel was timed by the same command.
        found = here["megakernel_beside_cmp"], here["branches_pdl"]
        assert (e.megakernel_us, e.cmp_us) == found, e
    assert EVIDENCE


def test_the_nearest_shape_decides(monkeypatch):
    monkeypatch.delenv(choice.ENGINE_VARIABLE, raising=False)
    measured = (Evidence(16, 8192, 30.0, 28.0), Evidence(128, 8192, 50.0, 60.0))
    monkeypatch.setattr(choice, "EVIDENCE", measured)
    assert choose_engine(16, 8192) == "cmp"
    assert choose_engine(20, 2048) == "cmp"
    assert choose_engine(100, 8192) == "megakernel"
    far = (Evidence(16, 8192, 30.0, 28.0),)
    monkeypatch.setattr(choice, "EVIDENCE", far)
    assert choose_engine(64, 8192) == "megakernel"
    assert choose_engine(16, 65536) == "megakernel"
    monkeypatch.setattr(choice, "EVIDENCE", ())
    assert choose_engine(16, 8192) == "megakernel"


def test_the_environment_overrides(monkeypatch):
    for engine in ("megakernel", "cmp"):
        monkeypatch.setenv(choice.ENGINE_VARIABLE, engine)
        assert choose_engine(16, 8192) == engine
    monkeypatch.setenv(choice.ENGINE_VARIABLE, "fast")
    with pytest.raises(SpecError, match="must be 'megakernel' or 'cmp'"):
        choose_engine(16, 8192)
