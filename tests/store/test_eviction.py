from __future__ import annotations

import math
from collections.abc import Container, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.store.eviction import (
    UsageTable,
    after_use,
    bytes_to_free,
    choose_victims,
    expired,
    longer_ttl,
    recorded_ttl,
    usable_bytes,
)
from diskprefix.store.schema import USAGE_DTYPE, UsageRecord

NOW = 1_000_000.0
DAY_S = 86_400.0
YEAR_S = 365 * DAY_S

Tree = tuple[dict[bytes, UsageRecord], dict[bytes, bytes]]
"""Usage records by node, and each node's parent; b"" for a first block."""


def name(i: int) -> bytes:
    return i.to_bytes(16, "big")


def usage(
    *,
    age_s: float = 100.0,
    children: int = 0,
    stored_bytes: int = 10,
    prefill_s: float = 0.0,
    written_s_ago: float = DAY_S,
    ttl_s: int = 0,
) -> UsageRecord:
    return UsageRecord(
        last_used=NOW - age_s,
        children=children,
        stored_bytes=stored_bytes,
        prefill_s=prefill_s,
        created_at=NOW - written_s_ago,
        ttl_s=ttl_s,
    )


def victims(
    records: dict[bytes, UsageRecord],
    parents: dict[bytes, bytes] | None = None,
    *,
    wanted: int = 10**9,
    pinned: frozenset[bytes] = frozenset(),
    bare: Container[bytes] = (),
    now: float = NOW,
) -> list[bytes]:
    """`bare`: nodes that save nothing by themselves."""
    parent_of = (parents or dict.fromkeys(records, b"")).__getitem__
    return choose_victims(
        table_of(records),
        parent_of,
        bytes_wanted=wanted,
        pinned=pinned,
        now=now,
        saves_nothing=lambda node: node in bare,
    )


def table_of(usage: Mapping[bytes, UsageRecord]) -> UsageTable:
    return UsageTable(list(usage), np.array(list(usage.values()), USAGE_DTYPE))


def order(*records: UsageRecord, now: float = NOW) -> list[int]:
    """The order in which nodes that nothing continues are given up."""
    chosen = victims({name(i): record for i, record in enumerate(records)}, now=now)
    return [int.from_bytes(victim, "big") for victim in chosen]


recorded_ttls = st.sampled_from([0, 0, 4, -4, 3600, -3600, 2**31 - 1, -(2**31)])


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    count = draw(st.integers(1, 25))
    parents = {name(i): draw(st.sampled_from([b"", *(name(j) for j in range(i))])) for i in range(count)}
    times = st.one_of(st.integers(-5, 5).map(float), st.floats(-2 * YEAR_S, 2 * YEAR_S))
    nodes = {
        node: usage(
            age_s=draw(times),
            children=sum(parent == node for parent in parents.values()),
            stored_bytes=draw(st.integers(1, 100)),
            prefill_s=draw(st.sampled_from([0.0, 0.01, 0.5, 1e4])),
            written_s_ago=draw(times),
            ttl_s=draw(recorded_ttls),
        )
        for node in parents
    }
    return nodes, parents


pins = st.sets(st.integers(0, 24).map(name), max_size=4).map(frozenset)


@given(trees(), st.integers(0, 3000), pins, st.sets(st.integers(0, 24).map(name)))
def test_each_victim_is_the_least_recently_used_of_those_that_may_go_and_no_more_go_than_needed(
    tree: Tree, wanted: int, pinned: frozenset[bytes], bare: set[bytes]
) -> None:
    """What saves nothing by itself goes first."""
    nodes, parents = tree
    kept, freed = set(nodes), 0
    age_s = {node: math.inf if node in bare else max(0.0, NOW - record.last_used) for node, record in nodes.items()}
    for victim in victims(nodes, parents, wanted=wanted, pinned=pinned, bare=bare):
        assert freed < wanted
        continued = {parents[child] for child in kept}
        assert victim == min((n for n in kept if n not in continued | pinned), key=lambda n: (-age_s[n], n))
        kept.remove(victim)
        freed += nodes[victim].stored_bytes
    continued = {parents[child] for child in kept}
    assert freed >= wanted or kept <= continued | pinned


@given(trees(), st.integers(0, 3000), st.sets(st.integers(0, 24).map(name)), st.data())
def test_a_table_with_rows_that_are_nobodys_gives_the_same_choice(
    tree: Tree, wanted: int, bare: set[bytes], data: st.DataObject
) -> None:
    nodes, parents = tree
    names = data.draw(st.permutations([*nodes, *(bytes(1) for _ in range(5))]))
    rows = {node: row for row, node in enumerate(names) if node in nodes}
    table = UsageTable(names, np.zeros(len(names), USAGE_DTYPE), rows)
    table.records["children"] = 1
    table.records[list(map(rows.__getitem__, nodes))] = table_of(nodes).records
    chosen = choose_victims(
        table, parents.__getitem__, bytes_wanted=wanted, pinned=(), now=NOW, saves_nothing=bare.__contains__
    )
    assert chosen == victims(nodes, parents, wanted=wanted, bare=bare)


