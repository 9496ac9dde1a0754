"""Which runs there are, and that leaving some out changes no figure."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from diskprefix.extras.simulate.comparison import UPPER_BOUND, Case, Regime, cases, compare
from diskprefix.extras.simulate.geometry import CHECKPOINTS, SLICEABLE, Geometry
from diskprefix.extras.simulate.simulator import Policy, Totals
from diskprefix.extras.simulate.trace import Trace
from diskprefix.values import Scope
from tests.extras.simulate.workloads import interleaved

GEOMETRIES: dict[Regime, Geometry] = {"checkpoints": CHECKPOINTS, "sliceable": SLICEABLE}
REFERENCE = Policy(scope=Scope("off"))
MIB = 2**20


def planned(*budgets: int | None, presets: dict[str, Policy] | None = None) -> list[Case]:
    policies = [replace(REFERENCE, scope=scope) for scope in (Scope("full"), Scope("auto", 8))]
    return cases(policies, GEOMETRIES, budgets, presets or {}, REFERENCE)


def test_cases_come_by_regime_and_by_budget_and_the_largest_budget_first() -> None:
    preset = Policy(scope=Scope("auto", 8), budget_bytes=7 * MIB, min_tokens=3)
    found = planned(2**30, None, 2**34, None, presets={"mine": preset})
    shown = [(case.regime, case.policy.budget_bytes, case.scope, case.preset) for case in found]
    scopes = "full", "auto:8"
    expected: list[object] = []
    for regime in ("checkpoints", "sliceable"):
        expected += [(regime, budget, scope, None) for budget, scope in product((None, 2**34, 2**30), scopes)]
        expected += [(regime, 7 * MIB, "auto:8", "mine"), (regime, None, UPPER_BOUND, None)]
    assert shown == expected
    assert [case.policy for case in found if case.preset] == [preset, preset]


def test_the_bound_holds_for_policy_files_too() -> None:
    finer = {"a": replace(REFERENCE, block_size=16), "b": replace(REFERENCE, min_tokens=3, budget_bytes=MIB)}
    bounds = [case.policy for case in planned(None, presets=finer) if case.scope == UPPER_BOUND]
    assert bounds == [replace(REFERENCE, block_size=16, min_tokens=3)] * 2


def test_what_is_not_run_again_is_what_it_would_have_been() -> None:
    trace = interleaved(num_requests=40)
    budgets = None, 2**40, 600 * MIB, 100 * MIB, 50 * MIB
    together = [row.as_dict() for row in compare(trace, planned(*budgets))]
    alone = [row.as_dict() for case in planned(*budgets) for row in compare(trace, [case])]
    assert together == alone
    assert any(row["evictions"] for row in together)


def test_what_was_evicted_or_dropped_tells_nothing_of_another_budget() -> None:
    trace = interleaved(num_requests=1)
    for totals, expected in ((Totals(), 1), (Totals(evictions=1), 2), (Totals(dropped=1), 2)):
        runs: list[int | None] = []

        def count(_trace: Trace, policy: Policy, *_: object, totals: Totals = totals, runs: Any = runs) -> Totals:
            runs.append(policy.budget_bytes)
            return totals

        found = [replace(case, simulate=count) for case in planned(2**35, 2**34)[:3:2]]
        assert [case.scope for case in found] == ["full", "full"]
        list(compare(trace, found))
        assert len(runs) == expected


def test_all_requests_of_all_cases_are_told_of() -> None:
    told: list[int] = []
    found = planned(None, 2**40, 50 * MIB)
    list(compare(interleaved(num_requests=12), found, told.append))
    assert sum(told) == 12 * len(found)
    assert len(told) < sum(told), "some cases need no run of their own"


def test_people_read_the_name_of_a_policy_file_beside_its_scope() -> None:
    plain = planned(None)[0]
    named = replace(plain, preset="chat")
    assert (plain.label, named.label) == ("full", "chat (full)")
