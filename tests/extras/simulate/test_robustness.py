"""What was promised of `auto:30` on workloads of our own: hits, and that no window makes it lose much."""

from __future__ import annotations

from functools import cache

import pytest

from diskprefix.extras.simulate.comparison import GEOMETRIES, REGIMES, Regime
from diskprefix.extras.simulate.simulator import Policy, Totals, simulate
from diskprefix.extras.simulate.trace import Trace
from diskprefix.values import Scope
from tests.examples import examples
from tests.extras.simulate.disturbed import DISTURBED, simulate_disturbed
from tests.extras.simulate.workloads import CATALOG

AUTO, FULL = Scope("auto", 30), Scope("full")
NUM_REQUESTS = 120
SHAPES = ("shared-anchor", "interleaved", "retrieval", "moving-reminder")


@cache
def workload(name: str) -> Trace:
    return Trace.of(name, list(CATALOG[name](num_requests=NUM_REQUESTS)))


@cache
def run(name: str, regime: Regime, scope: Scope, budget_bytes: int | None = None) -> Totals:
    return simulate(workload(name), Policy(scope=scope, budget_bytes=budget_bytes), GEOMETRIES[regime])


def budget_of(unlimited: Totals, share: float) -> int:
    """Returns the budget that leaves nodes `share` of their peak size: the inverse of `usable_bytes`."""
    return int((share * unlimited.peak_bytes + 2**20) / 0.9) + 16


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", SHAPES)
def test_nine_of_ten_requests_find_something(name: str, regime: Regime) -> None:
    assert run(name, regime, AUTO).hit_rate >= 0.9


@pytest.mark.parametrize("name", ["interleaved", "moving-reminder", "shared-anchor"])
def test_nearly_all_that_could_be_restored_is(name: str) -> None:
    assert run(name, "sliceable", AUTO).restored_tokens >= 0.97 * run(name, "sliceable", FULL).restored_tokens


@pytest.mark.parametrize("name", ["retrieval", "shared-anchor", "one-off"])
def test_what_is_not_shared_is_hardly_written(name: str) -> None:
    assert run(name, "sliceable", AUTO).written_tokens <= 0.3 * run(name, "sliceable", FULL).written_tokens


# The order backwards is one of those of "shuffled", and a window of duplicates is a shorter one.
@pytest.mark.parametrize("disturbance", ["shuffled", "hostile"] if examples(1) == 1 else DISTURBED)
@pytest.mark.parametrize("room", [0.2] if examples(1) == 1 else [1.0, 0.2])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", CATALOG)
def test_no_window_makes_it_lose_ten_points_against_full_in_the_same_room(
    name: str, regime: Regime, room: float, disturbance: str
) -> None:
    budget = None if room == 1 else budget_of(run(name, regime, FULL), room)
    policy = Policy(scope=AUTO, budget_bytes=budget)
    disturbed = simulate_disturbed(workload(name), policy, GEOMETRIES[regime], DISTURBED[disturbance])
    assert disturbed.restored_share >= run(name, regime, FULL, budget).restored_share - 0.1


def test_a_window_without_order_is_the_same_to_state_that_can_be_cut() -> None:
    for name in SHAPES:
        trace, policy = workload(name), Policy(scope=AUTO)
        shuffled = simulate_disturbed(trace, policy, GEOMETRIES["sliceable"], DISTURBED["shuffled"])
        assert shuffled == run(name, "sliceable", AUTO)


def test_disturbances_reach_the_selection() -> None:
    """A window of noise alone hides what was seen a moment ago."""
    trace, policy = workload("retrieval"), Policy(scope=AUTO)
    hostile = simulate_disturbed(trace, policy, GEOMETRIES["sliceable"], DISTURBED["hostile"])
    assert hostile.selected_tokens != run("retrieval", "sliceable", AUTO).selected_tokens
