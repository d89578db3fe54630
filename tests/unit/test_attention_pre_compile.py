"""The attention-pre kernel compiles without a GPU: no spills, wgmma in flight, in its budget."""

from __future__ import annotations

import struct
from ctypes import sizeof

import pytest

from launcher.probe_pages import _Params, compile_probe
from megamoe.attention_pre.graphs import attention_pre_graph, dense_mlp_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.tiling import Batch, Specialization
from megamoe.backends.attention import _AttentionParams, compile_attention, spec_macro
from megamoe.errors import SpecError
from megamoe.spec import ATTENTION_MODELS
from tests.attention import SMALL

GLM = ATTENTION_MODELS["glm-5.2"]


def specs_of(graph, batch, **options):
    planner = Planner(graph, 132, **options)
    planner.plan(batch)
    return planner.specializations


def code_bytes(image):
    """Machine code of an ELF file: its executable sections."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    return sum(section[5] for section in sections if section[2] & 4)


def batch_of(rows):
    return Batch(tuple((min(rows, 8), 8192) for _ in range(max(1, rows // 8))))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 128])
def test_every_band_fits_registers_and_shared_memory(rows):
    cubin = compile_attention(specs_of(attention_pre_graph(GLM), batch_of(rows)))
    used = cubin.resources()["megamoe_attention_pre"]
    assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), used
    assert cubin.warnings() == []
    # 384 threads share 65,536 registers at launch; then math takes from the other roles.
    assert used.registers <= 168
    assert cubin.constant("megamoe_attention_shared_bytes") <= 232448
    assert cubin.constant("megamoe_attention_param_bytes") == sizeof(_AttentionParams)
    pages = [cubin.constant(f"megamoe_attention_{pool}_pages") for pool in ("weight", "input")]
    assert sum(pages) == 13
    assert cubin.constant("megamoe_attention_slots") >= 2
    # Beyond an SM's instruction cache every body is slower: 205 KB took 4 µs more than 121 KB.
    assert code_bytes(cubin.image) <= (128 if rows == 16 else 134) << 10


@pytest.mark.slow
def test_narrow_bands_may_leave_a_page_to_weights():
    cubin = compile_attention(specs_of(attention_pre_graph(GLM), batch_of(1)), input_pages=2)
    assert cubin.resources()["megamoe_attention_pre"].spill_stores == 0
    assert cubin.warnings() == []
    assert cubin.constant("megamoe_attention_weight_pages") == 11
    assert cubin.constant("megamoe_attention_shared_bytes") <= 232448


@pytest.mark.slow
def test_a_small_layer_compiles_with_traces():
    specs = specs_of(attention_pre_graph(SMALL), Batch(((4, 300), (3, 70))), final="last")
    assert compile_attention(specs, trace=True).warnings() == []


def test_a_graph_of_another_model_compiles():
    cubin = compile_attention(specs_of(dense_mlp_graph(512, 384), Batch(((13, 13),))))
    assert cubin.resources()["megamoe_attention_pre"].spill_stores == 0


def test_refuses_what_has_no_body():
    shape = (("heads", 4),)
    with pytest.raises(SpecError, match="4 index heads"):
        spec_macro([Specialization("index_score", 4, 256, 128, 128, 128, shape)])
    wide = Specialization(
        "absorb_query", 16, 512, 192, 512, 192, (("head_dim", 256), ("heads", 64))
    )
    with pytest.raises(SpecError, match="512 columns"):
        spec_macro([wide])


def test_the_probe_of_page_rates_compiles_and_agrees_on_its_parameters():
    cubin = compile_probe()
    assert cubin.resources()["megamoe_page_rate"].spill_stores == 0
    assert cubin.constant("megamoe_page_rate_param_bytes") == sizeof(_Params)
