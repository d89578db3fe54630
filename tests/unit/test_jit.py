"""The cubin cache: keys, atomic files, errors, and one compilation among several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megamoe import jit
from megamoe.errors import MegaMoeError

pytest.importorskip("cuda.bindings.nvrtc")

SOURCE = """
#include "device/factor.cuh"
extern "C" {
__constant__ unsigned answer = FACTOR * 6;
__global__ void scale(float* x) { x[threadIdx.x] *= FACTOR; }
}
"""


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A source tree with one small unit, and an empty cache."""
    for folder in ("include", "device", "small"):
        (tmp_path / "csrc" / folder).mkdir(parents=True)
    (tmp_path / "csrc" / "small" / "unit.cu").write_text(SOURCE)
    (tmp_path / "csrc" / "device" / "factor.cuh").write_text("#define FACTOR 7\n")
    monkeypatch.setattr(jit, "source_root", lambda: tmp_path / "csrc")
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_unit_is_compiled_once(tree, monkeypatch):
    first = jit.compile_cubin("small/unit.cu", {})
    assert first.image[:4] == b"\x7fELF"
    assert first.constant("answer") == 42
    assert first.resources()["scale"].spill_stores == 0
    assert first.resources()["scale"].registers > 0
    assert not first.warnings()

    def refuse(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(jit, "_nvrtc", refuse)
    assert jit.compile_cubin("small/unit.cu", {}) == first
    left = {p.suffix for p in (tree / "cache").iterdir()}
    assert left == {".cubin", ".log", ".lock"}, left


def test_the_key_holds_headers_and_macros(tree):
    first = jit.compile_cubin("small/unit.cu", {})
    other = jit.compile_cubin("small/unit.cu", {"UNUSED": 1})
    (tree / "csrc" / "device" / "factor.cuh").write_text("#define FACTOR 8\n")
    changed = jit.compile_cubin("small/unit.cu", {})
    assert len({first.key, other.key, changed.key}) == 3
    assert changed.constant("answer") == 48


def test_an_error_shows_the_compilers_words(tree):
    (tree / "csrc" / "device" / "factor.cuh").write_text("#define FACTOR nonsense\n")
    with pytest.raises(MegaMoeError, match=r"(?s)unit\.cu.*nonsense"):
        jit.compile_cubin("small/unit.cu", {})
    assert not list((tree / "cache").glob("*.cubin"))


def test_a_missing_constant_is_named(tree):
    with pytest.raises(MegaMoeError, match="question"):
        jit.compile_cubin("small/unit.cu", {}).constant("question")


def test_processes_that_race_share_one_result(tree):
    """Both print the same key; the files are whole whoever wrote them."""
    code = (
        "import pathlib, sys; from megamoe import jit; root = pathlib.Path(sys.argv[1]);"
        "jit.source_root = lambda: root; c = jit.compile_cubin('small/unit.cu', {});"
        "print(c.key, c.constant('answer'))"
    )
    command = [sys.executable, "-c", code, str(tree / "csrc")]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {p.communicate(timeout=100)[0].strip() for p in racers}
    assert len(said) == 1, said
    assert next(iter(said)).endswith(" 42")
    assert len(list((tree / "cache").glob("*.cubin"))) == 1
