"""A writer beside another process that purges its store, or puts a new file in its place."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from diskprefix.errors import PrefixGone
from diskprefix.prefixstore.store.compact import rewrite_folder
from diskprefix.prefixstore.store.environment import Environment
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.statistics.lost_tokens import LostTokens
from diskprefix.prefixstore.store.statistics.savings import SavingsLog, Tally, read_savings
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.writer import Writer, WriterLimits
from diskprefix.tokens import root_hash
from diskprefix.values import SHARED
from tests.prefixstore.store.building import BLOCK, is_clean, is_whole, of_root, prompt, publication, read_payload
from tests.prefixstore.store.other_process import beside
from tests.waiting import wait_for


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    """That of a daemon, which a prompt may pause for as long as a command takes."""
    store = Store(tmp_path, budget_bytes=64 << 20, serving=True)
    writer = Writer(store, buffer_bytes=64 << 20, limits=WriterLimits(max_held_s=600.0, pause_s=600.0))
    yield writer
    assert writer.close(30)
    assert is_clean(store)
    store.close()


def submit(writer: Writer, *publications: Publication) -> None:
    for one in publications:
        writer.queue_publication(Save(one.epoch), one, is_last=True)


def diskprefix(writer: Writer, *arguments: str) -> None:
    """Runs a command on the store of a writer."""
    folder = str(writer._store.path)
    command = [sys.executable, "-m", "diskprefix", *arguments, "--kv-cache-dir", folder]
    subprocess.run(command, check=True, capture_output=True)


def test_what_waits_while_another_process_purges_is_neither_stored_nor_found_any_more(
    writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    writer.limits = WriterLimits(pause_s=60.0, max_held_s=60.0)
    store = writer._store
    waiting, computed = publication(store, prompt(1, 3 * BLOCK)), publication(store, prompt(2, 3 * BLOCK))
    writer.pause_writing()
    submit(writer, waiting)
    diskprefix(writer, "purge", "--all", "--yes")
    wait_for(lambda: not writer.pending)
    submit(writer, computed)
    assert writer.flush(30)
    assert set(store.counts().values()) - {store.counts()[size] for size in ("used_bytes", "file_bytes")} == {0}
    assert writer.dropped == 2
    assert len([record for record in caplog.records if "of its tenant was purged" in record.message]) == 2
    assert writer.error is None
    again = publication(store, prompt(1, 3 * BLOCK))
    submit(writer, again)
    assert writer.flush(30)
    assert is_whole(store, again)


def test_what_waits_of_other_tenants_is_stored_after_another_process_has_purged_one(writer: Writer) -> None:
    """Their notes, counts and recent turns stay as well."""
    # The other process takes as long as it takes.
    writer.limits = WriterLimits(pause_s=60.0, max_held_s=60.0)
    store, log = writer._store, SavingsLog(writer._store)
    tenants = [str(SHARED.with_salt(salt)) for salt in ("alice", "bob", "carol")]
    made, notes = dict[str, Publication](), dict[str, TenantNotes]()

    def published(number: int, tenant: str) -> Publication:
        pub = publication(store, prompt(number, 3 * BLOCK), root=root_hash(tenant))
        return of_root(pub, structs.replace(pub.root_record, tenant=tenant))

    store.publish(published(9, tenants[0]))
    writer.pause_writing()
    for number, tenant in enumerate(tenants):
        pub = made[tenant] = published(number, tenant)
        submit(writer, pub)
        notes[tenant] = TenantNotes(writer.notes, pub.epoch, pub.root, pub.root_record, 1000.0)
        assert notes[tenant].put(NoteKind.TURN, "id", tenant.encode())
        log.record_request(pub.epoch, pub.root, pub.root_record, Tally(requests=1))
    diskprefix(writer, "purge", "--salt", "alice", "--yes")
    wait_for(lambda: writer.dropped)
    assert writer.pending.keys() == {node.name for tenant in tenants[1:] for node in made[tenant].nodes}
    is_kept = [False, True, True]
    assert [notes[tenant].recent(NoteKind.TURN, "id")[0] for tenant in tenants] == is_kept
    assert writer.flush(30)
    store.write_from(log.writing)
    assert [is_whole(store, made[tenant]) for tenant in tenants] == is_kept
    assert [notes[tenant].get(NoteKind.TURN, "id") is not None for tenant in tenants] == is_kept
    with store.snapshot() as snapshot:
        assert {*map(root_hash, tenants[1:])} == {*read_savings(snapshot)} == {*snapshot.keys("roots")}
    assert (writer.dropped, writer.error) == (1, None)


def test_a_transaction_that_begins_after_a_purge_stores_nothing_of_before(writer: Writer) -> None:
    """Also where the writer has not looked for purges yet."""
    store = writer._store
    begun = publication(store, prompt(1, 3 * BLOCK))
    epoch, root, record = store.epochs.of(""), begun.root, begun.root_record
    assert writer.close(30)
    diskprefix(writer, "purge", "--all", "--yes")
    with pytest.raises(PrefixGone):
        store.publish(begun)
    notes = TenantNotes(writer.notes, epoch, root, record, 1000.0)
    for kind in NoteKind:
        assert notes.put(kind, "id", b"content", prompt(1, 3 * BLOCK))
    log = SavingsLog(store)
    log.record_request(epoch, root, record, Tally(requests=1))
    for source in (writer.notes.writing, log.writing):
        store.write_from(source)
    with store.snapshot() as snapshot:
        assert not any(list(snapshot.keys(database)) for database in ("roots", "nodes", "seen", "notes"))
        assert read_savings(snapshot) == {}
    assert store.read_epochs().is_over(epoch)
    assert not notes.put(NoteKind.RESPONSE, "id", b"content")


def test_tokens_that_are_counted_after_a_purge_keep_no_line(store: Store) -> None:
    kept, epoch = publication(store, prompt(1, BLOCK)), store.epochs.of("")
    other = publication(store, prompt(2, BLOCK))
    for pub in (kept, other):
        store.publish(pub)
    log = SavingsLog(store)
    assert other.last_node is not None
    purge(store, PurgeFilter(entries=frozenset({other.last_node})), 0.0)
    lost = [LostTokens(hour=1, cause="diverged", line="x", tokens=1)]
    log.record_request(epoch, kept.root, kept.root_record, Tally(requests=1), lost)
    store.write_from(log.writing)
    with store.snapshot() as snapshot:
        [found] = read_savings(snapshot).values()
    assert (found.total.requests, found.lost) == (1, [])


def test_two_purges_at_one_time_are_two(store: Store) -> None:
    epochs = {store.epochs.of("")}
    for _ in range(3):
        purge(store, PurgeFilter(), 0.0)
        epochs.add(store.epochs.of(""))
    assert len(epochs) == 4


def rewrite(ready: Path, folder: Path, go: Path) -> None:
    """Rewrites the file of a store, as `purge --erase` does, and waits in the middle for the file `go`."""

    def advance(_num_bytes: int) -> None:
        ready.touch()
        wait_for(go.exists)

    rewrite_folder(folder, advance)
    time.sleep(3600)


def test_what_waits_while_another_process_rewrites_the_file_is_stored_in_the_new_one(
    writer: Writer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = writer._store
    pubs = [publication(store, prompt(seed, 2 * BLOCK)) for seed in range(5)]
    submit(writer, pubs[0])
    assert writer.flush(30)
    before, go = (tmp_path / "data.mdb").stat().st_ino, tmp_path / "go"
    with beside(rewrite, tmp_path, go):
        submit(writer, *pubs[1:])
        go.touch()
        wait_for(lambda: not writer.num_pending)
    assert (tmp_path / "data.mdb").stat().st_ino != before
    assert [is_whole(store, pub) for pub in pubs] == [True] * 5
    assert (writer.dropped, writer.error, caplog.records) == (0, None, [])


def test_a_file_that_is_rewritten_beside_a_long_restore_gives_right_bytes_and_loses_nothing_that_waits(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Environment.close, "__defaults__", (0.1,))
    writer.limits = WriterLimits(tries_s=0.1, retry_s=0.01, touch_interval_s=0.01)
    store = writer._store
    stored, *waiting = pubs = [publication(store, prompt(seed, 3 * BLOCK)) for seed in range(4)]
    submit(writer, stored)
    assert writer.flush(30)
    go, before = tmp_path / "go", (tmp_path / "data.mdb").stat().st_ino
    go.touch()
    with store.snapshot() as snapshot:
        assert read_payload(snapshot, stored.nodes[0]) == b"".join(stored.nodes[0].payload)
        with beside(rewrite, tmp_path, go):
            wait_for(lambda: (tmp_path / "data.mdb").stat().st_ino != before)
            submit(writer, *waiting)
            wait_for(lambda: "does not end" in str(writer.error))
            time.sleep(0.5)
            assert (writer.dropped, writer.num_pending) == (0, 3)
        for node in stored.nodes:
            assert read_payload(snapshot, node) == b"".join(node.payload)
    wait_for(lambda: not writer.num_pending)
    assert [is_whole(store, pub) for pub in pubs] == [True] * 4
    assert (writer.dropped, writer.error) == (0, None)


def test_purge_with_erase_leaves_nothing_of_before_and_loses_nothing_of_after(writer: Writer, tmp_path: Path) -> None:
    store = writer._store
    before = publication(store, prompt(1, 2 * BLOCK))
    submit(writer, before)
    assert writer.flush(30)
    file = (tmp_path / "data.mdb").stat().st_ino
    diskprefix(writer, "purge", "--all", "--yes", "--erase")
    # The writing thread may have looked between two rounds of the purge.
    assert store.read_epochs().purges.ids
    after = publication(store, prompt(2, 2 * BLOCK))
    submit(writer, after)
    assert writer.flush(30)
    assert (tmp_path / "data.mdb").stat().st_ino != file
    assert is_whole(store, after)
    assert b"".join(before.nodes[0].payload) not in (tmp_path / "data.mdb").read_bytes()
    assert writer.dropped == 0