@given(*[st.integers(0, 2**40)] * 4)
def test_room_is_made_only_where_it_lacks_and_then_some_ahead(used: int, need: int, usable: int, budget: int) -> None:
    freed = bytes_to_free(used=used, need=need, usable=usable, budget=budget)
    if used + need <= usable:
        assert freed == 0
    else:
        assert freed == max(used + need - usable, budget // 64)


def test_a_tenth_of_the_limit_stays_free() -> None:
    assert usable_bytes(10 << 30) == (9 << 30) - (1 << 20)


def test_an_empty_store_has_nothing_to_give() -> None:
    assert victims({}) == gone({}, {}, ttl_s=0) == []


def test_names_that_end_in_zero_bytes_are_told_apart() -> None:
    short, long = b"a" * 15 + b"\0", b"a" * 14 + b"\0\0"
    assert victims({short: usage(age_s=1), long: usage(age_s=2)}) == [long, short]


def used_once(record: UsageRecord, when: float, hits: int, ttl_s: int = 0) -> UsageRecord:
    (used,) = after_use(table_of({b"": record}).records, when, hits, ttl_s).tolist()
    return UsageRecord(*used)


@given(trees(), st.floats(-10 * DAY_S, 10 * DAY_S), st.integers(0, 5), recorded_ttls, st.sampled_from([0, 2**32 - 2]))
def test_many_records_are_used_at_once_as_each_by_itself(
    tree: Tree, elapsed_s: float, hits: int, ttl_s: int, restores: int
) -> None:
    nodes = {node: record._replace(restores=restores) for node, record in tree[0].items()}
    table = table_of(nodes)
    used = after_use(table.records, NOW + elapsed_s, hits, ttl_s)
    for record, found in zip(nodes.values(), used, strict=True):
        assert found["restores"] == min(record.restores + hits, 2**32 - 1)
        assert found["ttl_s"] == longer_ttl(record.ttl_s, ttl_s)
        assert found["last_used"] == max(record.last_used, NOW + elapsed_s)
    assert table.records.tobytes() == table_of(nodes).records.tobytes()


def test_a_time_of_no_meaning_goes_first_and_disturbs_no_other() -> None:
    nan, inf = math.nan, math.inf
    assert order(usage(age_s=50), usage(age_s=nan), usage(age_s=200), usage(age_s=inf)) in ([1, 3, 2, 0], [3, 1, 2, 0])


def gone(
    records: dict[bytes, UsageRecord],
    parents: dict[bytes, bytes],
    *,
    ttl_s: float,
    pinned: frozenset[bytes] = frozenset(),
) -> list[bytes]:
    return expired(table_of(records), parents.__getitem__, ttl_s=ttl_s, pinned=pinned, now=NOW)


def limit_s(recorded: int, ttl_s: float) -> float:
    """After how many seconds a node may go whose record says `recorded`, where the daemon says `ttl_s`."""
    default = ttl_s if ttl_s else math.inf
    if recorded == 0:
        return default
    return recorded if recorded > 0 else max(-recorded, default)


@given(trees(), st.sampled_from([0.0, 3.0, 3600.0, YEAR_S]), pins)
def test_exactly_what_nobody_used_for_its_time_to_live_expires_children_first(
    tree: Tree, ttl_s: float, pinned: frozenset[bytes]
) -> None:
    nodes, parents = tree
    names = gone(nodes, parents, ttl_s=ttl_s, pinned=pinned)
    for i, node in enumerate(names):
        assert all(child in names[:i] for child, parent in parents.items() if parent == node)
    ages = {node: max(0.0, NOW - record.last_used) for node, record in nodes.items()}
    kept = {node for node in nodes if ages[node] < limit_s(nodes[node].ttl_s, ttl_s) or node in pinned}
    while not kept >= (needed := {parents[node] for node in kept} - {b""}):
        kept |= needed
    assert set(names) == set(nodes) - kept


def test_a_clock_that_jumped_back_expires_nothing_and_a_time_of_no_meaning_does() -> None:
    records = {name(0): usage(age_s=-YEAR_S), name(1): usage(age_s=math.nan), name(2): usage(age_s=DAY_S)}
    assert set(gone(records, dict.fromkeys(records, b""), ttl_s=DAY_S)) == {name(1), name(2)}


@given(recorded_ttls, recorded_ttls, st.sampled_from([0.0, 3.0, 600.0, YEAR_S]))
def test_the_longer_of_two_times_is_the_longer_one_whatever_the_daemons_is(a: int, b: int, ttl_s: float) -> None:
    longer = longer_ttl(a, b)
    assert limit_s(longer, ttl_s) == max(limit_s(a, ttl_s), limit_s(b, ttl_s))
    assert longer == longer_ttl(b, a) == longer_ttl(longer, b)
    assert -(2**31) <= longer < 2**31


@pytest.mark.parametrize(
    ("asked_s", "recorded"), [(None, 0), (300.0, 300), (0.2, 1), (1.5, 2), (100 * YEAR_S, 2**31 - 1)]
)
def test_a_time_to_live_is_recorded_in_whole_seconds_that_fit_the_record(asked_s: float | None, recorded: int) -> None:
    assert recorded_ttl(asked_s) == recorded
    assert used_once(usage(ttl_s=1), NOW, 1, recorded).ttl_s == (max(recorded, 1) if recorded else -1)
