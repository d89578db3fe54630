"""GPU ranks as processes, over both providers of symmetric memory: results, graphs, lost ranks.

With two GPUs or more, ranks 0 and 1 have one each. With fewer GPUs than ranks some share one and
take turns on it, which shows the same protocol at another pace.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from megamoe.spec import EpConfig, MoESpec
from tests.cases import Case, cases
from tests.compare import assert_bitwise, assert_matches_oracle
from tests.gpu import process_jobs as jobs
from tests.gpu.moe_runs import BIG, LARGE, MINIMUM, bits, by_name, run_case
from tests.gpu.processes import JobFailed, RankProcesses

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]

PROVIDERS = ("torch", "nvshmem")
LIMIT_S = 2.0
SLACK_S = 3.0
SPEC = MoESpec(hidden=256, inter=128, num_experts=6, topk=2, num_shared=1)
LOST = Case("lost", SPEC, (11, 5), "uniform")
SHORT = EpConfig(num_ranks=2, max_tokens=400, block_m=32, timeout_s=LIMIT_S)


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Groups by (ranks, provider), started once; a provider that gives no window is a skip."""
    running: dict = {}
    refused: dict = {}
    failed: dict = {}

    def get(num_ranks: int, provider: str) -> RankProcesses:
        key = (num_ranks, provider)
        if key not in running:
            folder = tmp_path_factory.mktemp(f"{provider}{num_ranks}")
            running[key] = RankProcesses(num_ranks, provider, folder)
            try:
                refused[key] = next(filter(None, running[key].all(jobs.can_open, limit_s=25)), "")
            except JobFailed as e:
                failed[key] = str(e)
        if key in failed or (refused[key] and provider == "torch"):
            pytest.fail(failed.get(key) or refused[key])
        if refused[key]:
            pytest.skip(f"{torch.cuda.device_count()} GPU(s): {refused[key]}")
        return running[key]

    yield get
    for group in running.values():
        group.close()


@pytest.fixture
def start(tmp_path):
    """Starts a group that the test may break."""
    running = []

    def begin(num_ranks: int) -> RankProcesses:
        running.append(RankProcesses(num_ranks, "torch", tmp_path))
        return running[-1]

    yield begin
    for group in running:
        group.close()


