"""Many policies over one workload, and a row of figures for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, TypeAlias

from diskprefix.simulate.baselines import OnStep, upper_bound, whole_snapshots
from diskprefix.simulate.geometry import Geometry
from diskprefix.simulate.simulator import Policy, Totals, simulate
from diskprefix.simulate.trace import Trace
from diskprefix.store.eviction import usable_bytes

Regime: TypeAlias = Literal["sliceable", "checkpoints"]

REGIMES: tuple[Regime, ...] = ("sliceable", "checkpoints")
WHOLE_SNAPSHOTS, UPPER_BOUND = "whole-snapshots", "upper-bound"
"""Rows of these two have such a name in the place of a scope."""


class Simulate(Protocol):
    """What runs a workload: the daemon's rules, or one of the baselines."""

    def __call__(self, trace: Trace, policy: Policy, geometry: Geometry, on_step: OnStep, /) -> Totals: ...


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run over a workload. `scope` is what its row is called, `preset` names the policy file of its settings."""

    scope: str
    regime: Regime
    policy: Policy
    geometry: Geometry
    simulate: Simulate = simulate
    preset: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one policy did to one workload.

    `budget_bytes` None is without end; `policy` names the policy file whose settings these are. `hit_rate`: of the
    requests, those of which something was restored. `restored_share` and `written_share` are of the prompt tokens,
    `written_tokens` those of blocks and tails, `written_bytes` what they and the checkpoints took in the file.
    `write_amplification`: how often the average byte that was written was written. `evictions`: nodes given up for
    room, or whole snapshots. `dropped`: publications that did not fit. `seconds_saved`: prefill that was not needed.
    `selected_tokens`: those that the policy wanted kept, stored already or not. `block_size` and `min_tokens` are the
    policy's, in tokens, `bytes_per_token` and `state_bytes` what the model's state was taken to weigh, `tokens_per_s`
    the speed of prefill.
    """

    trace: str
    scope: str
    regime: Regime
    budget_bytes: int | None
    policy: str | None
    requests: int
    hit_rate: float
    restored_share: float
    written_share: float
    prompt_tokens: int
    restored_tokens: int
    written_tokens: int
    selected_tokens: int
    written_bytes: int
    peak_bytes: int
    write_amplification: float
    evictions: int
    dropped: int
    seconds_saved: float
    block_size: int
    min_tokens: int
    bytes_per_token: int
    state_bytes: int
    tokens_per_s: float

    @property
    def label(self) -> str:
        """What people read: the scope, and the policy file where there is one."""
        return f"{self.policy} ({self.scope})" if self.policy else self.scope


def cases(
    policies: Sequence[Policy],
    geometries: Mapping[Regime, Geometry],
    budgets: Sequence[int | None],
    presets: Mapping[str, Policy],
    reference: Policy,
) -> list[Case]:
    """What is to be run over a workload, regime by regime.

    In each regime come the budgets, the largest first, and under each the `policies` in their order and then whole
    snapshots. The `presets`, which have budgets of their own, and the upper bound follow. `reference` is what the
    baselines go by, but for the budget.
    """
    finest = replace(
        reference,
        budget_bytes=None,
        block_size=min(policy.block_size for policy in (reference, *presets.values())),
        min_tokens=min(policy.min_tokens for policy in (reference, *presets.values())),
    )
    largest_first = sorted(set(budgets), key=lambda budget: (budget is not None, -(budget or 0)))
    found: list[Case] = []
    for regime, geometry in geometries.items():
        case = partial(Case, regime=regime, geometry=geometry)
        for budget in largest_first:
            found += [case(scope=str(p.scope), policy=replace(p, budget_bytes=budget)) for p in policies]
            snapshots = replace(reference, budget_bytes=budget)
            found.append(case(scope=WHOLE_SNAPSHOTS, policy=snapshots, simulate=whole_snapshots))
        found += [case(scope=str(p.scope), policy=p, preset=name) for name, p in presets.items()]
        found.append(case(scope=UPPER_BOUND, policy=finest, simulate=upper_bound))
    return found


def compare(
    trace: Trace, cases: Sequence[Case], on_requests: Callable[[int], None] = lambda _number: None
) -> Iterator[Row]:
    """The row of each case, in their order. `on_requests` is told how many more requests are done.

    What never met its budget would have gone the same way under any that it would not have met either, so that is not
    run again.
    """
    done: dict[Case, Totals] = {}
    for case in cases:
        without_budget = replace(case, policy=replace(case.policy, budget_bytes=None), preset=None)
        totals = done.get(without_budget)
        if totals is not None and _fits(totals, case.policy.budget_bytes):
            on_requests(len(trace))
        else:
            totals = case.simulate(trace, case.policy, case.geometry, lambda _number: on_requests(1))
            if not totals.evictions and not totals.dropped:
                done[without_budget] = totals
        yield _row(trace.name, case, totals)


def _fits(totals: Totals, budget_bytes: int | None) -> bool:
    return budget_bytes is None or totals.peak_bytes <= usable_bytes(budget_bytes)


def _row(trace: str, case: Case, totals: Totals) -> Row:
    return Row(
        trace=trace,
        scope=case.scope,
        regime=case.regime,
        budget_bytes=case.policy.budget_bytes,
        policy=case.preset,
        requests=totals.requests,
        hit_rate=totals.hit_rate,
        restored_share=totals.restored_share,
        written_share=totals.written_share,
        prompt_tokens=totals.prompt_tokens,
        restored_tokens=totals.restored_tokens,
        written_tokens=totals.written_tokens,
        selected_tokens=totals.selected_tokens,
        written_bytes=totals.written_bytes,
        peak_bytes=totals.peak_bytes,
        write_amplification=totals.write_amplification,
        evictions=totals.evictions,
        dropped=totals.dropped,
        seconds_saved=totals.seconds_saved,
        block_size=case.policy.block_size,
        min_tokens=case.policy.min_tokens,
        bytes_per_token=case.geometry.bytes_per_token,
        state_bytes=case.geometry.state_bytes,
        tokens_per_s=1 / case.policy.seconds_per_token,
    )
