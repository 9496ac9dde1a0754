from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from diskprefix.errors import StoreFull, StoreUnavailable
from diskprefix.prefixstore.store import notes as notes_module
from diskprefix.prefixstore.store.changes import Changes
from diskprefix.prefixstore.store.ghosts import forget_prompts
from diskprefix.prefixstore.store.note_record import NoteKind, note_key, note_limit, root_limit, total_limit
from diskprefix.prefixstore.store.notes import Notes, TenantNotes
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.prefixstore.store.schema import RootRecord
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.savings import SavingsLog, Tally, total_savings
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.verify import verify_index
from diskprefix.prefixstore.store.writer import Writer
from tests.faults.damage import damaged
from tests.prefixstore.store.building import BLOCK, Clock, is_whole, layout_of, open_store, prompt, publication

ALICE, BOB = b"a" * 16, b"b" * 16
RESPONSE, TURN = NoteKind.RESPONSE, NoteKind.TURN
RECORD = RootRecord(model="tiny", block_size=BLOCK, layout=layout_of(100), created_at=0.0)
DAY = 86400.0


def of(notes: Notes, root: bytes = ALICE, ttl_s: float = DAY) -> TenantNotes:
    return TenantNotes(notes, notes._store.epochs.of(""), root, RECORD, ttl_s)


def new_notes(store: Store) -> Notes:
    return Notes(store, lambda: None)


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def num_stored(store: Store) -> int:
    return store.counts()["notes"]


def test_a_note_is_there_at_once_and_in_the_store_once_it_is_written_and_a_later_one_takes_its_place(
    store: Store,
) -> None:
    notes = new_notes(store)
    for number, content in enumerate((b"first", b"second")):
        assert of(notes).put(RESPONSE, "resp_1", content)
        assert of(notes).get(RESPONSE, "resp_1") == content
        assert num_stored(store) == number
        notes.write()
        assert num_stored(store) == 1
        assert of(new_notes(store)).get(RESPONSE, "resp_1") == content
    assert not verify_index(store).problems


def test_a_note_of_another_tenant_kind_or_id_is_not_found(store: Store) -> None:
    notes = new_notes(store)
    for _ in range(2):
        of(notes).put(RESPONSE, "resp_1", b"content")
        assert of(notes, BOB).get(RESPONSE, "resp_1") is None
        assert not of(notes, BOB).delete(RESPONSE, "resp_1")
        assert of(notes).get(TURN, "resp_1") is None
        assert of(notes).get(RESPONSE, "resp_2") is None
        notes.write()
    assert of(notes).get(RESPONSE, "resp_1") == b"content"


def test_a_deleted_note_is_gone_at_once_and_its_root_with_the_last_one(store: Store) -> None:
    notes = new_notes(store)
    of(notes).put(RESPONSE, "resp_1", b"content")
    notes.write()
    assert of(notes).delete(RESPONSE, "resp_1")
    assert of(notes).get(RESPONSE, "resp_1") is None
    assert not of(notes).delete(RESPONSE, "resp_1")
    notes.write()
    with store.snapshot() as snapshot:
        assert (list(snapshot.notes()), list(snapshot.roots())) == ([], [])


def test_a_deletion_is_settled_once_it_is_in_the_store(store: Store) -> None:
    notes = new_notes(store)
    of(notes).put(RESPONSE, "resp_1", b"content")
    notes.write()
    of(notes).delete(RESPONSE, "resp_1")
    assert not replace(of(notes), patience=Patience(0.0)).settle(RESPONSE, "resp_1")
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(of(notes).settle, RESPONSE, "resp_1")
        notes.write()
        assert settled.result()
    assert num_stored(store) == 0


@pytest.mark.parametrize("kind", [RESPONSE, TURN])
def test_a_note_that_waits_is_gone_as_soon_as_a_purge_is_read(store: Store, kind: NoteKind) -> None:
    notes = new_notes(store)
    assert of(notes).put(kind, "one", b"purged")
    with store.changes() as changes:
        changes.record_purge()
    assert of(notes).recent(kind, "one") == (True, b"purged")
    store.read_epochs()
    assert of(notes).recent(kind, "one") == (False, None)
    assert of(notes).get(kind, "one") is None


