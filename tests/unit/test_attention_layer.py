"""The attention-pre layer on the CPU: a call against the oracle, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from megamoe.attention_layer import AttentionPre, open_attention_pre
from megamoe.attention_pre.tiling import Batch
from megamoe.errors import BackendUnavailable, CapacityError, InputError, SpecError
from megamoe.reference.attention_pre import AttentionPreOracle
from tests.attention import SMALL, AttentionCase

BATCH = Batch(((4, 300), (1, 1), (3, 70)))
PAGES = 8


def case() -> AttentionCase:
    return AttentionCase(SMALL, BATCH)


def opened() -> AttentionPre:
    return open_attention_pre(SMALL, case().weights(), num_pages=PAGES, engine="oracle")


def arguments() -> dict:
    inputs = case().inputs()
    return {
        "x": inputs["x"],
        "residual": inputs["residual"],
        "new_tokens": [n for n, _ in BATCH.requests],
        "context_lens": [m for _, m in BATCH.requests],
        "block_table": inputs["block_table"],
    }


def test_a_call_makes_what_the_oracle_makes():
    inputs = case().inputs()
    layer = opened()
    layer.latent_cache[: len(inputs["latent_cache"])] = inputs["latent_cache"]
    layer.index_cache[: len(inputs["index_cache"])] = inputs["index_cache"]
    out = layer.run(**arguments())
    detail = AttentionPreOracle(SMALL, case().weights()).run(inputs, [n for n, _ in BATCH.requests])
    assert torch.equal(out.residual.double(), detail.residual)
    assert torch.equal(out.queries.double(), detail.queries)
    assert torch.equal(out.absorbed.double(), detail.absorbed)
    assert torch.equal(layer.index_cache[: len(inputs["index_cache"])], inputs["index_cache"])
    assert torch.equal(layer.latent_cache[: len(inputs["latent_cache"])], inputs["latent_cache"])
    row = 0
    for (new, length), scores in zip(BATCH.requests, detail.scores, strict=True):
        found = out.logits[row : row + new]
        torch.testing.assert_close(found[:, :length], scores.float(), rtol=0, atol=0)
        assert (found[:, length:] == -torch.inf).all()
        row += new


def test_a_second_step_sees_the_keys_of_the_first():
    """Two calls of one token each score like one call of two, on the keys both can see."""
    g = torch.Generator().manual_seed(4)
    x, residual = (torch.randn(2, SMALL.hidden, generator=g).bfloat16() for _ in range(2))
    table = torch.tensor([[3]], dtype=torch.int32)
    both, apart = opened(), opened()
    together = both.run(x, residual, new_tokens=[2], context_lens=[2], block_table=table)
    for i in range(2):
        out = apart.run(
            x[i : i + 1],
            residual[i : i + 1],
            new_tokens=[1],
            context_lens=[i + 1],
            block_table=table,
        )
        torch.testing.assert_close(out.logits[0], together.logits[i], rtol=0, atol=0)
    assert torch.equal(both.index_cache, apart.index_cache)
    assert both.index_cache[3].any()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(8, 64, dtype=torch.bfloat16)}, InputError, "x is"),
        ({"x": torch.zeros(8, SMALL.hidden)}, InputError, "x is"),
        ({"new_tokens": [8, 1]}, InputError, "one of each per request"),
        ({"new_tokens": [1.9, 1.9, 1.9]}, InputError, "whole numbers"),
        (
            {"block_table": torch.zeros(3, 8, dtype=torch.int32), "context_lens": [300] * 3},
            InputError,
            "same place",
        ),
        ({"new_tokens": [4, 2, 2]}, InputError, "request 1 has 2 new tokens"),
        ({"context_lens": [300, 1, 10**6]}, CapacityError, "rotation table"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, CapacityError, "4 columns"),
        ({"block_table": torch.full((3, 8), 8, dtype=torch.int32)}, InputError, "page 8"),
        ({"block_table": torch.zeros(3, 8)}, InputError, "block_table is"),
        ({"positions": torch.full((8,), -1, dtype=torch.int32)}, InputError, "positions holds -1"),
    ],
)
def test_refuses(change, error, words):
    with pytest.raises(error, match=words):
        opened().run(**{**arguments(), **change})


def test_opening_refuses():
    weights = case().weights()
    with pytest.raises(SpecError, match="engine = 'fast'"):
        open_attention_pre(SMALL, weights, num_pages=1, engine="fast")  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="num_pages = 0"):
        open_attention_pre(SMALL, weights, num_pages=0)
    less = {n: t for n, t in weights.items() if n != "w_uk"}
    with pytest.raises(SpecError, match="no weight w_uk"):
        open_attention_pre(SMALL, less, num_pages=1)
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable, match="Hopper"):
            open_attention_pre(SMALL, weights, num_pages=1, engine="cmp")


@pytest.mark.parametrize("name", case().weights())
def test_a_weight_of_another_shape_or_dtype_is_refused(name):
    weights = case().weights()
    right = weights[name]
    bad = [right.float().double(), right[..., :-1].contiguous(), right[None]]
    if name != "rope_table":  # any number of positions
        bad.append(right[:-1].contiguous())
    for wrong in bad:
        with pytest.raises(SpecError, match=f"weight {name} is torch"):
            open_attention_pre(SMALL, {**weights, name: wrong}, num_pages=1, engine="oracle")


@pytest.mark.parametrize("pages", [True, 1.5, "4", None, 1 << 40])
def test_pages_are_a_number_that_can_be(pages):
    with pytest.raises(CapacityError, match="num_pages = "):
        open_attention_pre(SMALL, case().weights(), num_pages=pages, engine="oracle")


def test_a_closed_layer_says_so():
    layer = opened()
    layer.close()
    layer.close()
    with pytest.raises(InputError, match="the layer is closed"):
        layer.run(**arguments())
