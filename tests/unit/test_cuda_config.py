"""What a GPU layer is opened with where its rings, wave and lag are left open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe.backends.cuda_build import cuda_config
from megamoe.errors import CapacityError
from megamoe.spec import MODELS, EpConfig, MoESpec


def chosen(model: str, ranks: int, tokens: int, **fields: int) -> EpConfig:
    spec = replace(MODELS[model], num_shared=0)
    return cuda_config(spec, EpConfig(num_ranks=ranks, max_tokens=tokens, **fields))


@pytest.mark.parametrize(
    ("model", "ranks", "tokens", "blocks"),
    [
        # Measured: the short ring up to 64 rows per expert, the long one beyond.
        ("deepseek-v3", 2, 128, 24),
        ("deepseek-v3", 2, 1024, 24),
        ("deepseek-v3", 2, 1025, 64),
        ("deepseek-v3", 2, 8192, 64),
        ("deepseek-v3", 8, 1024, 64),  # 256 rows per expert
        ("v4-flash", 2, 1024, 24),
        ("v4-flash", 2, 4096, 64),
        # 6 Linear 1 tiles a block: 24 blocks would hold no more than one tile for each SM.
        ("qwen3-30b", 2, 128, 64),
    ],
)
def test_rings_by_rows_per_expert(model, ranks, tokens, blocks):
    config = chosen(model, ranks, tokens)
    assert (config.ring_l1_blocks, config.ring_l2_blocks) == (blocks, blocks)
    assert config.wave_blocks + config.l2_lag_blocks <= blocks


@pytest.mark.parametrize(
    ("model", "ranks", "tokens", "block_m"),
    [
        # Measured: 7 % faster with tails at 128 rows per expert; nothing gained at the others.
        ("deepseek-v3", 2, 2048, 144),
        ("v4-pro", 2, 4096, 144),
        ("deepseek-v3", 4, 1024, 144),
        ("deepseek-v3", 2, 1024, 128),
        ("deepseek-v3", 2, 4096, 128),
        ("deepseek-v3", 2, 8192, 128),
        ("v4-flash", 2, 4096, 128),
        ("v4-flash", 2, 8192, 128),
        ("v4-flash", 2, 1, 128),
        ("deepseek-v3", 72, 1 << 20, 128),
    ],
)
def test_tails_where_they_pay(model, ranks, tokens, block_m):
    spec = replace(MODELS[model], num_shared=0)
    if ranks == 72:
        spec = replace(spec, num_experts=288)
    assert cuda_config(spec, EpConfig(num_ranks=ranks, max_tokens=tokens)).block_m == block_m


@pytest.mark.parametrize(
    ("model", "ranks", "tokens", "wave"),
    [
        # Uniform routing fills 1, 2, 3, 5 and 18 blocks of a busy expert; 16 is the most.
        ("deepseek-v3", 2, 1024, 1),
        ("v4-flash", 2, 4096, 4),
        ("deepseek-v3", 2, 4096, 6),
        ("deepseek-v3", 2, 8192, 10),
        ("deepseek-v3", 8, 8192, 16),
        ("v4-pro", 2, 4096, 4),  # blocks with tails
    ],
)
def test_waves_have_room_for_skew(model, ranks, tokens, wave):
    """Measured at DeepSeek-V3, two ranks, 4096 tokens that all go to one of them: 6 against 3."""
    assert chosen(model, ranks, tokens).wave_blocks == wave


def test_room_for_skew_leaves_linear_2_its_lag():
    config = chosen("deepseek-v3", 2, 8192, ring_l1_blocks=10, ring_l2_blocks=10)
    assert (config.wave_blocks, config.l2_lag_blocks) == (5, 5)


def test_no_ring_is_longer_than_a_call():
    spec = MoESpec(hidden=128, inter=128, num_experts=8, topk=1)
    open_config = EpConfig(num_ranks=1, max_tokens=3)
    assert cuda_config(spec, open_config).ring_l1_blocks == open_config.max_blocks(spec) == 3


def test_fields_that_are_set_stay():
    config = chosen("v4-flash", 2, 64, ring_l1_blocks=40, wave_blocks=2, l2_lag_blocks=3)
    assert (config.ring_l1_blocks, config.wave_blocks, config.l2_lag_blocks) == (40, 2, 3)
    assert config.ring_l2_blocks == 24
    with pytest.raises(CapacityError, match="wave_blocks"):
        chosen("v4-flash", 2, 64, wave_blocks=25)
