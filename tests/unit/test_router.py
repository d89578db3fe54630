"""Routers against the modules of the installed transformers: same ids, same bits of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe.errors import InputError, SpecError
from megamoe.router import (
    Router,
    deepseek_v4_router,
    mixtral_router,
    qwen_router,
    sigmoid_router,
)

transformers = pytest.importorskip("transformers")

HIDDEN, EXPERTS, TOKENS = 128, 64, 300

# module, class, configuration, our builder
SIGMOID = [
    ("deepseek_v3", "DeepseekV3TopkRouter"),
    ("deepseek_v32", "DeepseekV32TopkRouter"),
    ("glm_moe_dsa", "GlmMoeDsaTopkRouter"),
    ("glm4_moe", "Glm4MoeTopkRouter"),
]
SIGMOID_SETTINGS = [
    {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    {"n_group": 8, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    {"n_group": 4, "topk_group": 4, "norm_topk_prob": False, "routed_scaling_factor": 16.0},
]


def _module(family, name):
    package = __import__(f"transformers.models.{family}", fromlist=[family])
    modeling = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name])
    config_name = name.removesuffix("TopkRouter").removesuffix("TopKRouter") + "Config"
    return getattr(modeling, name), getattr(package, config_name)


def _hidden(dtype, seed=1):
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _randomise(module):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / HIDDEN**0.5)
        for name, buffer in module.named_buffers():
            if "bias" in name:
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return module


def _assert_same(router, module, x):
    _, want_weight, want_ids = module(x)
    ids, weight = router(x)
    assert ids.dtype == torch.int64
    assert weight.dtype == torch.float32
    different = (ids != want_ids).nonzero()
    assert not len(different), (different[0], ids[different[0][0]], want_ids[different[0][0]])
    different = (weight != want_weight.float()).nonzero()
    assert not len(different), (different[0], weight[different[0][0]], want_weight[different[0][0]])


@pytest.mark.parametrize("settings", SIGMOID_SETTINGS, ids=str)
@pytest.mark.parametrize(("family", "name"), SIGMOID, ids=lambda v: v)
def test_sigmoid_routers(family, name, settings):
    module_type, config_type = _module(family, name)
    config = config_type(
        hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=8, **settings
    )
    module = _randomise(module_type(config))
    router = sigmoid_router(config.to_dict(), module.weight, module.e_score_correction_bias)
    for dtype in (torch.bfloat16, torch.float32):
        _assert_same(router, module, _hidden(dtype))


@pytest.mark.parametrize("normalise", [True, False])
def test_qwen3_router(normalise):
    module_type, config_type = _module("qwen3_moe", "Qwen3MoeTopKRouter")
    config = config_type(
        hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=8, norm_topk_prob=normalise
    )
    for dtype in (torch.bfloat16, torch.float32):
        module = _randomise(module_type(config)).to(dtype)
        router = qwen_router(config.to_dict(), module.weight, None)
        _assert_same(router, module, _hidden(dtype))


def test_mixtral_router():
    module_type, config_type = _module("mixtral", "MixtralTopKRouter")
    config = config_type(hidden_size=HIDDEN, num_local_experts=8, num_experts_per_tok=2)
    for dtype in (torch.bfloat16, torch.float32):
        module = _randomise(module_type(config)).to(dtype)
        router = mixtral_router(config.to_dict(), module.weight, None)
        _assert_same(router, module, _hidden(dtype))


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid"])
def test_deepseek_v4_router(scoring):
    module_type, config_type = _module("deepseek_v4", "DeepseekV4TopKRouter")
    config = config_type(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=6,
        routed_scaling_factor=1.5,
        scoring_func=scoring,
    )
    for dtype in (torch.bfloat16, torch.float32):
        module = _randomise(module_type(config))
        module.weight.data = module.weight.data.to(dtype)
        router = deepseek_v4_router(config.to_dict(), module.weight, module.e_score_correction_bias)
        _assert_same(router, module, _hidden(dtype))


# ---------------------------------------------------------------- properties, without transformers


def _router(**more):
    weight = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(2)) / HIDDEN**0.5
    return Router(**({"weight": weight, "topk": 4, "scoring": "sigmoid"} | more))


def test_groups_limit_the_choice():
    router = _router(num_groups=4, groups_kept=2, logits_fp32=True)
    ids, _ = router(_hidden(torch.bfloat16))
    assert max(len(set((row // 4).tolist())) for row in ids) == 2


def test_a_bias_moves_the_choice_and_not_the_weights():
    plain = _router(normalise=False)
    bias = torch.zeros(16)
    bias[5] = 10
    ids, weight = replace(plain, bias=bias)(_hidden(torch.float32))
    assert bool((ids == 5).any(1).all())
    scores = (_hidden(torch.float32) @ plain.weight.T).sigmoid()
    torch.testing.assert_close(weight, scores.gather(1, ids), rtol=1e-5, atol=1e-6)


def test_no_tokens():
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        ids, weight = _router(scoring=scoring)(torch.zeros(0, HIDDEN))
        assert ids.shape == weight.shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 17}, "topk = 17: must be in 1..16"),
        ({"num_groups": 3}, "num_groups = 3 does not divide 16"),
        ({"num_groups": 4, "groups_kept": 5}, "groups_kept = 5: must be in 1..4"),
        ({"num_groups": 16, "groups_kept": 8}, "fewer than 2 experts cannot be ranked"),
        ({"num_groups": 8, "groups_kept": 1}, "topk = 4: must be in 1..2"),
        ({"scoring": "tanh"}, "scoring = 'tanh'"),
        ({"bias": torch.zeros(3)}, r"bias has shape \(3,\): want \[16\]"),
        ({"weight": torch.zeros(3)}, r"weight has shape \(3,\)"),
    ],
)
def test_contradictions_are_named(change, message):
    with pytest.raises(SpecError, match=message):
        _router(**change)


def test_wrong_input_is_named():
    with pytest.raises(InputError, match=r"\(5, 64\): want \[T, 128\]"):
        _router()(torch.zeros(5, 64))
