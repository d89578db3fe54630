"""Binding kernels to tensors, with what needs a device replaced: the parameters of every launch."""

from __future__ import annotations

import pytest
import torch

from megamoe.attention_pre.encode import encode
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.tiling import Batch
from megamoe.backends.attention_operands import TORCH_DTYPES
from megamoe.cmp import bound as module
from megamoe.cmp.bound import BoundCmp
from megamoe.cmp.modes import MODES
from megamoe.cmp.tuning import TRIGGERS, Tuning, tuning_of
from megamoe.errors import SpecError
from megamoe.spec import ATTENTION_MODELS


@pytest.fixture
def plan():
    graph = attention_pre_graph(ATTENTION_MODELS["glm-5.2"])
    return Planner(graph, 132).plan(Batch(((8, 512), (8, 512))))


@pytest.fixture
def tensors(plan, monkeypatch):
    """Buffers without memory behind them; what would talk to the driver is left out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    loaded = module._Loaded(None, "function", 320, 1024)
    monkeypatch.setattr(module, "_load", lambda *_: loaded)
    monkeypatch.setattr(module, "_compile", lambda *_: None)
    monkeypatch.setattr(module, "check_tensor", lambda *_: None)
    monkeypatch.setattr(module, "stage_maps", lambda *_, **__: bytes(range(256)))
    return {
        name: torch.empty((), dtype=TORCH_DTYPES[buffer.dtype])
        for name, buffer in encode(plan).buffers.items()
    }


@pytest.mark.parametrize("mode", MODES)
def test_parameters_say_what_the_setting_says(mode, plan, tensors):
    tuning = tuning_of(mode)
    bound = BoundCmp(plan, tensors, tuning=tuning)
    assert len(bound.kernels) == 11
    for b in bound.kernels:
        tuned = tuning[b.kernel.name]
        assert TRIGGERS[b.params.trigger] == tuned.trigger, b.kernel.name
        assert b.priority == tuned.priority
        assert b.params.num_tokens == 16
        assert list(b.params.task) == b.kernel.task.tolist()
        pages = module._shape(b.kernel, tuned).weight_pages
        assert b.params.in_flight == min(tuned.in_flight or pages, pages), b.kernel.name
        assert not b.params.stamps
        if b.kernel.grid is not None:
            assert list(b.params.grid) == list(b.kernel.grid.words)
            assert not b.params.table
    with_maps = {b.kernel.name for b in bound.kernels if bytes(b.params.maps) != bytes(256)}
    assert with_maps >= {"B0p", "C0", "B1p", "D1p", "D0", "D2", "E1"}
    assert not with_maps & {"A0", "B0f"}


def test_one_like_another_has_its_kernels_on_other_tensors(plan, tensors):
    first = BoundCmp(plan, tensors, tuning={"D2": Tuning(columns=128)})
    others = {name: torch.empty_like(t) for name, t in tensors.items()}
    second = BoundCmp(plan, others, tuning={"D2": Tuning(columns=128)}, like=first)
    assert [b.kernel for b in second.kernels] == [b.kernel for b in first.kernels]
    for a, b in zip(first.kernels, second.kernels, strict=True):
        assert list(a.params.operands) != list(b.params.operands), a.kernel.name
    assert second.edges == first.edges


def test_a_delay_is_of_a_kernel_that_is_there(plan, tensors):
    bound = BoundCmp(plan, tensors)
    bound.delay("D0", 2.5)
    assert {b.kernel.name: b.params.delay_ns for b in bound.kernels if b.params.delay_ns} == {
        "D0": 2500
    }
    with pytest.raises(SpecError, match="no kernel 'D9'"):
        bound.delay("D9", 1)