@pytest.mark.parametrize("left", ["blocks", "a recent prompt", "another note"])
def test_the_record_of_a_root_stays_while_something_is_stored_under_it(store: Store, left: str) -> None:
    notes, pub = new_notes(store), publication(store, prompt(1, BLOCK))
    store.publish(pub)
    of_pub = TenantNotes(notes, store.epochs.of(""), pub.root, pub.root_record, DAY)
    of_pub.put(RESPONSE, "resp_1", b"content")
    of_pub.put(RESPONSE, "resp_2", b"content")
    notes.write()
    with store.snapshot() as snapshot:
        prompts = list(snapshot.keys("seen"))
        nodes = [(name, snapshot.parent(name)) for name in snapshot.keys("usage")]
    with store.changes() as changes:
        if left != "blocks":
            for name, parent in nodes[::-1]:
                changes.delete_node(name, parent)
        if left != "a recent prompt":
            forget_prompts(changes, prompts)
    assert of_pub.delete(RESPONSE, "resp_1")
    if left != "another note":
        assert of_pub.delete(RESPONSE, "resp_2")
    notes.write()
    with store.snapshot() as snapshot:
        assert [root for root, _ in snapshot.roots()] == [pub.root]
    assert not verify_index(store).problems


def test_a_note_expires_after_its_last_use_even_before_it_is_removed(store: Store, clock: Clock) -> None:
    notes = new_notes(store)
    of(notes, ttl_s=100.0).put(RESPONSE, "used", b"content")
    of(notes, ttl_s=100.0).put(RESPONSE, "unused", b"content")
    notes.write()
    clock.now += 60
    assert of(notes).get(RESPONSE, "used") == b"content"
    notes.write()
    clock.now += 60
    assert of(notes).get(RESPONSE, "unused") is None
    assert num_stored(store) == 2
    store.evictor.expire(0.0)
    assert num_stored(store) == 1
    assert of(notes).get(RESPONSE, "used") == b"content"


def test_a_use_is_written_once_a_good_part_of_the_time_to_live_is_over(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, num_written = new_notes(store), 0
    of(notes, ttl_s=160.0).put(RESPONSE, "resp_1", b"content")
    notes.write()
    changes = store.changes

    @contextmanager
    def counted() -> Iterator[Changes]:
        nonlocal num_written
        num_written += 1
        with changes() as found:
            yield found

    monkeypatch.setattr(store, "changes", counted)
    for passed, expected in ((9.0, 0), (2.0, 1), (9.0, 1), (2.0, 2)):
        clock.now += passed
        assert of(notes).get(RESPONSE, "resp_1") == b"content"
        notes.write()
        assert num_written == expected
    with store.snapshot() as snapshot:
        assert [note.times.last_used for note in snapshot.notes()] == [clock.now]


def test_notes_of_a_tenant_keep_their_share_and_the_oldest_used_go(store: Store, clock: Clock) -> None:
    notes, size = new_notes(store), note_limit(store.budget_bytes) - 5000
    of(notes, BOB).put(RESPONSE, "bob", b"content")
    num = 2 * root_limit(store.budget_bytes) // size
    for number in range(num):
        clock.now += 1
        assert of(notes).put(RESPONSE, str(number), noise(size, number))
        assert of(notes).get(RESPONSE, "0")
        notes.write()
    with store.snapshot() as snapshot:
        found = list(snapshot.notes())
    assert sum(note.num_bytes for note in found if note.root == ALICE) <= root_limit(store.budget_bytes)
    assert of(notes).get(RESPONSE, "0") == noise(size, 0)
    assert of(notes).get(RESPONSE, "1") is None
    assert of(notes).get(RESPONSE, str(num - 1)) == noise(size, num - 1)
    assert of(notes, BOB).get(RESPONSE, "bob") == b"content"


def test_a_note_makes_room_for_itself_in_a_full_store(store: Store, clock: Clock) -> None:
    for seed in range(60):
        clock.now += 100
        store.publish(publication(store, prompt(seed, 8 * BLOCK), payload_bytes=100_000))
    clock.now += 100
    before = store.counts()
    notes = new_notes(store)
    for number in range(4):
        assert of(notes).put(RESPONSE, str(number), noise(100_000, number))
        notes.write()
    assert store.counts()["blocks"] < before["blocks"]
    assert of(notes).get(RESPONSE, "0") == noise(100_000)
    assert store.counts()["used_bytes"] <= store.evictor.usable_bytes()


def test_a_note_that_is_too_large_is_refused(store: Store) -> None:
    notes = new_notes(store)
    assert not of(notes).put(RESPONSE, "resp_1", noise(note_limit(store.budget_bytes) + 1))
    assert not of(notes).put(RESPONSE, "resp_2", b"\0" * (1 << 25))
    assert notes.dropped == 2
    assert of(notes).get(RESPONSE, "resp_1") is None


def test_what_waits_is_bounded_and_counts_what_was_replaced_or_written_no_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes_module, "_MAX_WAITING_BYTES", 2000)
    notes = new_notes(store)
    assert of(notes).put(RESPONSE, "resp_1", noise(1000))
    assert not of(notes).put(RESPONSE, "resp_2", noise(1000))
    notes.write()
    for _ in range(3):
        assert of(notes).put(RESPONSE, "resp_2", noise(1000))
        notes.write()
    for _ in range(3):
        assert of(notes).put(RESPONSE, "resp_3", noise(600))
    assert of(notes).put(RESPONSE, "resp_4", noise(600))
    assert not of(notes).put(RESPONSE, "resp_5", noise(600))


