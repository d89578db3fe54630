"""The standalone kernels compile without a GPU: no spills, in their budget, no early load.

The compiler may move loads. What producers store must not be read before ``griddepcontrol.wait``
on any path: checked in the PTX always, and in the machine code where nvdisasm is found.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from megamoe import jit
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.tiling import Batch
from megamoe.cmp.bound import _CmpParams
from megamoe.cmp.kernels import (
    compile_kernel,
    kernel_defines,
    kernel_shape,
    standalone_kernels,
)
from megamoe.cmp.tuning import tuning_of
from megamoe.errors import SpecError
from megamoe.spec import ATTENTION_MODELS
from tests.attention import SMALL

GLM = ATTENTION_MODELS["glm-5.2"]
NAMES = ["A0", "B0p", "B0f", "C0", "B1p", "B1f", "D1p", "D1f", "D0", "D2", "E1"]
SM_REGISTERS, SM_SHARED, CTA_RESERVED = 65536, 233472, 1024


def batch_of(rows):
    return Batch(tuple((min(rows, 8), 8192) for _ in range(max(1, rows // 8))))


@cache
def kernels(rows):
    return standalone_kernels(plan_of(rows))


@cache
def plan_of(rows):
    return Planner(attention_pre_graph(GLM), 132).plan(batch_of(rows))


def tuned_kernels(mode, rows):
    """Kernels and their shapes as a kind of graph runs them."""
    tuning = tuning_of(mode)
    made = []
    columns = {n: t.columns for n, t in tuning.items()}
    for k in standalone_kernels(plan_of(rows), columns, {n: t.rows for n, t in tuning.items()}):
        t = tuning[k.name]
        shape = kernel_shape(k, t.weight_pages, t.ctas, t.at_once, t.registers)
        made.append((k, shape))
    return made


def kernel(name, rows=16):
    return next(k for k in kernels(rows) if k.name == name)


def cubin(found, wait="late"):
    return compile_kernel(found.specialization, found.part, kernel_shape(found), wait=wait)


# ------------------------------------------------------------ paths


def early_loads(
    lines: list[str],
    label: Callable[[str], str | None],
    target: Callable[[str], str | None],
    is_load: Callable[[str], bool],
    is_wait: Callable[[str], bool],
    ends: Callable[[str], bool],
) -> list[str]:
    """Loads that some path from the first line reaches without passing a wait."""
    at = {name: i for i, line in enumerate(lines) if (name := label(line))}
    seen: set[int] = set()
    found: set[int] = set()
    todo = [0]
    while todo:
        i = todo.pop()
        while i < len(lines) and i not in seen:
            seen.add(i)
            line = lines[i]
            if is_load(line):
                found.add(i)
            if is_wait(line):
                break
            to = target(line)
            if to is not None and to in at:
                todo.append(at[to])
            if ends(line):
                break
            i += 1
    return [lines[i].strip() for i in sorted(found)]


def ptx_early_loads(text: str) -> list[str]:
    """In PTX. What producers store is read by ld.global.cg or by box; constants by ld.global.nc."""
    body = text[text.index(".entry megamoe_cmp") :]
    lines = [line for line in body.splitlines() if line.strip()]
    return early_loads(
        lines,
        label=lambda s: m.group(1) if (m := re.match(r"^(\$L\w+):", s)) else None,
        target=lambda s: (
            m.group(1) if (m := re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", s)) else None
        ),
        is_load=lambda s: (
            bool(re.search(r"\bld(\.volatile|\.relaxed|\.acquire)?(\.gpu)?\.global", s))
            and ".nc" not in s
        ),
        is_wait=lambda s: "griddepcontrol.wait" in s,
        ends=lambda s: bool(re.match(r"^\s*(bra(\.uni)?\s|ret;|exit;|trap;)", s)),
    )


def sass_early_loads(text: str) -> list[str]:
    """In machine code. ACQBULK is the wait, LDG.CONSTANT a load of what never changes."""
    lines = [s for s in text.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", s) or s[:1] == "."]
    lines = lines[next(i for i, s in enumerate(lines) if "/*0000*/" in s) :]
    return early_loads(
        lines,
        label=lambda s: m.group(1) if (m := re.match(r"^(\.L_x_\w+):", s)) else None,
        target=lambda s: (
            m.group(1)
            if (m := re.search(r"\b(?:BRA|BREAK|WARPSYNC|CALL)\b.*`\((\.L_x_\w+)\)", s))
            else None
        ),
        is_load=lambda s: bool(re.search(r"\bLDG?\.E", s)) and "CONSTANT" not in s,
        is_wait=lambda s: "ACQBULK" in s and "@" not in s,
        ends=lambda s: bool(re.search(r"\*/\s+(BRA(\.U)? [^,]*;|EXIT ;|BRX|RET)", s)),
    )


@cache
def ptx(name, wait="late"):
    found = kernel(name)
    return jit.compile_ptx(
        "cmp/cmp.cu", kernel_defines(found.specialization, found.part, kernel_shape(found), wait)
    )


def nvdisasm() -> str | None:
    """Where NVIDIA's disassembler is, from the environment, the path, or its wheel."""
    if chosen := os.environ.get("NVDISASM"):
        return chosen
    if on_path := shutil.which("nvdisasm"):
        return on_path
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob("*/bin/nvdisasm"):
            return str(path)
    return None


