"""Tuned configurations: the search on made-up costs, the cache, and a real search on one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.ranks import Group
from launcher.tuner import Trial, TuneOptions, other_blocks, search, tune
from megamoe import tuning
from megamoe.backends.base import device_name
from megamoe.backends.cuda_build import cuda_config
from megamoe.errors import SpecError
from megamoe.layer import open_layer
from megamoe.spec import MODELS, EpConfig, MoESpec
from megamoe.symmetric.local import LocalGroup
from megamoe.weights import random_experts

SPEC = MoESpec(hidden=256, inter=128, num_experts=8, topk=2, num_shared=1)
OPEN = EpConfig(num_ranks=2, max_tokens=256)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path))
    monkeypatch.setenv("MEGAMOE_TUNED", "1")


# ---------------------------------------------------------------- search


def run_search(cost, *, wrong=lambda config: False, noise=None, margin=0.02):
    """A search whose times are ``cost(config)``; ``noise`` is added to candidates in the search."""

    def resolve(config):
        return config.resolved(SPEC)

    start = resolve(OPEN)
    blocks = [resolve(replace(OPEN, block_m=b)) for b in (16, 64)]

    def measure(candidate, best):
        us, best_us = cost(candidate), cost(best)
        if noise is not None and best != start:
            us *= noise
        equal = not wrong(candidate)
        return Trial(candidate, {1: us}, {1: best_us}, us / best_us, equal, 0)

    return start, *search(start, blocks, SPEC, resolve, measure, margin)


def distance(config, **wanted):
    """1 at the wanted values, and 0.1 more for each halving or doubling away from them."""
    steps = 0.0
    for name, value in wanted.items():
        ratio = max(getattr(config, name), 1) / value
        while ratio > 1.4 or ratio < 0.7:
            ratio, steps = (ratio / 2, steps + 1) if ratio > 1 else (ratio * 2, steps + 1)
    return 1 + 0.1 * steps


def test_search_walks_to_the_minimum_of_each_field():
    wanted = {"block_m": 64, "wave_blocks": 1, "l2_lag_blocks": 1}
    start, best, trials = run_search(lambda c: distance(c, **wanted))
    assert {name: getattr(best, name) for name in wanted} == wanted
    assert best != start
    assert trials[-1].config == best
    assert trials[-1].taken
    # Trials before the last are each of another configuration.
    configs = [t.config for t in trials[:-1]]
    assert len(set(configs)) == len(configs)
    assert start not in configs


def test_search_keeps_the_recommendation_where_nothing_is_faster():
    start, best, trials = run_search(lambda c: 1.0)
    assert best == start
    assert trials
    assert not any(t.taken for t in trials)


def test_a_gain_below_the_margin_is_no_gain():
    start, best, _ = run_search(lambda c: 1.0 if c.block_m == 64 else 1.01)
    assert best == start


def test_other_bits_are_never_taken_however_fast():
    start, best, trials = run_search(
        lambda c: 0.5 if c.block_m == 64 else 1.0, wrong=lambda c: c.block_m == 64
    )
    assert best == start
    assert [t.bitwise_equal for t in trials if t.config.block_m == 64] == [False]


@pytest.mark.parametrize(
    ("model", "ranks", "tokens", "start", "others"),
    [
        # V4-Flash is opened without tails at every size, and a search tries them.
        ("v4-flash", 2, 4096, 128, [32, 64, 144]),
        ("v4-flash", 2, 65, 128, [32, 64, 144]),
        ("v4-flash", 2, 64, 128, [32, 64]),  # no expert has more than 128 rows
        ("deepseek-v3", 2, 2048, 144, [32, 64, 128]),
    ],
)
def test_blocks_with_tails_are_tried_where_an_expert_may_have_one(
    model, ranks, tokens, start, others
):
    spec = MODELS[model]
    opened = EpConfig(num_ranks=ranks, max_tokens=tokens)
    first = cuda_config(spec, opened)
    found = other_blocks("cuda", opened, first, lambda config: cuda_config(spec, config))
    assert first.block_m == start
    assert [c.block_m for c in found] == others
    assert [c.tail_rows for c in found] == [16 if c.block_m == 144 else 0 for c in found]
    assert all(c.ring_l1_blocks and c.wave_blocks and c.l2_lag_blocks for c in found)


def test_cpu_ranks_have_no_blocks_with_tails():
    start = OPEN.resolved(SPEC)
    found = other_blocks("cpu", OPEN, start, lambda config: config.resolved(SPEC))
    assert [c.block_m for c in found] == [16, 64, 128]


def test_steps_that_were_noise_do_not_hold_against_the_start():
    """The first candidate is really 3 % faster; each later step seems 5 % faster and is slower."""

    def cost(config):
        return {32: 1.0, 16: 0.97}.get(config.block_m, 1.0) * 1.1 ** (config.wave_blocks != 2)

    start, best, trials = run_search(cost, noise=0.85)
    assert any(t.taken for t in trials[:-1])
    assert not trials[-1].taken
    assert best == start


def test_the_script_for_gpus_keeps_what_it_found_and_stops_in_time(tmp_path):
    """``scripts/gpu_tune.py``, a small layer on a CPU rank."""
    script, output = Path(__file__).parents[2] / "scripts" / "gpu_tune.py", tmp_path / "out.json"

    def run(limit):
        command = [sys.executable, str(script), "--backend", "cpu", "--tiny", "--limit", limit]
        done = subprocess.run(
            [*command, "--output", str(output)],
            cwd=script.parents[1],
            env={**os.environ, "PYTHONPATH": str(script.parents[1])},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        (search,) = json.loads(output.read_text())["searches"]
        return search, list(tmp_path.glob("tuned-*.json"))

    search, kept = run("0.01")
    assert (search["chosen"], len(search["trials"]), kept) == (None, 1, [])
    search, kept = run("100")
    assert len(search["trials"]) > 3
    (file,) = kept
    chosen = json.loads(file.read_text())["chosen"]
    assert chosen == {field: search["chosen"][field] for field in tuning.TUNABLE}


# ---------------------------------------------------------------- cache


def chosen_of(config: EpConfig) -> EpConfig:
    return replace(config.resolved(SPEC), ring_l1_blocks=9, ring_l2_blocks=7, wave_blocks=3)


def test_what_was_saved_is_found_again():
    path = tuning.save(SPEC, OPEN, "gpu", chosen_of(OPEN), {"trials": []})
    assert json.loads(path.read_text())["trials"] == []
    found = tuning.tuned(SPEC, OPEN, "gpu")
    for name in tuning.TUNABLE:
        assert getattr(found, name) == getattr(chosen_of(OPEN), name), name
    # A time limit is no part of the key, and stays the caller's.
    assert tuning.tuned(SPEC, replace(OPEN, timeout_s=2.5), "gpu").timeout_s == 2.5


@pytest.mark.parametrize(
    ("spec", "config", "device"),
    [
        (replace(SPEC, topk=3), OPEN, "gpu"),
        (SPEC, replace(OPEN, num_ranks=4), "gpu"),
        (SPEC, replace(OPEN, max_tokens=255), "gpu"),
        (SPEC, replace(OPEN, num_workers=3), "gpu"),
        (SPEC, replace(OPEN, reserved_sms=4), "gpu"),
        (SPEC, OPEN, "other gpu"),
        (SPEC, replace(OPEN, ring_l1_blocks=12), "gpu"),
        (SPEC, replace(OPEN, l2_lag_blocks=1), "gpu"),
    ],
)
def test_another_key_or_a_field_that_is_set_leaves_the_configuration_alone(spec, config, device):
    tuning.save(SPEC, OPEN, "gpu", chosen_of(OPEN), {})
    assert tuning.tuned(spec, config, device) is config


def test_another_version_of_the_program_searches_again(monkeypatch):
    tuning.save(SPEC, OPEN, "gpu", chosen_of(OPEN), {})
    monkeypatch.setattr("megamoe.__version__", "999")
    assert tuning.tuned(SPEC, OPEN, "gpu") is OPEN


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"chosen": {}}', '{"chosen": {"block_m": "x"}}', "[" * 100_000, "\0"],
)
def test_a_broken_file_is_ignored(text):
    path = tuning.save(SPEC, OPEN, "gpu", chosen_of(OPEN), {})
    path.write_text(text)
    assert tuning.tuned(SPEC, OPEN, "gpu") is OPEN


@pytest.mark.parametrize(
    "changed",
    [
        {"wave_blocks": 999},
        {"ring_l1_blocks": 100_000},
        {"ring_l2_blocks": 1e400},
        {"l2_lag_blocks": 1.5},
        {"block_m": True},
        {"block_m": None},
    ],
    ids=str,
)
def test_a_file_that_no_group_could_run_is_ignored(changed):
    path = tuning.save(SPEC, OPEN, "gpu", chosen_of(OPEN), {})
    found = json.loads(path.read_text())
    found["chosen"] |= changed
    path.write_text(json.dumps(found))
    assert tuning.tuned(SPEC, OPEN, "gpu") is OPEN


def test_a_save_that_fails_leaves_what_was_and_nothing_else():
    path = tuning.save(SPEC, OPEN, "gpu", chosen_of(OPEN), {})
    before = path.read_text()
    with pytest.raises(TypeError):
        tuning.save(SPEC, OPEN, "gpu", chosen_of(OPEN), {"trials": object()})
    assert [p.read_text() for p in path.parent.iterdir()] == [before]


def test_ranks_whose_caches_differ_take_the_recommendation(monkeypatch):
    one = replace(OPEN, num_workers=1)
    group = LocalGroup(2)
    own = threading.local()
    saved = chosen_of(one)
    monkeypatch.setattr(
        "megamoe.layer.tuned",
        lambda spec, config, device: saved if own.rank in own.tuned else config,
    )

    def opened(rank, tuned):
        own.rank, own.tuned = rank, tuned
        with open_layer(SPEC, one, backend="cpu", rendezvous=group.rendezvous(rank)) as layer:
            return layer.config

    for tuned, want in (((0,), one.resolved(SPEC)), ((0, 1), saved.resolved(SPEC))):
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(opened, range(2), [tuned] * 2))
        assert found == [want] * 2


def test_it_can_be_switched_off(monkeypatch):
    tuning.save(SPEC, OPEN, "gpu", chosen_of(OPEN), {})
    monkeypatch.setenv("MEGAMOE_TUNED", "0")
    assert tuning.tuned(SPEC, OPEN, "gpu") is OPEN


# ---------------------------------------------------------------- on a rank


def options(**changed) -> TuneOptions:
    given = {
        "spec": SPEC,
        "max_tokens": 64,
        "tokens": [1, 64],
        "routing": "zipf:1.2",
        "workers": 1,
        "backend": "cpu",
        "margin": 0.0,
        "rounds": 1,
        "calls": 2,
        "seed": 3,
    }
    return TuneOptions(**given | changed)


def test_a_layer_takes_what_was_found_and_gives_the_same_bits():
    config = EpConfig(num_ranks=1, max_tokens=64, num_workers=1)

    def run():
        with open_layer(SPEC, config, backend="cpu") as layer:
            layer.load_weights(random_experts(SPEC, 0, 1, seed=3))
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(20, SPEC.hidden, generator=generator).bfloat16()
            idx = torch.randint(0, SPEC.num_experts, (20, SPEC.topk), generator=generator)
            y = layer.run(x, idx, torch.rand(20, SPEC.topk, generator=generator))
            return layer.config, y

    before, expected = run()
    found = tune(Group(0, 1, "cpu"), options())
    assert found["start"] == before
    assert all(t.bitwise_equal for t in found["trials"])
    assert {t.config.block_m for t in found["trials"]} >= {16, 64, 128}
    assert all(set(t.us) == {1, 64} for t in found["trials"])
    assert found["open"] == config
    other = replace(found["start"], block_m=64, ring_l1_blocks=3, ring_l2_blocks=2, wave_blocks=1)
    tuning.save(SPEC, config, device_name("cpu"), other.resolved(SPEC), {})
    after, y = run()
    assert (after.block_m, after.ring_l1_blocks, after.ring_l2_blocks) == (64, 3, 2)
    assert torch.equal(y.view(torch.int16), expected.view(torch.int16))


def test_more_tokens_than_a_group_takes_are_refused():
    with pytest.raises(SpecError, match="--tokens 65 exceeds --max-tokens 64"):
        tune(Group(0, 1, "cpu"), options(tokens=[1, 65]))
