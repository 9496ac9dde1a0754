"""The choice of what is evicted, and the races of evicting it: what another thread does between the two."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from diskprefix.errors import StoreFull
from diskprefix.identity import identity_of_build, identity_text
from diskprefix.prefixstore.store import evictor
from diskprefix.prefixstore.store.eviction import (
    UsageTable,
    after_use,
    bytes_to_free,
    bytes_to_measure,
    choose_victims,
    expired,
    longer_ttl,
    must_measure,
    recorded_ttl,
    usable_bytes,
)
from diskprefix.prefixstore.store.schema import USAGE_DTYPE, NodeKind, UsageRecord, node_root
from diskprefix.prefixstore.store.statistics.savings import SavingsLog, Tally, total_savings
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.tokens import root_hash
from tests.prefixstore.store.building import (
    BLOCK,
    Clock,
    is_clean,
    is_whole,
    layout_of,
    of_root,
    open_store,
    prompt,
    publication,
)

NOW = 1_000_000.0
HOUR_S, DAY_S = 3_600.0, 86_400.0
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


recorded_ttls = st.sampled_from([0, 0, 4, -4, 3600, -3600, 2**31 - 1, -(2**31)])


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    count = draw(st.integers(0, 25))
    parents = {name(i): draw(st.sampled_from([b"", *(name(j) for j in range(i))])) for i in range(count)}
    near = st.integers(-5, 5).map(float)
    times = st.one_of(near, near.map(HOUR_S.__add__), st.floats(-2 * YEAR_S, 2 * YEAR_S), st.just(math.nan))
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


def age_of(record: UsageRecord) -> float:
    """A use in the future is one now, a time of no meaning is the oldest."""
    return math.inf if math.isnan(record.last_used) else max(0.0, NOW - record.last_used)


pins = st.sets(st.integers(0, 24).map(name), max_size=4).map(frozenset)


@given(trees(), st.integers(0, 3000), pins, st.sets(st.integers(0, 24).map(name)))
def test_each_victim_is_the_least_recently_used_of_those_that_may_go_and_no_more_go_than_needed(
    tree: Tree, wanted: int, pinned: frozenset[bytes], bare: set[bytes]
) -> None:
    """What saves nothing by itself, and was not used for an hour, goes first."""
    nodes, parents = tree
    kept, freed = set(nodes), 0
    age_s = {node: age_of(record) for node, record in nodes.items()}
    is_useless = {node: node in bare and age >= HOUR_S for node, age in age_s.items()}
    for victim in victims(nodes, parents, wanted=wanted, pinned=pinned, bare=bare):
        assert freed < wanted
        continued = {parents[child] for child in kept}
        leaves = (n for n in kept if n not in continued | pinned)
        assert victim == min(leaves, key=lambda n: (not is_useless[n], -age_s[n], n))
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


def test_a_store_that_has_just_evicted_is_full_all_the_same() -> None:
    """It evicts 10 bytes at a time, so up to as many are free."""
    budget, usable = 640, 500
    measured = [bytes_to_measure(used=used, usable=usable, budget=budget) for used in (500, 490, 481, 480, 0)]
    assert measured == [10, 10, 10, 0, 0]
    assert [must_measure(refused, budget) for refused in (0, 9, 10)] == [False, False, True]


def test_a_tenth_of_the_limit_stays_free() -> None:
    assert usable_bytes(10 << 30) == (9 << 30) - (1 << 20)


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
        np.testing.assert_equal(found["last_used"], np.maximum(record.last_used, NOW + elapsed_s))
    assert table.records.tobytes() == table_of(nodes).records.tobytes()


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
    kept = {node for node in nodes if age_of(nodes[node]) < limit_s(nodes[node].ttl_s, ttl_s) or node in pinned}
    while not kept >= (needed := {parents[node] for node in kept} - {b""}):
        kept |= needed
    assert set(names) == set(nodes) - kept


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


Then = Callable[[list[bytes]], object]


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Store:
    return open_store(tmp_path, budget_bytes=14 << 20, clock=clock)


def saved(store: Store, clock: Clock, seed: int) -> Publication:
    """A prompt of three blocks, of about 1 MB each, and a tail."""
    clock.now += 11
    pub = publication(store, prompt(seed, 3 * BLOCK + 1), payload_bytes=1_000_000)
    store.publish(pub)
    return pub


def after_the_choice(monkeypatch: pytest.MonkeyPatch, name: str, then: Then) -> None:
    """Call `then` with the first victims that are chosen, before they are deleted, as another thread could act then."""
    choose: Callable[..., list[bytes]] = getattr(evictor, name)

    def chosen_then(*args: Any, **options: Any) -> list[bytes]:
        victims = choose(*args, **options)
        monkeypatch.undo()
        then(victims)
        return victims

    monkeypatch.setattr(evictor, name, chosen_then)


def test_a_node_that_is_pinned_after_it_was_found_expired_stays(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pub = saved(store, clock, 1)
    assert pub.last_node is not None
    clock.now += 1000
    after_the_choice(monkeypatch, "expired", lambda victims: store.evictor.pin(victims[0]))
    store.evictor.expire(100)
    assert is_whole(store, pub)
    store.evictor.unpin(pub.last_node)
    store.evictor.expire(100)
    assert store.counts()["blocks"] == 0


def test_a_node_that_is_continued_after_it_was_chosen_stays(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pub = saved(store, clock, 1)
    clock.now += 1000
    longer = np.concatenate([prompt(1, 3 * BLOCK + 1)[: 3 * BLOCK], prompt(9, BLOCK)])
    child = publication(store, longer, payload_bytes=1_000_000)
    after_the_choice(monkeypatch, "expired", lambda _: store._try_write(child) or pytest.fail("not written"))
    store.evictor.expire(100)
    assert is_whole(store, child)
    assert not is_whole(store, pub)


class TwoBuilds:
    """Two builds of a model, whose daemons save in turns in one folder that has room for some twenty blocks."""

    def __init__(self, folder: Path, clock: Clock, state_bytes: int = 0) -> None:
        self.clock, self._layout = clock, layout_of(300_000, state_bytes)
        self._store = open_store(folder, budget_bytes=8 << 20, clock=clock)
        one = identity_text({"model": "m"}, BLOCK, 1, self._layout)
        self.identities = [identity_of_build(one, build) for build in ("one", "two")]
        self.saved: dict[bytes, tuple[int, float]] = {}
        """By block, which build has saved it, and when."""

    def save(self, build: int, seed: int) -> set[bytes]:
        """Has a build save a block. Returns the blocks that were evicted until then."""
        identity, store = self.identities[build], self._store
        self.clock.now += 30.0
        store.evictor.served = (identity,)
        one_block = publication(
            store, prompt(seed, BLOCK), root=root_hash(identity), layout=self._layout, end_kind=NodeKind.BLOCK
        )
        store.publish(of_root(one_block, structs.replace(one_block.root_record, identity=identity)))
        with store.snapshot() as snapshot:
            stored = {*snapshot.keys("usage")}
        self.saved |= dict.fromkeys(sorted(stored - self.saved.keys()), (build, self.clock.now))
        return self.saved.keys() - stored


@pytest.mark.parametrize("state_bytes", [0, 1000])
def test_of_two_builds_that_save_in_turns_each_keeps_what_it_has_just_saved(
    tmp_path: Path, clock: Clock, state_bytes: int
) -> None:
    """To each, the state of the other is of no use. If the model has states, no block is until a checkpoint follows."""
    builds, evicted = TwoBuilds(tmp_path, clock, state_bytes), dict[bytes, float]()
    for number in range(60):
        gone = builds.save(number % 2, number) - evicted.keys()
        evicted |= sorted(((node, builds.saved[node][1]) for node in gone), key=itemgetter(1))
    assert len(evicted) > 20
    assert [*evicted.values()] == sorted(evicted.values())


def test_what_another_build_has_not_used_for_an_hour_goes_first(tmp_path: Path, clock: Clock) -> None:
    builds, seeds = TwoBuilds(tmp_path, clock), itertools.count()
    for build, num_blocks in ((0, 10), (1, 5)):
        for _ in range(num_blocks):
            assert not builds.save(build, next(seeds))
    clock.now += HOUR_S
    while not (gone := builds.save(0, next(seeds))):
        pass
    assert {builds.saved[node][0] for node in gone} == {1}


@pytest.mark.parametrize("refusals", [3, 1000])
def test_where_free_pages_are_too_scattered_for_a_payload_more_is_evicted_each_time(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """LMDB finds no run of pages for the first so many times, as after thousands of publications in a small store."""
    pubs = [saved(store, clock, seed) for seed in range(3)]
    clock.now += 11
    fresh = publication(store, prompt(9, BLOCK), payload_bytes=1_000_000)
    write, left = store._try_write, [refusals]

    def refuse(pub: Publication) -> bool:
        left[0] -= 1
        return left[0] < 0 and write(pub)

    monkeypatch.setattr(store, "_try_write", refuse)
    if refusals > 3:
        with pytest.raises(StoreFull):
            store.publish(fresh)
    else:
        assert store.publish(fresh) > 0
        assert is_whole(store, fresh)
        assert any(is_whole(store, pub) for pub in pubs)


def test_roots_without_blocks_are_evicted_and_their_counts_stay_in_the_sum(store: Store, clock: Clock) -> None:
    """A client who chooses salts makes many."""
    log = SavingsLog(store)
    for number in range(250):
        clock.now += 11
        identity = f"{number:04000}"
        pub = publication(store, prompt(number, BLOCK + 1), payload_bytes=100_000, root=root_hash(identity))
        record = structs.replace(pub.root_record, identity=identity, tenant=f"{number:032x}")
        store.publish(of_root(pub, record))
        log.record_request(store.epochs.of(record.tenant), pub.root, record, Tally(requests=1))
        store.write_from(log.writing)
    with store.snapshot() as snapshot:
        with_nodes = {node_root(snapshot.get_record("nodes", name)) for name in snapshot.keys("usage")}
        roots = set(snapshot.keys("roots"))
        assert with_nodes < roots, "the others still have recent prompts and counts"
        bare = len(roots - with_nodes)
        assert bare * 2 * 4096 <= store.budget_bytes / 16 + 64 * 2 * 4096
        assert {key[:16] for key in [*snapshot.keys("seen"), *snapshot.keys("notes")]} <= roots
        assert total_savings(snapshot).total.requests == 250
    assert is_clean(store)
