"""Routing distributions do what their names say, and skew figures equal hand-made ones."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from launcher.workloads import (
    BASES,
    Routing,
    parse_routing,
    random_activations,
    route,
    skew,
    tokens_per_rank,
)
from megamoe.errors import SpecError
from megamoe.spec import MoESpec

SPEC = MoESpec(hidden=256, inter=128, num_experts=32, topk=4)
RANKS, TOKENS = 4, 600
LOCAL = SPEC.num_experts // RANKS


def _all(text, tokens=TOKENS, seed=11, spec=SPEC):
    return [route(text, spec, RANKS, r, tokens, seed)[0] for r in range(RANKS)]


@pytest.mark.parametrize("base", [b for b in BASES if b != "replay"])
def test_ids_and_weights_are_legal(base):
    for rank in range(RANKS):
        ids, weight = route(base, SPEC, RANKS, rank, TOKENS, seed=3)
        assert ids.shape == weight.shape == (TOKENS, 4)
        assert ids.dtype == torch.int64
        assert weight.dtype == torch.float32
        assert int(ids.min()) >= -1
        assert int(ids.max()) < SPEC.num_experts
        torch.testing.assert_close(weight.sum(1), torch.ones(TOKENS))
        if base != "one_expert":
            assert all(len(set(row)) == 4 for row in ids.tolist()), base
        again, _ = route(base, SPEC, RANKS, rank, TOKENS, seed=3)
        assert torch.equal(again, ids)
    assert route(base, SPEC, RANKS, 0, 0, seed=3)[0].shape == (0, 4)


def test_ranks_and_seeds_draw_differently():
    first = route("uniform", SPEC, RANKS, 0, TOKENS, seed=3)[0]
    assert not torch.equal(first, route("uniform", SPEC, RANKS, 1, TOKENS, seed=3)[0])
    assert not torch.equal(first, route("uniform", SPEC, RANKS, 0, TOKENS, seed=4)[0])


def test_uniform_is_even():
    found = skew(_all("uniform"), SPEC)
    assert found.routes == RANKS * TOKENS * 4
    assert found.empty_experts == 0
    assert found.expert_max_over_mean < 1.25  # mean 300 per expert, 4 standard deviations
    assert abs(found.remote_share - 0.75) < 0.03


def test_zipf_follows_its_exponent_and_is_the_same_on_every_rank():
    spec = MoESpec(hidden=256, inter=128, num_experts=32, topk=1)
    loads = [torch.bincount(ids.flatten(), minlength=32) for ids in _all("zipf:1.2", 4000, 5, spec)]
    total = torch.stack(loads).sum(0).double()
    order = total.argsort(descending=True)
    ratio = float(total[order[0]] / total[order[7]])
    assert 0.85 < ratio / 8**1.2 < 1.15, ratio
    popular = order[0]
    assert all(int(load.argmax()) == popular for load in loads)
    assert order.tolist() != list(range(32))


def test_lognormal_spreads_with_sigma():
    narrow = skew(_all("lognormal:0.3"), SPEC)
    wide = skew(_all("lognormal:2"), SPEC)
    assert narrow.gini + 0.15 < wide.gini


def test_hot_experts_take_half_of_the_tokens_whole():
    for ids in _all("hot_experts"):
        hot = (ids == torch.arange(SPEC.topk)).all(1)
        assert abs(float(hot.float().mean()) - 0.5) < 0.1
        assert int((ids[~hot] >= SPEC.topk).sum()) > 0
    # Half of the load on rank 0, the other half even: 0.5 + 0.5 / 4 of the whole, times 4.
    assert abs(skew(_all("hot_experts"), SPEC).max_over_mean - 2.5) < 0.15


def test_hot_expert_and_hot_rank():
    seed = 11
    hot = torch.cat(_all("hot_expert:0.5", seed=seed))
    share = float((hot == seed % 32).any(1).float().mean())
    assert 0.5 < share < 0.62  # half, and 4 of 32 of the rest
    ranks = torch.cat(_all("hot_rank:0.5")) // LOCAL
    whole = float((ranks == 0).all(1).float().mean())
    assert 0.46 < whole < 0.54
    assert skew(_all("hot_rank:0.5"), SPEC).max_over_mean > 2.3


def test_restricted_bases():
    for rank, ids in enumerate(_all("local")):
        assert set((ids // LOCAL).unique().tolist()) == {rank}
    for rank, ids in enumerate(_all("remote")):
        assert set((ids // LOCAL).unique().tolist()) == set(range(4)) - {rank}
    assert set((torch.cat(_all("all_to_one")) // LOCAL).unique().tolist()) == {0}
    assert set((torch.cat(_all("empty_rank")) // LOCAL).unique().tolist()) == {0, 1, 2}
    assert skew(_all("local"), SPEC).remote_share == 0
    assert skew(_all("remote"), SPEC).remote_share == 1
    assert skew(_all("all_to_one"), SPEC).max_over_mean == 4
    one = torch.cat(_all("one_expert"))
    assert bool((one[:, 0] == 0).all())
    assert bool((one[:, 1:] == -1).all())


def test_fewer_experts_than_routes_repeat():
    spec = MoESpec(hidden=256, inter=128, num_experts=8, topk=6)
    ids, _ = route("local", spec, 4, 1, 50, seed=1)
    assert all(set(row) == {2, 3} for row in ids.tolist())


@pytest.mark.parametrize("base", ["remote", "empty_rank"])
def test_bases_that_need_ranks(base):
    with pytest.raises(SpecError, match="needs at least 2 ranks: 1 given"):
        route(base, SPEC, 1, 0, 5, seed=1)


def test_modifiers():
    masked = torch.cat(_all("zipf+masked:0.25"))
    assert abs(float((masked < 0).float().mean()) - 0.25) < 0.02
    double = torch.cat(_all("duplicates:0.5"))
    repeats = sum(len(set(row)) < 4 for row in double.tolist()) / len(double)
    assert abs(repeats - 0.5) < 0.04
    both = torch.cat(_all("duplicates:1+masked:1"))
    assert bool((both == -1).all())


def test_replay_of_ids_and_of_loads(tmp_path):
    recorded = torch.randint(0, 32, (1000, 4), generator=torch.Generator().manual_seed(0))
    save_file({"topk_idx": recorded}, tmp_path / "ids.safetensors")
    for rank in range(RANKS):
        ids, _ = route(f"replay:{tmp_path}/ids.safetensors", SPEC, RANKS, rank, 300, seed=1)
        want = recorded[(rank * 300 + torch.arange(300)) % 1000]
        assert torch.equal(ids, want)
    load = torch.zeros(32, dtype=torch.int64)
    load[[3, 8, 9, 20, 31]] = torch.tensor([50, 5, 10, 20, 15])
    torch.save(load, tmp_path / "load.pt")
    ids = torch.cat(_all(f"replay:{tmp_path}/load.pt"))
    assert set(ids.unique().tolist()) == {3, 8, 9, 20, 31}
    counts = torch.bincount(ids.flatten(), minlength=32)
    assert int(counts.argmax()) == 3


def test_bad_replays(tmp_path):
    def replay(tensor):
        torch.save(tensor, tmp_path / "r.pt")
        return route(f"replay:{tmp_path}/r.pt", SPEC, RANKS, 0, 5, seed=1)

    with pytest.raises(SpecError, match="no file"):
        route("replay:/nowhere.pt", SPEC, RANKS, 0, 5, seed=1)
    with pytest.raises(SpecError, match=r"shape \(7,\): want ids \[N, 4\] or loads \[32\]"):
        replay(torch.ones(7))
    with pytest.raises(SpecError, match="beyond 31"):
        replay(torch.full((3, 4), 32))
    for name in ("text.pt", "text.safetensors", "empty.pt"):
        (tmp_path / name).write_text("no tensors" * name.startswith("text"))
        with pytest.raises(SpecError, match=f"{name} is no file of .* that can be read"):
            route(f"replay:{tmp_path}/{name}", SPEC, RANKS, 0, 5, seed=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zipff", "'zipff' is not one base of uniform, zipf"),
        ("zipf+uniform", "zipf and uniform are two bases, and a routing has one: keep one of them"),
        ("zipf+replay:F", "zipf and replay are two bases"),
        ("replay:F+masked+zipf", "replay and zipf are two bases"),
        ("replay:F+replay:G", "replay and replay are two bases"),
        ("masked:0.1+zipf+masked:0.9", "masked is given twice: keep one of them"),
        ("zipf:", "the parameter of 'zipf:' must be in 0..10"),
        ("uniform:", "takes no parameter"),
        ("zipf:x", "must be in 0..10"),
        ("hot_rank:1.5", "must be in 0..1"),
        ("masked:-1", "must be in 0..1"),
        ("uniform:3", "takes no parameter"),
        ("replay", "write replay:FILE"),
    ],
)
def test_bad_routings_are_named(text, message):
    with pytest.raises(SpecError, match=message):
        parse_routing(text)


def test_parsing():
    assert parse_routing("masked") == Routing(masked=0.25)
    assert parse_routing("zipf:0.8+duplicates:0.1") == Routing("zipf", 0.8, None, 0.0, 0.1)
    assert parse_routing("replay:a/b.pt+masked") == Routing("replay", None, "a/b.pt", 0.25)


def test_skew_of_a_known_load():
    spec = MoESpec(hidden=128, inter=128, num_experts=4, topk=2)
    ids = [torch.tensor([[0, 1], [0, 0], [-1, 2]]), torch.tensor([[0, -1]])]
    found = skew(ids, spec)  # loads 4, 1, 1, 0; ranks 5, 1
    assert found.routes == 6
    assert found.max_over_mean == 5 / 3
    assert found.expert_max_over_mean == 4 / 1.5
    assert found.balancedness == 3 / 5
    # Mean absolute difference over all ordered pairs / (2 * mean): 2*(4+3+3+1+1+0)/16 / 3.
    assert found.gini == pytest.approx(24 / 16 / 3)
    assert found.empty_experts == 1
    assert found.remote_share == pytest.approx(2 / 6)
    assert json.loads(json.dumps(found.to_dict()))["routes"] == 6
    assert skew([torch.full((3, 2), -1)], spec).routes == 0


def test_tokens_per_rank():
    assert tokens_per_rank("7", 3) == [7, 7, 7]
    assert tokens_per_rank("7,0,2", 3) == [7, 0, 2]
    assert tokens_per_rank("ramp:9", 4) == [0, 3, 6, 9]
    assert tokens_per_rank("ramp:9", 1) == [9]
    assert tokens_per_rank("empty:9", 3) == [9, 9, 0]
    assert tokens_per_rank("empty:9", 1) == [9]
    assert tokens_per_rank("single:9", 3) == [9, 0, 0]
    random = tokens_per_rank("random:9", 8, seed=2)
    assert random == tokens_per_rank("random:9", 8, seed=2)
    assert len(set(random)) > 2
    assert all(0 <= t <= 9 for t in random)
    for text, message in [
        ("7,8", "2 counts for 3 ranks"),
        ("x", "write T"),
        ("wave:3", "must be one of"),
        ("-3", "write T"),
    ]:
        with pytest.raises(SpecError, match=message):
            tokens_per_rank(text, 3)
    with pytest.raises(SpecError, match="--split '7,8'"):
        tokens_per_rank("7,8", 3, option="--split")


def test_activations_differ_in_scale_between_groups():
    x = random_activations(SPEC, 0, 200, seed=1)
    assert x.shape == (200, 256)
    assert x.dtype == torch.bfloat16
    amax = x.float().abs().unflatten(1, (2, 128)).amax(2)
    assert float(amax.max() / amax.min()) > 3
    assert not torch.equal(x, random_activations(SPEC, 1, 200, seed=1))