@pytest.fixture(scope="module")
def in_threads():
    """What ranks that are threads of this process give, by (case, ranks)."""
    known: dict = {}

    def get(case: Case) -> list[torch.Tensor]:
        if case not in known:
            known[case] = run_case(case, LARGE)
        return known[case]

    return get


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("config", [MINIMUM, BIG], ids=["minimum", "big"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_all_cases_as_the_oracle_and_as_threads(groups, in_threads, provider, config):
    """Every case at two ranks, unequal and zero tokens among them; one call after another."""
    some = cases(2)
    answers = groups(2, provider).all(jobs.run_cases, some, config, 2)
    for i, case in enumerate(some):
        want, threads = case.expected(), in_threads(case)
        for rank in range(2):
            what = f"{case.name} {provider} rank {rank}"
            y = answers[rank][i]
            assert_bitwise(y, threads[rank], f"{what} against threads")
            if y.shape[0]:
                assert_matches_oracle(y, want[rank], case.spec, what, bits(case.spec))


@pytest.mark.parametrize("config", [MINIMUM, LARGE], ids=["minimum", "large"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_four_ranks(groups, in_threads, provider, config):
    """Four ranks over however many GPUs there are."""
    some = [c for c in cases(4) if c.name.endswith("4")]
    assert len(some) >= 5
    answers = groups(4, provider).all(jobs.run_cases, some, config, 2)
    for i, case in enumerate(some):
        for rank, want in enumerate(in_threads(case)):
            assert_bitwise(answers[rank][i], want, f"{case.name} {provider} rank {rank}")


# ---------------------------------------------------------------- graphs


@pytest.mark.parametrize("provider", PROVIDERS)
def test_two_graphs_on_one_window_replay_with_changed_inputs(groups, provider):
    case = replace(by_name(2)["fp8-shared"], tokens=(60, 60))
    for config in (LARGE, MINIMUM):
        wrong = groups(2, provider).all(jobs.replay_graphs, case, config)
        assert not any(wrong), list(itertools.chain(*wrong))


# ---------------------------------------------------------------- late and lost ranks


def check_fault(answer: dict, observers: set[int], peer: int) -> None:
    assert not answer["ok"]
    assert answer["alive"], "the context computes no more"
    assert answer["rank"] in observers, answer
    assert answer["peer"] == peer, answer
    assert answer["want"] != answer["have"], answer


def test_a_late_rank_within_the_limit_is_only_late(groups, in_threads):
    group = groups(2, "torch")
    group.all(jobs.open_kept, LOST, SHORT)
    for late in (0, 1):
        for rank in range(2):
            group.send(rank, jobs.call_kept, 0.6 * LIMIT_S if rank == late else 0.0)
        for rank, want in enumerate(in_threads(LOST)):
            answer = group.answer(rank)
            assert answer["ok"], answer
            assert_bitwise(answer["y"], want, f"rank {late} late, rank {rank}")
    group.all(jobs.close_kept)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_rank_is_named_on_all_ranks_and_reset_mends_it(groups, in_threads, missing):
    group, there = groups(2, "torch"), 1 - missing
    group.all(jobs.open_kept, LOST, SHORT)
    assert all(a["ok"] for a in group.all(jobs.call_kept))
    group.send(there, jobs.call_kept)
    found = group.answer(there)
    check_fault(found, {there}, missing)
    assert (found["tag"], found["epoch"]) == ("counts_flag", 2)
    assert LIMIT_S <= found["waited"] < LIMIT_S + SLACK_S
    # The rank that comes after all hears of the same fault, at once.
    group.send(missing, jobs.call_kept)
    echo = group.answer(missing)
    check_fault(echo, {there}, missing)
    assert echo["waited"] < LIMIT_S
    assert {k: echo[k] for k in ("unit", "tag", "epoch")} == {
        k: found[k] for k in ("unit", "tag", "epoch")
    }
    assert group.all(jobs.reset_kept, 20.0) == [[], []]
    after = group.all(jobs.call_kept)
    for rank, want in enumerate(in_threads(LOST)):
        assert_bitwise(after[rank]["y"], want, f"rank {rank} after reset")
    group.all(jobs.close_kept)


def test_a_killed_rank_leaves_live_survivors(start, record_property, in_threads, tmp_path):
    """Its memory stays mapped and can be written; the survivor goes on in a new group."""
    group = start(2)
    group.all(jobs.open_kept, LOST, SHORT)
    assert all(a["ok"] for a in group.all(jobs.call_kept))
    group.kill(1)
    group.send(0, jobs.call_kept)
    check_fault(group.answer(0), {0}, 1)
    group.send(0, jobs.look_at_window, 1)
    seen = group.answer(0)
    record_property("dead_window", seen)
    print("window of a dead process:", seen)
    assert "error" not in seen
    assert seen["written"]
    group.send(0, jobs.reset_kept, 1.0)
    assert group.answer(0) == [1]
    alone = replace(LOST, tokens=(13,))
    group.send(0, jobs.new_group, 0, 1, str(tmp_path / "alone"))
    group.answer(0)
    group.send(0, jobs.run_in_new_group, alone, LARGE)
    assert_bitwise(group.answer(0), in_threads(alone)[0], "alone, after the loss")


def test_survivors_of_a_rank_killed_during_calls_form_a_new_group(start, in_threads, tmp_path):
    group = start(3)
    three = replace(LOST, tokens=(11, 5, 8))
    group.all(jobs.open_kept, three, replace(SHORT, num_ranks=3))
    for rank in range(3):
        group.send(rank, jobs.loop_kept)
    with pytest.raises(AssertionError, match="did not answer"):
        group.answer(0, limit_s=1.0)  # they run
    group.kill(1)
    for rank in (0, 2):
        check_fault(group.answer(rank), {0, 2}, 1)
    for rank in (0, 2):
        group.send(rank, jobs.reset_kept, 1.0)
    for rank in (0, 2):
        assert 1 in group.answer(rank)
    for new_rank, rank in enumerate((0, 2)):
        group.send(rank, jobs.new_group, new_rank, 2, str(tmp_path / "two"))
    for rank in (0, 2):
        group.answer(rank)
    for rank in (0, 2):
        group.send(rank, jobs.run_in_new_group, LOST, LARGE)
    for rank, want in zip((0, 2), in_threads(LOST), strict=True):
        assert_bitwise(group.answer(rank), want, f"former rank {rank}")


# ---------------------------------------------------------------- other work on the GPU


def test_reserved_sms_keep_calls_going_beside_another_stream(groups, in_threads):
    """Another stream holds 16 SMs for a second. With them reserved no call waits for it."""
    ranks = min(2, torch.cuda.device_count())
    case = LOST if ranks == 2 else replace(LOST, tokens=(13,))
    group = groups(ranks, "torch")
    for reserved in (16, 0):
        config = replace(LARGE, reserved_sms=reserved, timeout_s=20)
        answers = group.all(jobs.run_beside_hog, case, config, 16, 1.0)
        for rank, want in enumerate(in_threads(case)):
            assert_bitwise(answers[rank]["y"], want, f"{reserved} reserved, rank {rank}")
            assert answers[rank]["beside"] == bool(reserved), f"{reserved} reserved, rank {rank}"