def sass(found, tmp_path, wait="late"):
    tool = nvdisasm()
    if tool is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm, or name it in NVDISASM")
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin(found, wait).image)
    done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_ptx_reads_nothing_early(name):
    text = ptx(name)
    assert "griddepcontrol.wait" in text
    assert "griddepcontrol.launch_dependents" in text
    # A0's norm weights are read by loads that stay where they are: one a pass.
    assert len(ptx_early_loads(text)) == (3 if name == "A0" else 0)


@pytest.mark.parametrize("name", ["B0p", "B0f", "D1f", "E1"])
def test_a_kernel_without_its_wait_is_seen_in_ptx(name):
    assert ptx_early_loads(ptx(name, "never")) != []


@pytest.mark.parametrize("name", NAMES)
def test_machine_code_reads_nothing_early(name, tmp_path):
    text = sass(kernel(name), tmp_path)
    assert "ACQBULK" in text
    assert "PREEXIT" in text
    if name != "A0":
        assert sass_early_loads(text) == []


@pytest.mark.parametrize("name", ["B0p", "D1f", "E1"])
def test_a_kernel_without_its_wait_is_seen_in_machine_code(name, tmp_path):
    assert sass_early_loads(sass(kernel(name), tmp_path, "never")) != []


# ------------------------------------------------------------ resources


