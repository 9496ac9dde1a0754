"""The races of eviction: what another thread does between choosing the victims and deleting them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from diskprefix.errors import StoreFull
from diskprefix.store import evictor
from diskprefix.store.savings import SavingsLog, Tally, total_savings
from diskprefix.store.schema import node_root
from diskprefix.store.store import Publication, Store
from diskprefix.tokens import root_hash
from tests.store.building import BLOCK, Clock, is_clean, is_whole, open_store, prompt, publication

Then = Callable[[list[bytes]], object]


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store = open_store(tmp_path, budget_bytes=14 << 20, clock=clock)
    yield store
    store.close()


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


def test_a_node_that_is_pinned_after_it_was_chosen_to_make_room_stays(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pubs = [saved(store, clock, seed) for seed in range(4)]
    pinned: list[bytes] = []

    def pin_the_first(victims: list[bytes]) -> None:
        assert len(victims) > 1
        pinned.append(victims[0])
        store.evictor.pin(victims[0])

    after_the_choice(monkeypatch, "choose_victims", pin_the_first)
    fresh = publication(store, prompt(9, 3 * BLOCK), payload_bytes=1_000_000)
    clock.now += 11
    store.publish(fresh)
    with store.snapshot() as snapshot:
        # Its ancestors have a child for as long as it is there, so they stay too.
        path = list(snapshot.ancestry(pinned[0]))[::-1]
    assert path[-1:] == pinned
    assert any(path == [node.name for node in pub.nodes[: len(path)]] for pub in pubs)
    assert is_whole(store, fresh)


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
    log = SavingsLog(store, store.evictor.make_room)
    for number in range(250):
        clock.now += 11
        identity = f"{number:04000}"
        pub = publication(store, prompt(number, BLOCK + 1), payload_bytes=100_000, root=root_hash(identity))
        record = structs.replace(pub.root_record, identity=identity, tenant=f"{number:032x}")
        store.publish(replace(pub, root_record=record))
        log.record(pub.root, record, Tally(requests=1), None)
        log.write()
    with store.snapshot() as snapshot:
        with_nodes = {node_root(value) for _, value in snapshot.records("nodes")}
        roots = set(snapshot.keys("roots"))
        assert with_nodes < roots, "the others still have recent prompts and counts"
        bare = len(roots - with_nodes)
        assert bare * 2 * 4096 <= store.budget_bytes / 16 + 64 * 2 * 4096
        assert {key[:16] for key in [*snapshot.keys("seen"), *snapshot.keys("notes")]} <= roots
        assert total_savings(snapshot).total.requests == 250
    assert is_clean(store)
