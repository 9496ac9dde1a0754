"""A simulated daemon counts, and a simulated store evicts, as computed by hand and by the code of the real one; and
runs of a comparison that are left out change no figure."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from diskprefix.prefixstore.cache.tiers.nodes import Node
from diskprefix.prefixstore.simulate.comparison import OPTIMUM, Case, Regime, cases, compare
from diskprefix.prefixstore.simulate.geometry import CHECKPOINTS, SLICEABLE, TOKEN, Geometry
from diskprefix.prefixstore.simulate.optimum import optimum
from diskprefix.prefixstore.simulate.simulated_store import NewEntry, SimulatedStore
from diskprefix.prefixstore.simulate.simulator import Policy, Simulator, Totals, simulate
from diskprefix.prefixstore.simulate.trace import Trace, TraceRequest
from diskprefix.prefixstore.store.changes import node_bytes
from diskprefix.prefixstore.store.eviction import UsageTable, bytes_to_free, choose_victims, usable_bytes
from diskprefix.prefixstore.store.schema import USAGE_DTYPE, NodeKind
from diskprefix.scope import parse_scope
from diskprefix.tokens import TokenIds, as_token_ids, common_prefix_length
from diskprefix.values import Prompt, Scope
from tests.prefixstore.simulate.workloads import CATALOG, interleaved, thinking

MIB = 1 << 20
BLOCK = 16
GEOMETRY = Geometry(bytes_per_token=1024, logits_bytes=800)
FULL = Policy(scope=Scope("full"), block_size=BLOCK, min_tokens=BLOCK, interval=4 * BLOCK, cold_max=4 * BLOCK)


def asked(first: int, num_tokens: int, *, when: float = 0.0, **how: Any) -> TraceRequest:
    return TraceRequest(when, Prompt(np.arange(first, first + num_tokens, dtype=np.int32)), **how)


def replayed(*requests: TraceRequest, policy: Policy = FULL, geometry: Geometry = GEOMETRY) -> Totals:
    return simulate(Trace.of("t", requests), policy, geometry)


def test_the_simulator_restores_the_tokens_that_it_wrote() -> None:
    totals = replayed(asked(0, 40), asked(0, 40), asked(0, 70), policy=replace(FULL, seconds_per_token=0.5))
    assert (totals.requests, totals.hits, totals.prompt_tokens) == (3, 2, 150)
    # The repeat restores all, the longer one the two whole blocks.
    assert (totals.restored_tokens, totals.seconds_saved) == (40 + 32, 36.0)
    assert (totals.written_tokens, totals.selected_tokens) == (40 + 70 - 32, 150)
    assert (totals.hit_rate, totals.restored_share, totals.written_share) == (2 / 3, 72 / 150, 78 / 150)


def test_written_bytes_are_those_of_the_file() -> None:
    totals = replayed(asked(0, 40))
    block, tail = GEOMETRY.stored_bytes(BLOCK, NodeKind.BLOCK), GEOMETRY.stored_bytes(8, NodeKind.TAIL)
    assert totals.written_bytes == totals.peak_bytes == 2 * block + tail


def test_nothing_is_no_division_by_zero() -> None:
    totals = replayed()
    assert (totals.hit_rate, totals.restored_share, totals.written_share) == (0, 0, 0)


@pytest.mark.parametrize("how", [{"save": False}, {"remembered": False}])
def test_who_only_reads_or_fails_leaves_nothing_behind(how: dict[str, Any]) -> None:
    policy = replace(FULL, scope=Scope("auto", 4))
    simulator = Simulator(policy, GEOMETRY)
    simulator.step(asked(0, 40, **how))
    outcome = simulator.step(asked(0, 40))
    assert (outcome.restored, outcome.selection.recent) == (0, 0)
    assert replayed(asked(0, 40), asked(0, 40, **how)).restored_tokens == 40


def test_the_store_keeps_the_beginning_of_a_prompt_too_large_for_it() -> None:
    long = asked(1000, 16000)
    totals = replayed(asked(0, 160), long, replace(long, when=1.0), policy=replace(FULL, budget_bytes=4 * MIB))
    assert totals.dropped
    assert totals.hits == 1
    assert 160 < totals.restored_tokens < 16000


@pytest.mark.parametrize(("ttl_s", "asks", "later", "hits"), [(0, None, 1e6, 1), (60, None, 200.0, 0)])
@pytest.mark.parametrize("own", [False, True])
def test_what_was_not_used_for_its_time_expires(
    ttl_s: float, asks: float | None, later: float, hits: int, own: bool
) -> None:
    """The time is that of the daemon or of the request."""
    if own:
        ttl_s, asks = 0.0, ttl_s or None
    first = asked(0, 40, ttl_s=asks)
    assert replayed(first, asked(0, 40, when=later), policy=replace(FULL, ttl_s=ttl_s)).hits == hits


def test_a_use_keeps_what_would_expire() -> None:
    policy = replace(FULL, ttl_s=300.0)
    uses = [asked(0, 40, when=200.0 * n) for n in range(5)]
    assert replayed(*uses, policy=policy).hits == 4


def test_a_larger_budget_restores_no_less_of_conversations() -> None:
    trace = interleaved(num_requests=80)
    restored = [
        simulate(trace, Policy(scope=Scope("full"), budget_bytes=budget), SLICEABLE).restored_tokens
        for budget in (100 * MIB, 400 * MIB, None)
    ]
    assert restored == sorted(restored)
    assert restored[0] < restored[-1]


# The store


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def entry(number: int, parent: int = 0, *, size: int = MIB, kind: NodeKind = NodeKind.BLOCK, **how: Any) -> NewEntry:
    return NewEntry(Node(name(number), name(parent), 0, BLOCK, kind), size, how.pop("prefill_s", 1.0), **how)


def filled(*numbers: int, budget: int | None = 32 * MIB, has_states: bool = False, **how: Any) -> SimulatedStore:
    store = SimulatedStore(budget, has_states=has_states, **how)
    for number in numbers:
        assert store.publish([entry(number)], name(number), None, float(number))
    return store


def there(store: SimulatedStore, numbers: range) -> list[int]:
    return [number for number in numbers if name(number) in store]


@pytest.mark.cases(1)
@pytest.mark.parametrize("state_bytes", [0, 20 << 20], ids=["dense", "hybrid"])
def test_a_pause_computes_ahead_for_templates_that_drop_thoughts(state_bytes: int) -> None:
    def computed(**settings: Any) -> tuple[int, int]:
        policy = Policy(scope=Scope("auto", 30), memory_bytes=8 << 30, **settings)
        totals = simulate(thinking(), policy, Geometry(12 << 10, state_bytes, exact_at="token"))
        return totals.prompt_tokens - totals.restored_tokens, totals.ahead_tokens

    # A hybrid computes the last loop again at each question, as a dense model does, and not all since the start.
    without, none = computed(computes_ahead=False)
    assert 104_000 < without < 105_000
    assert none == 0
    waited, ahead = computed()
    assert waited < 62_000
    assert 40_000 < ahead < 60_000


def test_the_least_recently_used_goes_first_and_a_use_keeps_the_path() -> None:
    store = filled(*range(1, 21), budget=32 * MIB)
    store.publish([entry(100, parent=1)], name(100), None, 21.0)
    store.touch(name(100), 500.0, 1, None)
    assert store.publish([entry(200, size=10 * MIB)], name(200), None, 1000.0)
    assert {name(1), name(100)} <= {name(n) for n in there(store, range(300))}
    gone = sorted(set(range(2, 21)) - set(there(store, range(2, 21))))
    assert gone == list(range(2, 2 + len(gone)))
    assert store.evicted == len(gone) > 0


def test_expiry_is_looked_for_once_a_minute() -> None:
    store = filled(1, 2, budget=None, ttl_s=700.0)
    store.pass_time(701.5)
    assert there(store, range(3)) == [2]
    store.pass_time(750.0)
    assert there(store, range(3)) == [2]
    store.pass_time(761.6)
    assert (there(store, range(3)), store.evicted) == ([], 0)


Publications = list[tuple[int, int, int, float]]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6), st.integers(0, 3), st.floats(0, 600)), max_size=40),
    st.booleans(),
)
def test_victims_are_those_that_the_real_store_would_choose(publications: Publications, has_states: bool) -> None:
    """Each publication continues an earlier node; the choice is made again from records kept by hand."""
    store = SimulatedStore(24 * MIB, has_states=has_states)
    now = 0.0
    for number, (parent, megabytes, hits, pause) in enumerate(publications, start=1):
        now += pause
        parent %= number
        before = {name(n) for n in there(store, range(number))}
        expected = _expected_victims(store, before, name(parent), megabytes * MIB, has_states, now)
        kind = NodeKind.BLOCK if number % 2 else NodeKind.CHECKPOINT
        new = entry(number, parent, size=megabytes * MIB, kind=kind, prefill_s=float(number))
        was_stored = store.publish([new], name(number), None, now)
        after = {name(n) for n in there(store, range(number))}
        assert before - after == (expected if was_stored else set())
        assert store.used_bytes <= usable_bytes(24 * MIB)
        if was_stored and hits:
            store.touch(name(number), now, hits, None)


def _expected_victims(
    store: SimulatedStore, names: set[bytes], parent: bytes, need: int, has_states: bool, now: float
) -> set[bytes]:
    ordered = sorted(names)
    records = np.zeros(len(ordered), USAGE_DTYPE)
    for row, node in enumerate(ordered):
        records[row] = store._records[store._rows[node]]
    wanted = bytes_to_free(used=store.used_bytes, need=need, usable=usable_bytes(24 * MIB), budget=24 * MIB)
    if not wanted:
        return set()
    parents = {node: store.parent(node) for node in ordered}
    victims = choose_victims(
        UsageTable(ordered, records),
        parents.__getitem__,
        bytes_wanted=wanted,
        pinned={parent},
        now=now,
        saves_nothing=(lambda node: int.from_bytes(node, "big") % 2 == 1) if has_states else None,
    )
    return set(victims)


# The geometry


def test_a_node_takes_what_its_pieces_and_records_take_in_the_file() -> None:
    assert SLICEABLE.stored_bytes(256, NodeKind.BLOCK) == pytest.approx(256 * 23_040, rel=0.02)
    assert CHECKPOINTS.stored_bytes(0, NodeKind.CHECKPOINT) == pytest.approx(75 << 20, rel=0.02)
    of_tail = CHECKPOINTS.stored_bytes(7, NodeKind.TAIL) - CHECKPOINTS.stored_bytes(7, NodeKind.BLOCK)
    assert of_tail == pytest.approx((75 << 20) + 2 * 151_936, rel=0.02)
    assert Geometry(1024).stored_bytes(BLOCK, NodeKind.BLOCK) == node_bytes(BLOCK, [BLOCK * 1024])
    assert Geometry(1024, state_bytes=20_000).stored_bytes(0, NodeKind.CHECKPOINT) < 30_000, "of small states too"
    assert 0 < Geometry(0, state_bytes=10).stored_bytes(BLOCK, NodeKind.BLOCK) < 1000, "records alone"


@pytest.mark.parametrize("name", CATALOG)
@pytest.mark.parametrize("scope", ["full", "auto:8"])
def test_to_the_token_no_request_restores_less_and_no_bound_is_passed(name: str, scope: str) -> None:
    trace = CATALOG[name](num_requests=40)
    policy = Policy(scope=parse_scope(scope, param="scope"))
    to_the_token, to_the_block = Simulator(policy, TOKEN), Simulator(policy, SLICEABLE)
    gained = 0
    for request in trace:
        outcome, other = to_the_token.step(request), to_the_block.step(request)
        assert outcome.restored >= other.restored
        assert outcome.selection.selected == other.selection.selected
        gained += outcome.restored - other.restored
    assert gained > 0 or name == "one-off"
    assert to_the_token.totals.restored_tokens <= optimum(trace, policy, TOKEN).restored_tokens


token_lists = st.lists(st.integers(-1, 1), min_size=1, max_size=6).map(as_token_ids)


@given(children=st.lists(token_lists, max_size=12), wanted=token_lists, num_gone=st.integers(0, 4))
def test_the_child_that_shares_most_is_found(children: list[TokenIds], wanted: TokenIds, num_gone: int) -> None:
    store = SimulatedStore(None, has_states=False, ttl_s=1.0)
    parent = b"p" * 16
    # Of those that begin another one, only that one is stored.
    listed = sorted({ids.tobytes() for ids in children})
    stored = dict(
        enumerate(one for one in listed if not any(other.startswith(one) for other in listed if other != one))
    )
    for number, ids in stored.items():
        node = Node(name(number), parent, 0, len(ids) // 4, NodeKind.TAIL)
        when = 0.0 if number < num_gone else 1e3
        store.publish([NewEntry(node, 100, 1.0, token_ids=ids)], None, None, when)
    store.pass_time(1e3)
    left = [np.frombuffer(ids, np.int32) for number, ids in stored.items() if number >= num_gone]
    most = max((common_prefix_length(ids, wanted) for ids in left), default=0)
    found = next((ids for _, ids in store.similar(parent, wanted)), wanted[:0])
    assert common_prefix_length(found, wanted) == most
    assert list(store.similar(b"q" * 16, wanted)) == []


GEOMETRIES: dict[Regime, Geometry] = {"checkpoints": CHECKPOINTS, "sliceable": SLICEABLE}
REFERENCE = Policy(scope=Scope("off"))


def planned(*budgets: int | None, presets: dict[str, Policy] | None = None) -> list[Case]:
    policies = [replace(REFERENCE, scope=scope) for scope in (Scope("full"), Scope("auto", 8))]
    return cases(policies, GEOMETRIES, budgets, presets or {}, REFERENCE)


def test_cases_come_by_regime_and_by_budget_and_the_largest_budget_first() -> None:
    preset = Policy(scope=Scope("auto", 8), budget_bytes=7 * MIB, min_tokens=3)
    found = planned(2**30, None, 2**34, None, presets={"mine": preset})
    shown = [(case.regime, case.policy.budget_bytes, case.scope, case.preset) for case in found]
    scopes = "full", "auto:8", OPTIMUM
    expected: list[object] = []
    for regime in ("checkpoints", "sliceable"):
        expected += [(regime, budget, scope, None) for budget, scope in product((None, 2**34, 2**30), scopes)]
        expected.append((regime, 7 * MIB, "auto:8", "mine"))
    assert shown == expected
    assert [case.policy for case in found if case.preset] == [preset, preset]


def test_the_bound_holds_for_policy_files_too() -> None:
    finer = {"a": replace(REFERENCE, block_size=16), "b": replace(REFERENCE, min_tokens=3, budget_bytes=MIB)}
    bounds = [case.policy for case in planned(None, presets=finer) if case.scope == OPTIMUM]
    assert bounds == [replace(REFERENCE, block_size=16, min_tokens=3)] * 2


def test_all_requests_of_all_cases_are_told_of() -> None:
    told: list[int] = []
    found = planned(None, 2**40, 50 * MIB)
    list(compare(interleaved(num_requests=12), found, told.append))
    assert sum(told) == 12 * len(found)