def test_what_is_replaced_or_deleted_while_it_is_written_is_written_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, changes = new_notes(store), store.changes
    of(notes).put(RESPONSE, "replaced", b"old")
    of(notes).put(RESPONSE, "deleted", b"old")

    @contextmanager
    def meanwhile() -> Iterator[Changes]:
        with changes() as found:
            yield found
        of(notes).put(RESPONSE, "replaced", b"new")
        of(notes).delete(RESPONSE, "deleted")

    with monkeypatch.context() as patch:
        patch.setattr(store, "changes", meanwhile)
        notes.write()
    assert of(notes).get(RESPONSE, "replaced") == b"new"
    assert of(notes).get(RESPONSE, "deleted") is None
    assert notes.is_waiting
    notes.write()
    assert of(new_notes(store)).get(RESPONSE, "replaced") == b"new"
    assert of(new_notes(store)).get(RESPONSE, "deleted") is None
    assert notes.waiting_bytes == 0


@pytest.mark.parametrize("failure", [StoreFull("full"), StoreUnavailable("gone")])
def test_a_failing_store_keeps_notes_in_memory_until_they_can_be_written(
    store: Store, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    notes = new_notes(store)

    def fail(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(store, "changes", fail)
        assert of(notes).put(RESPONSE, "resp_1", b"content")
        with pytest.raises(type(failure)):
            notes.write()
        assert not notes.is_waiting
        assert of(notes).get(RESPONSE, "resp_1") == b"content"
        patch.setattr(store.reads, "snapshot", fail)
        assert of(notes).get(RESPONSE, "resp_1") == b"content"
        assert of(notes).get(RESPONSE, "resp_2") is None
    notes.write()
    assert of(new_notes(store)).get(RESPONSE, "resp_1") == b"content"


def test_a_damaged_note_is_a_missing_one_and_goes(store: Store, tmp_path: Path) -> None:
    notes = new_notes(store)
    of(notes).put(RESPONSE, "resp_1", b"content")
    notes.write()
    store.close()
    with damaged(tmp_path) as records:
        records.flip("notes", note_key(ALICE, RESPONSE, "resp_1"), 40)
    again = open_store(tmp_path)
    notes = new_notes(again)
    assert of(notes).get(RESPONSE, "resp_1") is None
    notes.write()
    assert num_stored(again) == 0


def test_the_newest_notes_of_a_kind_are_listed(store: Store, clock: Clock, tmp_path: Path) -> None:
    notes, began = new_notes(store), clock.now
    for number, (root, ttl_s) in enumerate(((ALICE, DAY), (BOB, DAY), (ALICE, 10.0), (ALICE, DAY), (b"c" * 16, DAY))):
        clock.now = began + 10.0 * number
        assert of(notes, root, ttl_s).put(NoteKind.OPENING, str(number), b"%d" % number)
        assert of(notes, root).put(TURN, str(number), b"another kind")
        notes.write()

    def newest(before_s: float, at_most: int) -> list[tuple[bytes, bytes]]:
        found = notes.newest(NoteKind.OPENING, [ALICE, BOB], before=began + before_s, at_most=at_most)
        return [(note.root, note.content) for note in found]

    assert newest(100.0, 9) == [(ALICE, b"3"), (BOB, b"1"), (ALICE, b"0")], "the other one has expired"
    assert newest(30.0, 9) == [(BOB, b"1"), (ALICE, b"0")]
    assert newest(100.0, 1) == [(ALICE, b"3")]
    store.close()
    with damaged(tmp_path) as records:
        records.flip("notes", note_key(BOB, NoteKind.OPENING, "1"), 40)
    notes = new_notes(open_store(tmp_path, clock=clock))
    assert newest(100.0, 9) == [(ALICE, b"3"), (ALICE, b"0")]


def test_of_each_share_so_many_of_the_newest_notes_are_listed(store: Store, clock: Clock) -> None:
    notes = new_notes(store)
    for number, share in enumerate(("alice", "bob", "bob", "bob")):
        clock.now += 1.0
        assert replace(of(notes, ALICE), share=share).put(NoteKind.OPENING, str(number), b"%d" % number)
        notes.write()
    found = notes.newest(NoteKind.OPENING, [ALICE], before=clock.now + 1.0, at_most=2)
    assert [(note.share, note.content) for note in found] == [("bob", b"3"), ("bob", b"2"), ("alice", b"0")]


def test_a_flush_waits_for_a_note_that_is_being_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, changes = Writer(store, buffer_bytes=1 << 20), store.changes
    is_writing, disk = threading.Event(), threading.Event()

    def slow() -> AbstractContextManager[Changes]:
        is_writing.set()
        assert disk.wait(30)
        return changes()

    monkeypatch.setattr(store, "changes", slow)
    of(writer.notes).put(RESPONSE, "resp_1", b"content")
    assert is_writing.wait(30)
    assert not writer.flush(0.01)
    disk.set()
    assert writer.flush(30)
    assert num_stored(store) == 1
    assert writer.close(30)


def test_notes_of_all_roots_together_keep_their_share_and_prompts_stay(store: Store, clock: Clock) -> None:
    """Each root within its own."""
    saved = [publication(store, prompt(seed, 3 * BLOCK)) for seed in range(3)]
    for pub in saved:
        store.publish(pub)
    notes, size = new_notes(store), note_limit(store.budget_bytes) // 2
    roots = [number.to_bytes(16, "big") for number in range(1, 81)]
    for number in range(4):
        for root in roots:
            clock.now += 1
            # The first one is small: it is then that a root is new.
            assert of(notes, root).put(RESPONSE, str(number), noise(size if number else 100, number))
            notes.write()
            with store.snapshot() as snapshot:
                assert snapshot.bytes_in("notes") <= total_limit(store.budget_bytes)
    assert of(notes, roots[-1]).get(RESPONSE, "3") == noise(size, 3)
    assert of(notes, roots[0]).get(RESPONSE, "1") is None
    assert all(is_whole(store, pub) for pub in saved)


def test_the_notes_of_a_new_root_are_counted_without_reading_those_of_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes_module, "_MAX_ROOTS", 8)
    monkeypatch.setattr(Snapshot, "notes", lambda _self: pytest.fail("all notes are read"))
    notes = new_notes(store)
    for number in range(1, 40):
        of(notes, number.to_bytes(16, "big")).put(RESPONSE, "resp_1", b"content")
        notes.write()
    assert len(notes._sizes) == 8


def test_what_is_remembered_of_uses_is_bounded(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "_MAX_USED", 8)
    notes = new_notes(store)
    for number in range(20):
        of(notes).put(RESPONSE, str(number), b"content")
    notes.write()
    clock.now += DAY / 2
    assert all(of(notes).get(RESPONSE, str(number)) for number in range(20))
    notes.write()
    assert len(notes._used) == 8
    with store.snapshot() as snapshot:
        assert sum(note.times.last_used == clock.now for note in snapshot.notes()) == 8


def test_counts_of_many_roots_keep_the_share_of_notes_and_none_is_lost(tmp_path: Path, clock: Clock) -> None:
    """A client makes a root with each salt."""
    store = open_store(tmp_path, budget_bytes=16 << 20, clock=clock)
    notes, log, num_roots, num_hits = new_notes(store), SavingsLog(store), 1500, 40
    for number in range(1, num_roots + 1):
        for _ in range(num_hits):
            log.record_request(store.epochs.of(""), number.to_bytes(16, "big"), RECORD, Tally(requests=1))
        if number % 500 == 0:
            store.write_from(log.writing)
            notes.make_fit()
    with store.snapshot() as snapshot:
        assert snapshot.bytes_in("notes") <= total_limit(store.budget_bytes)
        assert total_savings(snapshot).total.requests == num_roots * num_hits
