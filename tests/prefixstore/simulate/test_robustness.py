"""What was promised of `auto:30` on workloads of our own: hits, and that no window makes it lose much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.prefixstore.cache.policy.seen import Earlier, SeenPrompt, SeenPrompts, Sighting
from diskprefix.prefixstore.simulate.comparison import GEOMETRIES, REGIMES, Regime
from diskprefix.prefixstore.simulate.geometry import Geometry
from diskprefix.prefixstore.simulate.simulator import Policy, Simulator, Totals, simulate
from diskprefix.prefixstore.simulate.trace import Trace, TraceRequest
from diskprefix.tokens import TokenIds, common_prefix_length
from diskprefix.values import Scope
from tests.examples import examples
from tests.prefixstore.simulate.workloads import CATALOG

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


Disturb: TypeAlias = Callable[[list[TokenIds], TokenIds, np.random.Generator], list[TokenIds]]
"""Makes another window of the window (newest prompt first) and the prompt."""


def shuffled(window: list[TokenIds], _prompt: TokenIds, random: np.random.Generator) -> list[TokenIds]:
    return [window[i] for i in random.permutation(len(window))]


def hostile(window: list[TokenIds], prompt: TokenIds, random: np.random.Generator) -> list[TokenIds]:
    """Replaces every second prompt by a beginning of this prompt, by this prompt with another end, or by noise."""

    def made_up() -> TokenIds:
        at = int(random.integers(len(prompt) + 1))
        noise = random.integers(60_000, 70_000, len(prompt), dtype=np.int32)
        return [prompt[:at], np.concatenate([prompt[:at], noise[at:]]), noise][int(random.integers(3))]

    return [made_up() if i % 2 else ids for i, ids in enumerate(window)]


DISTURBED: dict[str, Disturb] = {
    "shuffled": shuffled,
    "hostile": hostile,
}


class _DisturbedPrompts(SeenPrompts):
    """Earlier prompts whose window is disturbed."""

    def __init__(self, block_size: int, disturb: Disturb, seed: int, *, is_trusting: bool) -> None:
        super().__init__(block_size, is_trusting=is_trusting)
        self._disturb = disturb
        self._random = np.random.default_rng(seed)

    def sighting_of(
        self, token_ids: TokenIds, names: Sequence[bytes], window: int, group: bytes = b"", stays_s: float = math.inf
    ) -> Sighting:
        sighting = super().sighting_of(token_ids, names, window, group, stays_s)
        disturbed = self._disturb([one.prompt.token_ids for one in sighting.recent], token_ids, self._random)
        recent = (Earlier(SeenPrompt((), ids.tobytes()), common_prefix_length(token_ids, ids)) for ids in disturbed)
        return replace(sighting, recent=tuple(recent))


class _DisturbedSimulator(Simulator):
    def __init__(self, policy: Policy, geometry: Geometry, disturb: Disturb, seed: int) -> None:
        super().__init__(policy, geometry)
        self._block_size, self._disturb, self._seed = policy.block_size, disturb, seed

    def _seen(self, request: TraceRequest) -> SeenPrompts:
        is_trusting = request.is_trusted or not request.tenant
        new = _DisturbedPrompts(self._block_size, self._disturb, self._seed, is_trusting=is_trusting)
        return self._seen_by.setdefault(request.tenant, new)


def simulate_disturbed(trace: Trace, policy: Policy, geometry: Geometry, disturb: Disturb, seed: int = 0) -> Totals:
    simulator = _DisturbedSimulator(policy, geometry, disturb, seed)
    for request in trace:
        simulator.step(request)
    return simulator.totals


@pytest.mark.cases(3)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", SHAPES)
def test_nine_of_ten_requests_find_something(name: str, regime: Regime) -> None:
    assert run(name, regime, AUTO).hit_rate >= 0.9


@pytest.mark.parametrize("name", ["interleaved", "moving-reminder", "shared-anchor"])
def test_nearly_all_that_could_be_restored_is(name: str) -> None:
    assert run(name, "sliceable", AUTO).restored_tokens >= 0.97 * run(name, "sliceable", FULL).restored_tokens


@pytest.mark.parametrize("regime", ["token", "sliceable"])
@pytest.mark.parametrize("name", CATALOG)
def test_with_room_all_is_restored_that_full_restores(name: str, regime: Regime) -> None:
    assert run(name, regime, AUTO).restored_tokens == run(name, regime, FULL).restored_tokens


@pytest.mark.parametrize(("name", "written"), [("retrieval", 0.45), ("shared-anchor", 0.6), ("one-off", 0.2)])
def test_with_little_room_what_is_not_shared_is_hardly_written(name: str, written: float) -> None:
    budget = budget_of(run(name, "sliceable", FULL), 1 / 8)
    auto, full = (run(name, "sliceable", scope, budget) for scope in (AUTO, FULL))
    assert auto.written_tokens <= written * full.written_tokens
    assert auto.restored_tokens >= full.restored_tokens


@pytest.mark.cases(2)
@pytest.mark.parametrize("disturbance", DISTURBED)
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
    budget = budget_of(run("retrieval", "sliceable", FULL), 1 / 8)
    trace, policy = workload("retrieval"), Policy(scope=AUTO, budget_bytes=budget)
    hostile = simulate_disturbed(trace, policy, GEOMETRIES["sliceable"], DISTURBED["hostile"])
    assert hostile.selected_tokens != run("retrieval", "sliceable", AUTO, budget).selected_tokens
