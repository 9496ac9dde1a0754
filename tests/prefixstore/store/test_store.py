from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from diskprefix.errors import PrefixGone, StoreUnavailable
from diskprefix.prefixstore.store import environment
from diskprefix.prefixstore.store.changes import Use, touches
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store.store import Publication, Store
from tests import forked
from tests.prefixstore.store import other_process
from tests.prefixstore.store.building import BLOCK, Clock, is_whole, layout_of, open_store, part_of, prompt, publication
from tests.prefixstore.store.other_process import beside, fill, open_and_fill


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Store:
    """With a small budget."""
    return open_store(tmp_path, budget_bytes=16 << 20, clock=clock)


def test_the_longest_prompt_is_known_and_a_damaged_entry_is_none(store: Store) -> None:
    assert store.longest_prompt() == 0
    for length in (2 * BLOCK, 3 * BLOCK + 5, BLOCK):
        store.publish(publication(store, prompt(length, length)))
    assert store.longest_prompt() == 3 * BLOCK + 5
    with store.changes() as changes:
        for name in list(changes.keys("entries")):
            changes._put_record("entries", name, b"damaged")
    assert store.longest_prompt() == 0


def test_a_use_of_a_node_and_a_longer_time_to_live_are_those_of_all_of_its_path(store: Store, clock: Clock) -> None:
    pub = publication(store, prompt(1, 3 * BLOCK))
    store.publish(pub)
    clock.now += 60
    assert pub.last_node is not None
    store.write([touches({pub.last_node: Use(clock.now, 2)})])
    store.publish(keeping_for(pub, *[300.0] * 4, path_ttl_s=None))
    with store.snapshot() as snapshot:
        found = [snapshot.usage(node.name) for node in pub.nodes]
    assert [(one.last_used, one.restores, one.ttl_s) for one in found if one] == [(clock.now, 2, -300)] * 4


def test_room_that_was_freed_a_moment_ago_is_used_before_anything_is_evicted(store: Store, clock: Clock) -> None:
    damaged, kept, new = (publication(store, prompt(seed, 6 * BLOCK), payload_bytes=1_000_000) for seed in range(3))
    store.publish(damaged)
    store.publish(kept)
    clock.now += 100
    assert store.quarantine(damaged.nodes[0].name, damaged.nodes[0].parent) == 7
    assert store.publish(new) == 0
    assert is_whole(store, kept)
    assert is_whole(store, new)


def test_a_publication_that_fails_half_way_leaves_nothing(store: Store) -> None:
    whole = publication(store, prompt(1, 4 * BLOCK))
    broken = replace(whole, nodes=(whole.nodes[0], *whole.nodes[2:]))
    with pytest.raises(PrefixGone):
        store.publish(broken)
    assert store.counts()["blocks"] == 0
    store.publish(whole)
    assert is_whole(store, whole)


def test_a_block_with_the_name_of_another_is_refused(store: Store) -> None:
    pub = publication(store, prompt(1, 2 * BLOCK))
    store.publish(pub)
    impostor = replace(pub.nodes[0], token_ids=pub.nodes[0].token_ids + 1)
    with pytest.raises(PrefixGone, match="same name"):
        store.publish(replace(pub, nodes=(impostor, *pub.nodes[1:])))
    assert is_whole(store, pub)


