"""The explorer: all interleavings of the smallest group, random ones of larger groups.

csrc/cpu/explore/world.hpp says what a step is and why cutting executions into steps loses none;
docs/protocol.md says what this proves and what it does not.
"""

from __future__ import annotations

import pytest

from tests import drivers

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def explorer():
    return drivers.build("", "explore_protocol") / "explore_protocol"


@pytest.mark.parametrize(("calls", "routings"), [(2, "all"), (3, "some")])
def test_every_state_of_the_smallest_group(explorer, capsys, calls, routings):
    """2 ranks, 2 experts, 1 unit, rings of one block; calls follow on the same windows.

    The third call is the first to write where an earlier one's counts and routes lie.
    """
    (result,) = drivers.run(explorer, "exhaustive", 300, routings, calls, timeout=500)
    with capsys.disabled():
        print(
            f"\nexhaustive, {calls} calls: {result['states']} states, "
            f"{result['transitions']} transitions, depth {result['depth']}, "
            f"{result['routings_done']} routings, {result['seconds']} s",
            end="",
        )
    assert "violation" not in result
    assert result["complete"], "the time limit cut the search short"
    assert result["calls"] == calls
    assert result["routings_done"] == (256 if routings == "all" else 5)
    assert result["states"] > 10_000 * result["routings_done"]


def test_many_states_of_larger_groups(explorer, capsys):
    """Two tokens of two routes, several tiles; then two units. As far as the time goes."""
    results = drivers.run(explorer, "bounded", 12, timeout=300)
    assert {result["case"] for result in results} == {"2r_1u", "2r_2u"}
    assert len(results) == 10, "each case with each kind of routing"
    for result in results:
        with capsys.disabled():
            extent = "all" if result["complete"] else "the first"
            print(
                f"\nbounded {result['case']} from {result['first']}: {extent} {result['states']} "
                f"states, depth {result['depth']}, {result['seconds']} s",
                end="",
            )
        assert result["violation"] == ""
        assert result["states"] > 1_000


@pytest.mark.parametrize("seed", [1, 2])
def test_random_schedules(explorer, seed):
    """Random walks and priority schedules of 2 to 4 ranks, every output exact, no deadlock."""
    (result,) = drivers.run(explorer, "random", 5, seed, timeout=300)
    assert "violation" not in result
    assert result["schedules"] >= 500
    assert len(result["cases"]) == 8, "a case was never run"


PLANTED = {
    "count_flag_by_equality",
    "l1_published_before_data",
    "l2_published_before_data",
    "dispatch_skips_counts_wait",
    "l1_empty_not_awaited",
    "l2_empty_not_awaited",
    "l1_full_not_awaited",
    "l2_full_not_awaited",
    "second_grid_barrier_skipped",
    "no_epoch_parity",
    "linear2_ticket_before_its_linear1",
    "ticket_order_ignores_l2_ring",
    "combine_after_first_slot",
    "token_arrived_not_reset",
    "token_arrived_reset_after_next_flag",
    "block_base_not_advanced",
}


def test_planted_bugs_are_found(explorer):
    """Each by the search, by the search that also looks for races, and by random schedules."""
    results = {r["bug"]: r for r in drivers.run(explorer, "bugs", timeout=500)}
    assert set(results) == PLANTED
    for name, result in results.items():
        for way in ("search", "checked_search", "random"):
            assert result[way], f"{name} is not found by {way}: {result}"
