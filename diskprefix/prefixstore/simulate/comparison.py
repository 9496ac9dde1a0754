"""Compares policies: many runs over one workload, and a row of figures for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict, replace

from diskprefix.prefixstore.simulate.geometry import CHECKPOINTS, SLICEABLE, TOKEN, Geometry
from diskprefix.prefixstore.simulate.optimum import optimum
from diskprefix.prefixstore.simulate.simulator import Policy, Totals, simulate
from diskprefix.prefixstore.simulate.trace import Trace, TraceRequest

Regime: TypeAlias = Literal["token", "sliceable", "checkpoints"]

GEOMETRIES: Mapping[Regime, Geometry] = {"token": TOKEN, "sliceable": SLICEABLE, "checkpoints": CHECKPOINTS}
REGIMES: tuple[Regime, ...] = tuple(GEOMETRIES)
OPTIMUM = "optimum"
"""The name of the baseline, used in place of a scope."""

Simulate: TypeAlias = Callable[[Trace, Policy, Geometry], Totals]
"""Runs a workload under the daemon's rules, or for the optimum."""


def regime_of(geometry: Geometry | None) -> Regime:
    """Returns the regime of a model's state. If that is unknown, returns the regime of most models."""
    if geometry is None:
        return "token"
    return "checkpoints" if geometry.state_bytes else "token" if geometry.exact_at == "token" else "sliceable"


class Case(Struct, frozen=True, kw_only=True):
    """One run over a workload. `scope` names its row, and `preset` is the policy file of its settings."""

    scope: str
    regime: Regime
    policy: Policy
    geometry: Geometry
    simulate: Simulate = simulate
    preset: str | None = None

    @property
    def label(self) -> str:
        """The scope, and the policy file if there is one."""
        return f"{self.preset} ({self.scope})" if self.preset else self.scope


class Row(Struct, frozen=True, eq=False):
    """The result of `case` on the workload named `trace`."""

    trace: str
    case: Case
    totals: Totals

    def as_dict(self) -> dict[str, Any]:
        """Returns the settings and the figures. `budget_bytes` is None without a limit."""
        policy, geometry, totals = self.case.policy, self.case.geometry, self.totals
        shares = ("hit_rate", "restored_share", "written_share")
        return {
            "trace": self.trace,
            "scope": self.case.scope,
            "regime": self.case.regime,
            "budget_bytes": policy.budget_bytes,
            "write_budget_bytes": policy.write_budget_bytes,
            "policy": self.case.preset,
            **asdict(totals),
            **{name: getattr(totals, name) for name in shares},
            "block_size": policy.block_size,
            "min_tokens": policy.min_tokens,
            "bytes_per_token": geometry.bytes_per_token,
            "state_bytes": geometry.state_bytes,
            "tokens_per_s": 1 / policy.seconds_per_token,
        }


def cases(
    policies: Sequence[Policy],
    geometries: Mapping[Regime, Geometry],
    budgets: Sequence[int | None],
    presets: Mapping[str, Policy],
    reference: Policy,
) -> list[Case]:
    """Returns the runs over a workload, by regime: the `policies` and the optimum for each budget, the largest first,
    then the `presets`, which have their own budgets. The optimum has the finest settings of all."""
    own = (reference, *presets.values())
    block_size, min_tokens = min(policy.block_size for policy in own), min(policy.min_tokens for policy in own)
    finest = replace(reference, block_size=block_size, min_tokens=min_tokens)
    largest_first = sorted(set(budgets), key=lambda budget: (budget is not None, -(budget or 0)))
    runs: list[Case] = []
    for regime, geometry in geometries.items():
        case = partial(Case, regime=regime, geometry=geometry)
        for budget in largest_first:
            runs += [case(scope=str(p.scope), policy=replace(p, budget_bytes=budget)) for p in policies]
            runs.append(case(scope=OPTIMUM, policy=replace(finest, budget_bytes=budget), simulate=optimum))
        runs += [case(scope=str(p.scope), policy=p, preset=name) for name, p in presets.items()]
    return runs


def compare(
    trace: Trace, cases: Sequence[Case], on_requests: Callable[[int], None] = lambda _number: None
) -> Iterator[Row]:
    """Yields the row of each case, in order. Calls `on_requests` with the number of requests since its last call."""

    left = 0

    def replay() -> Iterator[TraceRequest]:
        nonlocal left
        for request in trace:
            yield request
            # The optimum reads a trace several times.
            if left:
                left -= 1
                on_requests(1)

    for case in cases:
        left = len(trace)
        yield Row(trace.name, case, case.simulate(Trace(trace.name, len(trace), replay), case.policy, case.geometry))
