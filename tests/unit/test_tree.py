"""The rules of the source tree hold, and each rule finds the violation it is there for."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_spec = importlib.util.spec_from_file_location("tree_rules", ROOT / "scripts" / "tree_rules.py")
assert _spec is not None
assert _spec.loader is not None
tree_rules = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tree_rules)


def run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ---------------------------------------------------------------- C++ includes, sizes, paths


def test_includes_of_the_tree():
    assert tree_rules.check_includes(ROOT) == []


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("csrc/include/megamoe/shape.hpp", "#include <cstdint>", "<cstdint> in a shared header"),
        ("csrc/include/megamoe/config.hpp", "#include <unistd.h>", "<unistd.h> in a shared"),
        ("csrc/include/megamoe/shape.hpp", '#include "device/ptx.cuh"', "csrc/include includes"),
        ("csrc/moe/kernel.cuh", '#include "attention_pre/vm.cuh"', "csrc/moe includes"),
        ("csrc/moe/kernel.cuh", '#  include "../attention_pre/vm.cuh"', "csrc/moe includes"),
        ("csrc/attention_pre/vm.cuh", '#include "moe/kernel.cuh"', "csrc/attention_pre includes"),
        ("csrc/cpu/session.cpp", '#include "device/ptx.cuh"', "csrc/cpu includes"),
        ("csrc/device/ptx.cuh", '#include "cutlass/cutlass.h"', "is not a file of csrc/"),
    ],
)
def test_a_wrong_include_is_found(tmp_path, name, text, complaint):
    for header in (
        "csrc/include/megamoe/config.hpp",
        "csrc/include/megamoe/shape.hpp",
        "csrc/device/ptx.cuh",
        "csrc/moe/kernel.cuh",
        "csrc/attention_pre/vm.cuh",
    ):
        write(tmp_path, header, "")
    write(
        tmp_path,
        "csrc/include/megamoe/config.hpp",
        "#include <cstdint>\n#include <cuda/std/cstdint>\n",
    )
    write(tmp_path, "csrc/moe/linear1.cuh", '#include "device/ptx.cuh"\n#include "kernel.cuh"\n')
    assert tree_rules.check_includes(tmp_path) == []
    write(tmp_path, name, f"\n{text}\n")
    (problem,) = tree_rules.check_includes(tmp_path)
    assert problem.startswith(f"{name}:2: ")
    assert complaint in problem


def test_sizes_of_the_tree():
    errors, _ = tree_rules.check_sizes(ROOT)
    assert errors == []


@pytest.mark.parametrize(
    ("name", "lines", "verdict"),
    [
        ("megamoe/a.py", 400, (0, 0)),
        ("megamoe/a.py", 401, (0, 1)),
        ("megamoe/a.py", 600, (0, 1)),
        ("csrc/cpu/a.hpp", 601, (1, 0)),
        ("csrc/moe/kernel.cuh", 150, (0, 0)),
        ("csrc/moe/kernel.cuh", 151, (1, 0)),
    ],
)
def test_a_long_file_is_found(tmp_path, name, lines, verdict):
    write(tmp_path, name, "\n" * lines)
    errors, warnings = tree_rules.check_sizes(tmp_path)
    assert (len(errors), len(warnings)) == verdict


def test_no_path_of_one_machine_in_the_tree():
    assert tree_rules.check_foreign_paths(ROOT) == []


@pytest.mark.parametrize("home", ["root", "home/someone", "Users/someone", "work", "mnt"])
def test_a_path_of_one_machine_is_found(tmp_path, home):
    write(tmp_path, "a.py", f"ok = 'megamoe/work/x', '/usr/root/x'\nbad = '/{home}/models'\n")
    (problem,) = tree_rules.check_foreign_paths(tmp_path)
    assert problem.startswith("a.py:2: ")


# ---------------------------------------------------------------- imports


LINT_IMPORTS = """
import os, sys
# The copy under test, not the checkout that an editable install of megamoe redirects to.
sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
from importlinter.cli import lint_imports
sys.path.insert(0, os.getcwd())
sys.exit(lint_imports(no_cache=True))
"""


@pytest.fixture
def python_tree(tmp_path):
    for package in ("megamoe", "launcher", "service"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "line", "contract"),
    [
        (None, "", None),
        ("megamoe/spec.py", "import service", "1 launcher"),
        ("megamoe/errors.py", "import megamoe.spec", "2 inside megamoe"),
        ("megamoe/unlisted.py", "", "2 inside megamoe"),
        ("service/errors.py", "import torch", "5 service"),
        ("service/errors.py", "import megamoe.weights", "5 service"),
        ("megamoe/spec.py", "import numpy", "6 specs"),
        ("megamoe/weights.py", "import megamoe.native", "7 few modules"),
    ],
)
def test_import_contracts(python_tree, name, line, contract):
    if name is not None:
        path = python_tree / name
        path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")
    result = run(sys.executable, "-c", LINT_IMPORTS, cwd=python_tree)
    broken = [text for text in result.stdout.splitlines() if text.endswith(" BROKEN")]
    if contract is None:
        assert result.returncode == 0, result.stdout + result.stderr
        assert " KEPT" in result.stdout
    else:
        assert result.returncode != 0
        assert any(text.startswith(contract) for text in broken), result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("megamoe", {"torch", "numpy", "megamoe.spec", "megamoe._native"}),
        ("service.app", {"torch", "cuda", "pynvml", "megamoe.layer", "megamoe._native"}),
    ],
)
def test_an_import_stays_light(module, absent):
    # import-linter sees neither importlib nor what megamoe/__init__.py does.
    code = f"import sys, {module}; print(*sys.modules, sep='\\n')"
    result = run(sys.executable, "-c", code, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert module in loaded
    assert loaded & absent == set()


# ---------------------------------------------------------------- build


@pytest.mark.parametrize(
    "header", sorted(path.name for path in (ROOT / "csrc/include/megamoe").glob("*.hpp"))
)
def test_a_shared_header_compiles_alone(header):
    include = f'#include "megamoe/{header}"\n'
    result = run(
        os.environ.get("CXX", "c++"),
        *("-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++", "-"),
        *("-I", ROOT / "csrc/include"),
        input=include,
    )
    assert result.returncode == 0, result.stderr


def _objects_with_an_instruction_set() -> list[Path]:
    """The objects of the newest build that hold AVX2, AVX-512 or AMX code."""
    objects = list(ROOT.glob("build/*/CMakeFiles/megamoe_cpu.dir/csrc/cpu/*_*.cpp.o"))
    objects = [
        path for path in objects if path.name.split(".")[0].endswith(("avx2", "avx512", "amx"))
    ]
    if not objects:
        return []
    newest = max(objects, key=lambda path: path.stat().st_mtime)
    return [path for path in objects if path.parent == newest.parent]


def test_code_of_an_instruction_set_does_not_leak():
    """No such object defines an inline function that the linker could choose for everybody."""
    objects = _objects_with_an_instruction_set()
    if not objects or shutil.which("nm") is None:
        pytest.skip("no objects with an instruction set, or no nm")
    for path in objects:
        symbols = run("nm", "--demangle", "--defined-only", path).stdout.splitlines()
        assert symbols, path
        shared = [line for line in symbols if line.split()[1] in {"W", "V", "u", "w", "v"}]
        # A pointer to the C++ runtime's unwinder, not code: any copy serves.
        shared = [line for line in shared if not line.split()[2].startswith("DW.ref.")]
        assert shared == [], f"{path.name}: make these static, or use an unnamed namespace"


def test_a_wheel_carries_the_kernel_sources(tmp_path):
    cmake = Path(sys.executable).with_name("cmake")
    if not cmake.exists():
        pytest.skip("no cmake beside this Python")
    environment = os.environ | {"PATH": f"{cmake.parent}{os.pathsep}{os.environ['PATH']}"}
    build = tmp_path / "build"
    nanobind = run(sys.executable, "-m", "nanobind", "--cmake_dir").stdout.strip()
    defines = ("SKBUILD=2", "SKBUILD_STATE=wheel", f"nanobind_ROOT={nanobind}")
    options = [f"-D{define}" for define in (*defines, f"Python_EXECUTABLE={sys.executable}")]
    for command in (
        [cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *options],
        [cmake, "--install", build, "--prefix", tmp_path, "--component", "kernel_sources"],
    ):
        result = run(*command, env=environment)
        assert result.returncode == 0, result.stdout + result.stderr
    installed = tmp_path / "megamoe" / "_csrc"
    found = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    csrc = ROOT / "csrc"
    # What kernels share, and every folder with a unit that is compiled at first use.
    units = {path.parent.name for path in csrc.glob("*/*.cu")}
    assert {"moe", "attention_pre"} <= units
    wanted = {
        path.relative_to(csrc)
        for folder in {"include", "device"} | units
        for path in (csrc / folder).rglob("*")
        if path.suffix in {".hpp", ".cuh", ".cu"}
    }
    assert Path("include/megamoe/config.hpp") in found
    assert found == wanted


# ---------------------------------------------------------------- the choice of an interpreter


def test_a_python_that_fails_is_passed_over(tmp_path):
    shim = tmp_path / "shims" / "python3.99"
    write(tmp_path, "shims/python3.99", "#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    good = tmp_path / "good" / "python3.99"
    good.parent.mkdir()
    good.symlink_to(Path(sys.executable).resolve())
    script = ROOT / "scripts" / "find_python.sh"
    path = f"{shim.parent}:{good.parent}:/usr/bin:/bin"

    found = run(script, "python3.99", env={"PATH": path})
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).resolve() == good.resolve()

    lost = run(script, "python3.99", env={"PATH": f"{shim.parent}:/usr/bin:/bin"})
    assert lost.returncode == 1
    assert "tried: python3.99" in lost.stderr
