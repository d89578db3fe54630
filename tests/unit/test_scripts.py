"""Programs beside the console script: what a machine lacks is one line and exit code 2."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from launcher.script import run_script
from megamoe.errors import SpecError

ROOT = Path(__file__).parents[2]
LAUNCHER = ("attention_contender", "bench_attention_pre", "probe_pages", "tune_cmp")
SCRIPTS = ("gpu_compile", "gpu_sanitize", "gpu_configs")


def loaded(name: str):
    """The module of a program, which is not run."""
    if name in LAUNCHER:
        return importlib.import_module(f"launcher.{name}")
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refused(main, monkeypatch, capsys) -> str:
    """The last line that the program leaves behind; code 2, no traceback."""
    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(SystemExit) as ended:
        run_script(main)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()[-1]


@pytest.mark.parametrize("name", [*LAUNCHER, *SCRIPTS])
def test_every_program_ends_so(name):
    folder = "launcher" if name in LAUNCHER else "scripts"
    source = (ROOT / folder / f"{name}.py").read_text()
    assert source.endswith('if __name__ == "__main__":\n    run_script(main)\n')


def test_no_program_of_the_launcher_is_left_out():
    found = {
        path.stem
        for path in (ROOT / "launcher").glob("*.py")
        if re.search(r"^def main\(\) -> None:", path.read_text(), re.MULTILINE)
    }
    assert found == set(LAUNCHER)


@pytest.mark.parametrize("name", ["bench_attention_pre", "probe_pages", "tune_cmp", "gpu_sanitize"])
def test_without_a_gpu(name, monkeypatch, capsys):
    module = loaded(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("megamoe.jit._FLAGS", ())  # gpu_sanitize adds to them
    line = refused(module.main, monkeypatch, capsys)
    assert re.fullmatch(r"error: \w.* needs a Hopper GPU .*, and this machine has none", line)


def test_without_nvrtc(monkeypatch, capsys, tmp_path):
    gpu_compile = loaded("gpu_compile")
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr("megamoe.jit._nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(gpu_compile, "ProcessPoolExecutor", ThreadPoolExecutor)
    line = refused(gpu_compile.main, monkeypatch, capsys)
    assert line == "error: cuda-bindings is not installed: pip install 'megamoe[nvrtc]'"


def test_without_the_public_kernels(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    line = refused(loaded("attention_contender").main, monkeypatch, capsys)
    assert line.startswith("error: the public kernels are not installed: ")


def test_outside_torchrun(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    line = refused(loaded("gpu_configs").main, monkeypatch, capsys)
    assert "start it with torchrun" in line


def test_a_bug_keeps_its_traceback(capsys):
    def bug() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_script(bug)

    def wrong() -> None:
        raise SpecError("two\n  lines")

    with pytest.raises(SystemExit):
        run_script(wrong)
    assert capsys.readouterr().err == "error: two lines\n"
