"""Which rows a GPU call is told to stage, without a GPU: the session's own bookkeeping."""

from __future__ import annotations

import pytest
import torch

from megamoe.backends.cuda import CudaSession
from megamoe.backends.cuda_build import MoEParams
from megamoe.spec import MoESpec

SPEC = MoESpec(hidden=256, inter=128, num_experts=4, topk=2)


@pytest.fixture
def session():
    """A session of no group, whose window holds no rows."""
    made = CudaSession.__new__(CudaSession)
    made._spec, made._params, made._events, made._staged = SPEC, MoEParams(), None, None
    made._faulted = made._broken = None
    made._closed = False
    made._own_rows, made._own_addresses = (0, 0), range(0)
    return made


def told(session: CudaSession, x: torch.Tensor, scale: torch.Tensor | None):
    """The tensors that the kernel would read, after comparing their addresses."""
    session.stage(x, scale)
    rows, scales = session._staged
    assert session._params.stage_x == rows.data_ptr()
    assert session._params.stage_scale == (0 if scales is None else scales.data_ptr())
    assert session._params.stage_is_bf16 == (scale is None)
    assert torch.equal(rows, x)
    assert rows.is_contiguous()
    return rows, scales


def test_rows_are_read_where_they_are(session):
    x = torch.randn(5, 256).bfloat16()
    assert told(session, x, None)[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("shift", [1, 4, 7])
def test_rows_between_the_loads_are_moved(session, shift):
    """The kernel loads 16 bytes at a time: rows that begin elsewhere are copied."""
    x = torch.randn(5 * 256 + 8).bfloat16()[shift : shift + 5 * 256].view(5, 256)
    assert x.is_contiguous()
    assert x.data_ptr() % 16
    assert told(session, x, None)[0].data_ptr() % 16 == 0


def test_columns_of_a_wider_tensor_and_their_scales_are_gathered(session):
    codes = torch.randn(5, 512).to(torch.float8_e4m3fn)[:, 256:]
    scale = torch.rand(2, 5).t()
    _, scales = told(session, codes.view(torch.uint8), scale)
    assert scales.is_contiguous()
    assert torch.equal(scales, scale)


def test_rows_of_the_window_stay(session):
    x, scale = torch.zeros(5, 256, dtype=torch.uint8), torch.ones(5, 2)
    session._own_rows = (x.data_ptr(), scale.data_ptr())
    session.stage(x, scale)
    assert session._params.stage_x == 0
    told(session, x, scale.clone())


def test_other_rows_of_the_window_are_copied_first(session):
    """The kernel would write row 2 of the window while it still reads token 0 there."""
    window, scales = torch.randn(8, 256).to(torch.float8_e4m3fn), torch.rand(8, 2)
    session._own_rows = window.data_ptr(), scales.data_ptr()
    session._own_addresses = range(window.data_ptr(), window.data_ptr() + window.numel())
    codes = window.view(torch.uint8)[2:7]
    rows, _ = told(session, codes, scales[2:7])
    assert rows.data_ptr() not in session._own_addresses