def test_a_file_that_another_process_has_open_keeps_its_size(tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(tmp_path, budget_bytes=64 << 20, clock=clock)
    fill(store, clock, range(12))
    file_bytes = store.file_bytes()
    store.close()
    clock.now += 11
    with beside(other_process.read, tmp_path):
        store = open_store(tmp_path, budget_bytes=16 << 20, clock=clock)
        assert store.fit_budget() > 0
        assert store.file_bytes() >= file_bytes
        assert store.counts()["entries"] > 2
        store.close()


def test_a_short_reader_delays_a_publication_and_costs_no_other_entry(store: Store, clock: Clock) -> None:
    fill(store, clock, range(12))
    before = store.counts()["blocks"]
    reading, release = threading.Event(), threading.Event()

    def read() -> None:
        with store.snapshot() as snapshot:
            snapshot.counts()
            reading.set()
            assert release.wait(30)

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(30)
    threading.Timer(0.2, release.set).start()
    pub = publication(store, prompt(100, 3 * BLOCK), payload_bytes=1_000_000)
    assert store.publish(pub) <= 8
    reader.join()
    assert is_whole(store, pub)
    assert store.counts()["blocks"] >= before - 4


def test_a_reader_that_was_killed_does_not_stop_saving(store: Store, clock: Clock, tmp_path: Path) -> None:
    fill(store, clock, range(12))
    with beside(other_process.read, tmp_path):
        """It is killed while it reads."""
    for seed in range(100, 104):
        clock.now += 11
        pub = publication(store, prompt(seed, 3 * BLOCK), payload_bytes=1_000_000)
        store.publish(pub)
        assert is_whole(store, pub)


def test_a_reader_that_does_not_end_is_named_and_nothing_more_is_evicted(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_READER_PATIENCE_S", 0.05)
    fill(store, clock, range(12))
    with store.snapshot() as snapshot:
        snapshot.counts()
        with pytest.raises(StoreUnavailable, match="an open reader"):
            fill(store, clock, range(20))
        before = store.counts()["blocks"]
        for seed in range(200, 204):
            clock.now += 11
            with pytest.raises(StoreUnavailable, match="an open reader"):
                store.publish(publication(store, prompt(seed, 3 * BLOCK), payload_bytes=1_000_000))
        assert store.counts()["blocks"] >= before
    clock.now += 11
    pub = publication(store, prompt(100, 3 * BLOCK), payload_bytes=1_000_000)
    store.publish(pub)
    assert is_whole(store, pub)


def test_another_process_with_a_larger_budget_may_let_the_file_grow(store: Store, clock: Clock, tmp_path: Path) -> None:
    own = publication(store, prompt(1, 3 * BLOCK))
    store.publish(own)
    assert forked.run(open_and_fill, tmp_path, 64 << 20, range(50, 62)) == 0
    assert (tmp_path / "data.mdb").stat().st_size > 16 << 20
    assert is_whole(store, own)
    with store.snapshot() as snapshot:
        assert len(list(snapshot.entries())) == 13
    clock.now += 11
    pub = publication(store, prompt(2, 3 * BLOCK))
    store.publish(pub)
    assert is_whole(store, pub)


def test_a_store_of_thousands_of_blocks_is_shrunk_to_a_budget_it_has_long_outgrown(tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(tmp_path, budget_bytes=128 << 20, clock=clock)
    for seed in range(60):
        store.publish(publication(store, prompt(seed, 100 * BLOCK), payload_bytes=10_000))
    assert store.counts()["used_bytes"] > 60 << 20
    store.close()
    clock.now += 11
    store = open_store(tmp_path, budget_bytes=16 << 20, clock=clock)
    assert store.fit_budget() > 3000
    assert store.counts()["used_bytes"] <= 16 << 20
    assert store.file_bytes() <= 16 << 20
    pub = publication(store, prompt(1000, 3 * BLOCK))
    store.publish(pub)
    assert is_whole(store, pub)


HYBRID = layout_of(400_000, 400_000)


def test_blocks_that_no_checkpoint_needs_make_room_first_whatever_else_is_stored(store: Store, clock: Clock) -> None:
    dense = publication(store, prompt(1, 10 * BLOCK), payload_bytes=400_000)
    store.publish(dense)
    clock.now += 3600
    bare = publication(store, prompt(2, 18 * BLOCK), layout=HYBRID, root=b"h" * 16, checkpoints=(4 * BLOCK,))
    bare = part_of(replace(bare, nodes=bare.nodes[:-1]))
    store.publish(bare)
    clock.now += 3600
    with store.changes() as changes:
        # What cannot be read is not the evicting one's business.
        changes._put_record("roots", b"x" * 16, b"damaged")
    new = publication(store, prompt(3, 12 * BLOCK), payload_bytes=400_000)
    assert store.publish(new) > 0
    assert is_whole(store, dense)
    assert is_whole(store, new)
    assert not is_whole(store, bare)
    assert is_whole(store, replace(bare, nodes=bare.nodes[:5])), "up to its checkpoint"


def test_a_checkpoint_that_is_published_again_is_not_evicted_to_make_room_for_itself(
    store: Store, clock: Clock
) -> None:
    token_ids = prompt(1, 30 * BLOCK)
    known = publication(store, token_ids[: 16 * BLOCK], layout=HYBRID, checkpoints=(4 * BLOCK,))
    store.publish(part_of(replace(known, nodes=known.nodes[:-1])))
    clock.now += 3600
    whole = publication(store, token_ids, layout=HYBRID, checkpoints=(4 * BLOCK, 16 * BLOCK))
    old = publication(store, prompt(2, 4 * BLOCK), payload_bytes=400_000)
    store.publish(old)
    clock.now += 3600
    assert store.publish(whole) > 0
    assert is_whole(store, whole)
    assert not is_whole(store, old)
    with store.snapshot() as snapshot:
        checkpoint = snapshot.usage(known.nodes[4].name)
    assert known.nodes[4].kind == NodeKind.CHECKPOINT
    assert checkpoint is not None
    assert checkpoint.created_at == 1000.0


def keeping_for(pub: Publication, *ttl_s: float | None, path_ttl_s: float | None) -> Publication:
    nodes = tuple(replace(node, ttl_s=own) for node, own in zip(pub.nodes, ttl_s, strict=True))
    return replace(pub, nodes=nodes, ttl_s=path_ttl_s)


def test_whether_anything_has_a_time_of_its_own_is_looked_for_once_and_known_afterwards(
    store: Store, clock: Clock
) -> None:
    pub = publication(store, prompt(1, 2 * BLOCK))
    known = [store.evictor.may_have_own_ttls]
    store.publish(publication(store, prompt(2, BLOCK)))
    for after_s, gone in ((0, 0), (0, 0), (300, 3), (0, 0)):
        clock.now += after_s
        assert store.evictor.expire(0) == gone
        known.append(store.evictor.may_have_own_ttls)
        if len(known) == 2:
            store.publish(keeping_for(pub, 300, 300, 300, path_ttl_s=300))
            known.append(store.evictor.may_have_own_ttls)
    assert known == [True, False, True, True, True, False]


def test_what_a_reader_without_a_lock_got_stays_as_it_was_when_its_pages_are_overwritten(tmp_path: Path) -> None:
    """No lock file can be joined, so the writer does not know of the reader and writes over the pages that it reads."""
    store = open_store(tmp_path, budget_bytes=16 << 20)
    pub = publication(store, prompt(1, 3 * BLOCK), payload_bytes=1_000_000)
    store.publish(pub)
    store.close()
    (tmp_path / "lock.mdb").unlink()
    reader = Store(tmp_path, read_only=True)
    offset = (tmp_path / "data.mdb").read_bytes().index(bytes(pub.nodes[0].payload[0][:4096]))
    with reader.snapshot() as snapshot:
        piece = snapshot.piece(pub.nodes[0].name, 0)
        assert piece is not None
        before = bytes(piece)
        assert forked.run(open_and_fill, tmp_path, 16 << 20, range(100, 130)) == 0
        assert (tmp_path / "data.mdb").read_bytes()[offset : offset + 4096] not in before, "the pages are overwritten"
        assert bytes(piece) == before


def test_an_eviction_says_in_the_debug_log_why_and_how_much(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "diskprefix")
    for seed in range(20):
        clock.now += 11
        store.publish(publication(store, prompt(seed, 3 * BLOCK), payload_bytes=1_000_000))
    clock.now += 1000
    num_left = store.counts()["blocks"]
    store.evictor.expire(100.0)
    messages = [record.message for record in caplog.records if "evicting" in record.message]
    told = [dict(re.findall(r"(\w+)=(\w+)", message)) for message in messages]
    assert {one["reason"] for one in told} == {"budget", "expired"}
    assert sum(int(one["blocks"]) for one in told if one["reason"] == "expired") == num_left
    for one in told:
        assert 0 < int(one["tokens"]) <= int(one["blocks"]) * BLOCK
        assert int(one["bytes"]) > int(one["tokens"]) * 1000
