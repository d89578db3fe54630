"""The service's router: the same routes for a token in any place and company."""

from __future__ import annotations

import pytest
import torch

from launcher.serving.routing import CHUNK_CPU, SteadyRouter
from megamoe.router import Router


def router(experts: int = 64, hidden: int = 512, **more) -> Router:
    weight = torch.randn(experts, hidden, generator=torch.Generator().manual_seed(3))
    return Router(weight=weight, topk=4, scoring="softmax", logits_fp32=True, **more)


def tokens(n: int, hidden: int = 512) -> torch.Tensor:
    return torch.randn(n, hidden, generator=torch.Generator().manual_seed(4)).bfloat16()


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_neighbours_and_places_do_not_matter(chunk):
    steady = SteadyRouter(router(), "cpu", chunk)
    assert steady.chunk == (chunk or CHUNK_CPU)
    x = tokens(37)
    ids, weights = steady(x)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for rows in ([5], [36, 0, 5, 5], list(range(36, -1, -1))):
        some_ids, some_weights = steady(x[rows])
        assert torch.equal(some_ids, ids[rows])
        assert torch.equal(some_weights, weights[rows])
    empty, _ = steady(x[:0])
    assert empty.shape == (0, 4)


def test_routes_are_the_routers():
    x = tokens(37)
    want_ids, want = router()(x)
    ids, weights = SteadyRouter(router(), "cpu")(x)
    assert torch.equal(ids, want_ids.int())
    # A sum of K products in any order is off by K * 2**-24 of the sum of their sizes; a weight is a
    # quotient of exponentials of two such logits.
    sizes = x.abs().double() @ router().weight.abs().double().T
    bound = 2 * x.shape[1] * 2**-24 * float(sizes.max())
    assert bound < 0.05
    assert torch.allclose(weights, want, rtol=bound, atol=0)


def test_where_the_place_matters_tokens_go_one_at_a_time(monkeypatch):
    plain = Router.__call__

    def uneven(self, x):
        ids, weights = plain(self, x)
        return ids, weights + torch.arange(len(x))[:, None] * 1e-7

    monkeypatch.setattr(Router, "__call__", uneven)
    steady = SteadyRouter(router(), "cpu")
    assert steady.chunk == 1
    x = tokens(9)
    ids, weights = steady(x)
    again, weights_again = steady(x[4:5])
    assert torch.equal(ids[4:5], again)
    assert torch.equal(weights[4:5], weights_again)
