"""Many policies over one workload, and a row of figures for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal, TypeAlias

from diskprefix.simulate.baselines import OnStep, upper_bound, whole_snapshots
from diskprefix.simulate.geometry import Geometry
from diskprefix.simulate.simulator import Policy, Totals, simulate
from diskprefix.simulate.trace import Trace
from diskprefix.store.eviction import usable_bytes

Regime: TypeAlias = Literal["sliceable", "checkpoints"]

REGIMES: tuple[Regime, ...] = ("sliceable", "checkpoints")
WHOLE_SNAPSHOTS, UPPER_BOUND = "whole-snapshots", "upper-bound"
"""Rows of these two have such a name in the place of a scope."""


Simulate: TypeAlias = Callable[[Trace, Policy, Geometry, OnStep], Totals]
"""What runs a workload: the daemon's rules, or one of the baselines."""


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

    `budget_bytes` None is without end; `policy` names the policy file whose settings these are. The figures are those
    of `Totals`. `block_size` and `min_tokens` are the policy's, in tokens, `bytes_per_token` and `state_bytes` those of
    the `Geometry`, `tokens_per_s` is the speed of prefill.
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


_OF_TOTALS = [field.name for field in fields(Row) if hasattr(Totals, field.name)]


def cases(
    policies: Sequence[Policy],
    geometries: Mapping[Regime, Geometry],
    budgets: Sequence[int | None],
    presets: Mapping[str, Policy],
    reference: Policy,
) -> list[Case]:
    """What is to be run over a workload, regime by regime.

    In each regime come the budgets, the largest first, and under each the `policies` and then whole snapshots. The
    `presets`, which have budgets of their own, and the upper bound follow. `reference` is what the baselines go by.
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
    policy, geometry = case.policy, case.geometry
    return Row(
        trace=trace,
        scope=case.scope,
        regime=case.regime,
        budget_bytes=policy.budget_bytes,
        policy=case.preset,
        **{name: getattr(totals, name) for name in _OF_TOTALS},
        block_size=policy.block_size,
        min_tokens=policy.min_tokens,
        bytes_per_token=geometry.bytes_per_token,
        state_bytes=geometry.state_bytes,
        tokens_per_s=1 / policy.seconds_per_token,
    )
