"""Passes over a whole store: few ghosts are in memory at once, and no plan or check keeps others from writing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from diskprefix.prefixstore.store import compact
from diskprefix.prefixstore.store import ghosts as ghosts_module
from diskprefix.prefixstore.store import purge as purge_module
from diskprefix.prefixstore.store import snapshot as snapshot_module
from diskprefix.prefixstore.store import verify as verify_module
from diskprefix.prefixstore.store.changes import Changes
from diskprefix.prefixstore.store.ghosts import newest_first
from diskprefix.prefixstore.store.notes import Notes
from diskprefix.prefixstore.store.purge import PurgeFilter, plan_purge, purge
from diskprefix.prefixstore.store.schema import NodeKind, NodeRecord, decode_node
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.savings import total_savings
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.tree import list_entries
from diskprefix.prefixstore.store.verify import RecordCheck, remove_damaged, verify_index
from tests.prefixstore.store.building import BLOCK, ROOT, open_store, prompt, publication

NUM_GHOSTS = 400
FEW = 60
"""The blocks of two seen prompts, and of what is kept of those before."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with a saved prompt, a seen one that continues it, and others with many ghosts."""
    monkeypatch.setattr(ghosts_module, "_KEPT_BYTES", 20 * BLOCK * 4, raising=False)
    store = open_store(tmp_path / "kv")
    first = prompt(1, 3 * BLOCK + 2)
    store.publish(publication(store, first, payload_bytes=200))
    for seed in range(NUM_GHOSTS // 20):
        start = first[: 3 * BLOCK] if seed == 0 else first[:0]
        seen = publication(store, np.concatenate([start, prompt(10 + seed, 20 * BLOCK)]), payload_bytes=200)
        store.publish(seen.without_nodes())
    assert store.counts()["ghosts"] == NUM_GHOSTS
    return store


class Live:
    """Counts the decoded records of ghosts that are in memory, and the most at once."""

    def __init__(self) -> None:
        self.now = self.most = self.decoded = 0

    def watch(self, node: NodeRecord) -> None:
        if node.kind == NodeKind.GHOST:
            self.decoded += 1
            self.now += 1
            self.most = max(self.most, self.now)
            weakref.finalize(node.token_ids, self.drop)

    def drop(self) -> None:
        self.now -= 1


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    live, decode = Live(), decode_node

    def watched(name: bytes, value: bytes | memoryview) -> NodeRecord:
        node = decode(name, value)
        live.watch(node)
        return node

    monkeypatch.setattr(snapshot_module, "decode_node", watched)
    return live


def plan(store: Store, purge_filter: PurgeFilter) -> None:
    with store.snapshot() as snapshot:
        plan_purge(snapshot, purge_filter, store.clock() + 10)


def entry(store: Store) -> frozenset[bytes]:
    with store.snapshot() as snapshot:
        return frozenset(snapshot.keys("entries"))


def in_snapshot(read: Callable[[Snapshot], object]) -> Callable[[Store], object]:
    def run(store: Store) -> None:
        with store.snapshot() as snapshot:
            read(snapshot)

    return run


def read_whole_history(snapshot: Snapshot) -> None:
    assert sum(len(seen.blocks) for seen in newest_first(snapshot, ROOT)) >= NUM_GHOSTS


PASSES: dict[str, Callable[[Store], object]] = {
    "plan of an entry": lambda store: plan(store, PurgeFilter(entries=entry(store))),
    "plan of everything": lambda store: plan(store, PurgeFilter()),
    "plan by age": lambda store: plan(store, PurgeFilter(older_than_s=1.0)),
    "purge of an entry": lambda store: purge(store, PurgeFilter(entries=entry(store)), store.clock()),
    "purge of everything": lambda store: purge(store, PurgeFilter(), store.clock()),
    "verify": verify_index,
    "verify and fix": remove_damaged,
    "entries": in_snapshot(list_entries),
    "history": in_snapshot(read_whole_history),
    "expire": lambda store: store.evictor.expire(1.0),
    "evict": lambda store: store.evictor.evict_for(store.budget_bytes * 3 // 4, frozenset()),
    "notes": lambda store: Notes(store, lambda: None).make_fit(),
    "savings": in_snapshot(total_savings),
    "backup": in_snapshot(lambda snapshot: sum(1 for _ in compact._records(snapshot))),
    "counts": lambda store: store.counts(),
}


@pytest.mark.parametrize("name", PASSES)
def test_no_pass_over_the_store_keeps_its_ghosts_in_memory(store: Store, live: Live, name: str) -> None:
    PASSES[name](store)
    assert live.most <= FEW, f"{live.most} of {NUM_GHOSTS} ghosts at once"


def test_a_plan_reads_no_ghosts_unless_seen_prompts_may_go_with_an_entry(store: Store, live: Live) -> None:
    for purge_filter in (PurgeFilter(), PurgeFilter(model="tiny"), PurgeFilter(older_than_s=1.0)):
        plan(store, purge_filter)
    assert not live.decoded


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[type[Snapshot]]]:
    """The kinds of transaction in which plans and checks of all seen prompts were made."""
    kinds: list[type[Snapshot]] = []
    planned = purge_module.plan_purge
    checked: Callable[[RecordCheck], dict[bytes, str]] = RecordCheck.__dict__["wrong_seen"].func

    def plan_in(snapshot: Snapshot, *args: object) -> object:
        kinds.append(type(snapshot))
        return planned(snapshot, *args)  # type: ignore[arg-type]

    def check_in(check: RecordCheck) -> dict[bytes, str]:
        kinds.append(type(check._snapshot))
        return checked(check)

    monkeypatch.setattr(purge_module, "plan_purge", plan_in)
    monkeypatch.setattr(verify_module.RecordCheck, "wrong_seen", property(check_in))
    yield kinds
    assert kinds


def test_no_plan_is_made_in_a_write_transaction(store: Store, transactions: list[type[Snapshot]]) -> None:
    assert purge(store, PurgeFilter(entries=entry(store)), store.clock()).entries == 1
    assert purge(store, PurgeFilter(), store.clock()).prompts
    assert Changes not in transactions


def test_what_is_saved_between_the_last_plan_and_its_purge_goes_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, seeds = purge_module.plan_purge, [2]

    def plan_late(snapshot: Snapshot, purge_filter: PurgeFilter, now: float) -> object:
        plan = planned(snapshot, purge_filter, now)
        while seeds and not plan:
            store.publish(publication(store, prompt(seeds.pop(), 2 * BLOCK), payload_bytes=200))
        return plan

    monkeypatch.setattr(purge_module, "plan_purge", plan_late)
    assert purge(store, PurgeFilter(), store.clock()).entries == 2
    assert store.counts()["blocks"] == 0


def test_a_repair_looks_for_wrong_seen_prompts_outside_write_transactions(
    store: Store, transactions: list[type[Snapshot]]
) -> None:
    with store.changes() as changes:
        changes.delete_record("seen", next(changes.keys("seen")))
    assert remove_damaged(store).prompts == NUM_GHOSTS // 20
    assert Changes not in transactions


def test_short_prompts_count_where_only_so_many_bytes_are_read(tmp_path: Path) -> None:
    """They have no blocks, and there may be millions of them."""
    store = open_store(tmp_path / "kv")
    for seed in range(40):
        store.publish(publication(store, prompt(seed, BLOCK - 1), payload_bytes=200).without_nodes())
    with store.snapshot() as snapshot:
        assert len(list(newest_first(snapshot, ROOT, max_bytes=10 * 4 * BLOCK))) < 20
        assert len(list(newest_first(snapshot, ROOT))) == 40