@pytest.mark.parametrize("rows", [1, 16, 24, 64, 128])
@pytest.mark.parametrize("mode", ["single_stream", "branches", "branches_pdl"])
def test_registers_and_shared_memory(mode, rows):
    found = tuned_kernels(mode, rows)
    assert [k.name for k, _ in found] == NAMES
    for k, shape in found:
        unit = compile_kernel(k.specialization, k.part, shape)
        used = unit.resources()["megamoe_cmp"]
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), (k.name, used)
        assert unit.warnings() == [], k.name
        threads = unit.constant("megamoe_cmp_threads")
        registers = -(-used.registers // 8) * 8 * threads * shape.ctas
        assert registers <= SM_REGISTERS, (k.name, used.registers, threads, shape)
        shared = unit.constant("megamoe_cmp_shared_bytes") + CTA_RESERVED
        assert shared <= SM_SHARED, (k.name, shared)


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("mode", ["single_stream", "branches", "branches_pdl"])
def test_parameters_are_the_host_s(mode, trace):
    """Size and last field of every kernel's parameters, as ``megamoe/cmp/bound.py`` fills them."""
    for k, shape in tuned_kernels(mode, 16):
        unit = compile_kernel(k.specialization, k.part, shape, trace=trace)
        assert unit.constant("megamoe_cmp_param_bytes") == ctypes.sizeof(_CmpParams), k.name
        assert unit.constant("megamoe_cmp_last_param_at") == _CmpParams.in_flight.offset, k.name


def test_a_consumer_fits_beside_its_producer():
    """At 16 rows, as the layer runs them: whoever begins early needs room on the same SM."""
    size = {}
    for k, shape in tuned_kernels("branches_pdl", 16):
        unit = compile_kernel(k.specialization, k.part, shape)
        size[k.name] = unit.constant("megamoe_cmp_shared_bytes") + CTA_RESERVED
    pairs = [("A0", "B0p"), ("B0p", "B0f"), ("B0p", "D1p"), ("B0f", "D0"), ("D1p", "D1f")]
    pairs += [("D1p", "D0"), ("D0", "E1")]  # D2 in CTAs that fit beside D0 was no faster
    for producer, consumer in pairs:
        assert size[producer] + size[consumer] <= SM_SHARED, (producer, consumer, size)


def test_a_stage_that_is_not_split_reads_nothing_early():
    """A small layer's D1 reads the gate beside its pages."""
    plan = Planner(attention_pre_graph(SMALL), 132).plan(batch_of(16))
    found = next(k for k in standalone_kernels(plan) if k.name == "D1")
    shape = kernel_shape(found)
    defines = kernel_defines(found.specialization, found.part, shape, "late")
    assert ptx_early_loads(jit.compile_ptx("cmp/cmp.cu", defines)) == []
    defines = kernel_defines(found.specialization, found.part, shape, "never")
    assert ptx_early_loads(jit.compile_ptx("cmp/cmp.cu", defines)) != []


def test_tasks_follow_from_the_number():
    """Only scores of requests that differ need a table."""
    for rows in (1, 16, 64, 128, 24):
        found = [k for k, _ in tuned_kernels("branches_pdl", rows)]
        assert [k.name for k in (*kernels(rows), *found) if k.table is not None] == [], rows
    ragged = Planner(attention_pre_graph(GLM), 132).plan(Batch(((8, 8192), (3, 70))))
    assert [k.name for k in standalone_kernels(ragged) if k.table is not None] == ["E1"]


@pytest.mark.parametrize("batch", [((8, 8192),) * 3, ((5, 2049),), ((1, 300),) * 4])
def test_scores_of_requests_that_are_alike_lie_on_a_grid(batch):
    """Each CTA's task against the planner's: what the kernel works out has a twin in Python."""
    plan = Planner(attention_pre_graph(GLM), 132).plan(Batch(batch))
    scores = next(k for k in standalone_kernels(plan) if k.name == "E1")
    tiles = next(t for t in plan.graph.stages if t.row == "E1").tiles
    assert math.prod(scores.launch) == scores.ctas == len(tiles)
    for cta, tile in enumerate(tiles):
        made = scores.grid.fields(cta, 0, {"has_new_keys": 1})
        expected = dict(tile.fields) | {"flags": int("has_new_keys" in tile.flags)}
        assert made == {name: expected[name] for name in made}, cta


def test_rows_finished_by_the_last_part_have_no_kernel():
    plan = Planner(attention_pre_graph(SMALL), 132, final="last").plan(batch_of(16))
    with pytest.raises(SpecError, match='final="rows"'):
        standalone_kernels(plan)


@pytest.mark.parametrize(("count", "rows"), [(0, 24), (2, 24), (8, 24), (8, 16), (2, 1), (4, 128)])
def test_finishers_of_few_rows_finish_every_row_once(count, rows):
    found = standalone_kernels(plan_of(rows), {}, {"B1f": count, "D1f": count})
    for k in (k for k in found if k.name in ("B1f", "D1f")):
        tasks = [k.grid.fields(cta, 0, {"has_rope": 0}) for cta in range(k.ctas)]
        assert max(t["rows"] for t in tasks) <= (count or 16)
        done = [(t["col"], t["row"] + i) for t in tasks for i in range(t["rows"])]
        columns = range(0, 128 if k.name == "B1f" else 4096, 128)
        assert sorted(done) == [(col, row) for col in columns for row in range(rows)]
