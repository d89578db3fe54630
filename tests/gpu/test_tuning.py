"""A search on a GPU: every candidate gives the recommendation's bits, and times are real."""

from __future__ import annotations

import pytest

from launcher.ranks import Group
from launcher.tuner import TuneOptions, tune
from megamoe.spec import MoESpec

pytestmark = pytest.mark.gpu


def test_all_candidates_give_the_same_bits():
    options = TuneOptions(
        spec=MoESpec(hidden=256, inter=128, num_experts=16, topk=4, swiglu_clamp=10.0),
        max_tokens=512,
        tokens=[1, 512],
        routing="zipf:1.2",
        workers=0,
        backend="cuda",
        margin=0.02,
        rounds=1,
        calls=2,
        seed=5,
    )
    found = tune(Group(0, 1, "cuda:0"), options)
    trials = found["trials"]
    assert len(trials) >= 6
    assert {t.config.block_m for t in trials} >= {32, 64}
    for trial in trials:
        assert trial.bitwise_equal, trial
        assert all(us > 0 for us in trial.us.values()), trial
