from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

import lmdb
import numpy as np
import numpy.typing as npt
import pytest

from diskprefix.errors import CacheError, StoreCorrupt, StoreUnavailable
from diskprefix.store.codec.codec import Codec
from diskprefix.store.environment import Environment
from diskprefix.store.filecheck import FileCheck, check_file
from diskprefix.store.note_record import NoteKind
from diskprefix.store.notes import Notes
from diskprefix.store.schema import RootRecord
from diskprefix.store.store import Publication, Store
from diskprefix.store.wiping import wipe
from tests.store.building import BLOCK, ROOT, Clock, is_clean, is_whole, layout_of, open_store, prompt, publication

GONE, KEPT = range(1, 9), range(100, 108)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with_room = open_store(tmp_path)
    with_room.codec = Codec.RAW
    yield with_room
    with_room.close()


def is_sound(store: Store) -> bool:
    return check_file(store.path / "data.mdb").state == "sound"


def has_deleted(store: Store) -> bool:
    return store.has_deleted


def saved(store: Store, seeds: range) -> list[Publication]:
    """Prompts that share nothing."""
    pubs = [publication(store, prompt(seed, 6 * BLOCK + 5)) for seed in seeds]
    for pub in pubs:
        store.publish(pub)
    return pubs


def traces(pubs: list[Publication]) -> list[bytes]:
    nodes = [node for pub in pubs for node in pub.nodes]
    return [trace for node in nodes for trace in (node.name, node.token_ids.tobytes(), bytes(node.payload[64:128]))]


def delete(store: Store, pubs: list[Publication]) -> None:
    for pub in pubs:
        with store.changes() as changes:
            for node in reversed(pub.nodes):
                changes.delete_node(node.name, node.parent)
            changes.record_deletion()


def left(store: Store, wanted: list[bytes]) -> int:
    content = (store.path / "data.mdb").read_bytes()
    return sum(trace in content for trace in wanted)


def test_what_was_deleted_is_in_no_byte_of_the_file_and_the_rest_is_as_before(store: Store) -> None:
    kept, gone = saved(store, KEPT), saved(store, GONE)
    wanted = sorted(set(traces(gone)) - set(traces(kept)))
    delete(store, gone)
    assert left(store, wanted) > len(wanted) / 2, "LMDB overwrites nothing"
    assert has_deleted(store)
    assert store.wipe()
    assert left(store, wanted) == 0
    assert not has_deleted(store)
    assert all(is_whole(store, pub) for pub in kept)
    assert is_sound(store)
    assert is_clean(store)


def test_keys_that_outlive_their_records_in_branch_pages_go(store: Store) -> None:
    """A key of 500 bytes and more: a few make a page, and the first one of each stands in the page above."""
    keys = [struct.pack(">I", number) + bytes([number % 251 + 1]) * 500 for number in range(400)]
    with store.changes() as changes:
        for key in keys:
            changes.put_child(key)
    for some in (keys[::2], keys[1::2]):
        with store.changes() as changes:
            for key in some[:-1]:
                changes.delete_record("children", key)
            changes.record_deletion()
        assert store.wipe()
        content = (store.path / "data.mdb").read_bytes()
        assert [key for key in some[:-1] if key[:40] in content] == []
        assert check_file(store.path / "data.mdb").state == "sound"
        with store.snapshot() as snapshot:
            stored = list(snapshot.keys("children"))
            assert stored == sorted(stored)
            assert all(snapshot.record("children", key) is not None for key in stored)
    assert stored == [keys[-2], keys[-1]]


def test_a_store_that_is_wiped_again_and_again_stays_sound(store: Store) -> None:
    pubs = saved(store, KEPT)
    for round_ in range(1, 6):
        more = saved(store, range(1000 * round_, 1000 * round_ + 6))
        delete(store, more[::2])
        pubs += more[1::2]
        assert store.wipe()
        assert is_sound(store)
    assert all(is_whole(store, pub) for pub in pubs)
    assert is_clean(store)


def test_a_reader_from_before_still_reads_and_its_pages_are_wiped_after_it(store: Store) -> None:
    gone = saved(store, GONE)
    wanted = sorted(set(traces(gone)))
    with store.environment.transaction() as txn:
        piece_key = gone[0].nodes[0].name + b"\0\0"
        before = bytes(txn.get(piece_key, b"", db=store.environment.databases["payloads"]))
        delete(store, gone)
        # What `Store.wipe` does but for opening the file again, for which it waits until nobody reads.
        assert not wipe(store.environment)
        store.evictor.let_freed_pages_age()
        assert not wipe(store.environment)
        assert bytes(txn.get(piece_key, b"", db=store.environment.databases["payloads"])) == before
    assert store.wipe()
    assert left(store, wanted) == 0


def test_a_damaged_file_is_left_as_it_is(store: Store) -> None:
    delete(store, saved(store, GONE))
    path = store.path / "data.mdb"
    with path.open("r+b") as file:
        # The kind of the page that lists the databases, in both meta pages.
        for meta in range(2):
            file.seek(meta * 4096 + 128)
            file.seek(struct.unpack("<Q", file.read(8))[0] * 4096 + 10)
            file.write(b"\x08\x00")
    before = path.read_bytes()
    with pytest.raises(StoreCorrupt):
        wipe(store.environment)
    assert path.read_bytes() == before


def test_buffers_of_before_are_not_written_again(store: Store) -> None:
    """LMDB uses buffers for pages again without clearing them, so what it wrote before may come back."""
    gone = saved(store, GONE)
    wanted = sorted(set(traces(gone)))
    delete(store, gone)
    assert store.wipe()
    notes = Notes(store, lambda: None)
    record = RootRecord(model="tiny", block_size=BLOCK, layout=layout_of(1000), created_at=0.0)
    for number in range(30):
        notes.put(ROOT, record, NoteKind.RESPONSE, str(number), bytes([number]) * 100, 1000.0)
        notes.write()
    assert left(store, wanted) == 0


def test_another_process_has_to_wipe_too(store: Store, tmp_path: Path) -> None:
    """It has buffers of its own."""
    assert not has_deleted(store)
    delete(store, saved(store, GONE))
    assert store.wipe()
    store.close()
    reopened = Store(tmp_path, budget_bytes=32 << 20, clock=Clock())
    assert not has_deleted(reopened)
    with reopened.changes() as changes:
        changes.record_deletion()
        changes.put_meta("wiped", changes.meta("deleted") or b"")
    assert has_deleted(reopened)
    reopened.close()


def test_what_a_killed_process_wrote_behind_the_last_page_goes(store: Store) -> None:
    path = store.path / "data.mdb"
    with path.open("ab") as file:
        file.write(b"half of a prompt" * 1024)
    delete(store, saved(store, GONE))
    with path.open("ab") as file:
        file.write(b"half of a prompt" * 1024)
    assert store.wipe()
    assert b"half of a prompt" not in path.read_bytes()
    assert is_sound(store)
    assert is_clean(store)


def free_page(store: Store) -> int:
    """Returns a page that is free since long."""

    class Free(FileCheck):
        pages: ClassVar[list[int]] = []

        def see_free(self, txnid: int, pages: npt.NDArray[np.uint64]) -> None:
            if txnid < store.environment.last_transactions()[0] - 2:
                self.pages.extend(pages.tolist())

    with (store.path / "data.mdb").open("rb") as file:
        Free(file.fileno(), (store.path / "data.mdb").stat().st_size).run()
    return Free.pages[0]


def test_free_pages_are_read_once_and_again_after_a_write_that_failed(store: Store) -> None:
    delete(store, saved(store, GONE))
    assert store.wipe()
    path, page = store.path / "data.mdb", free_page(store)

    def write(content: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(page * 4096)
            file.write(content)

    write(b"of a transaction that was rolled back")
    assert store.wipe()
    assert b"rolled back" in path.read_bytes(), "nothing was freed since"
    with pytest.raises(ZeroDivisionError), store.changes():
        _ = 1 / 0
    assert store.wipe()
    assert b"rolled back" not in path.read_bytes()


def test_a_file_in_the_place_of_the_open_one_is_not_touched(store: Store, tmp_path: Path) -> None:
    """The lock that is held is that of the old one."""
    delete(store, saved(store, GONE))
    path = store.path / "data.mdb"
    (tmp_path / "another").write_bytes(path.read_bytes())
    (tmp_path / "another").rename(path)
    before = path.read_bytes()
    for attempt in (partial(wipe, store.environment), store.wipe):
        with pytest.raises(StoreUnavailable, match="removed or replaced"):
            attempt()
    assert path.read_bytes() == before
    assert store.reopen()
    assert store.wipe()


def test_a_file_that_was_removed_is_not_opened_again(store: Store) -> None:
    delete(store, saved(store, GONE))
    (store.path / "data.mdb").unlink()
    with pytest.raises(StoreUnavailable, match="removed or replaced"):
        store.wipe()
    assert not (store.path / "data.mdb").exists()


def test_what_cannot_be_opened_again_is_reported_and_repaired_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = saved(store, KEPT)
    delete(store, saved(store, GONE))
    with monkeypatch.context() as patch:
        patch.setattr(Environment, "_opened", failing)
        with pytest.raises(StoreUnavailable):
            store.wipe()
        with pytest.raises(CacheError), store.snapshot():
            """Closed."""
    assert "could not be opened again" in str(store.problem)
    assert store.reopen()
    assert store.wipe()
    assert all(is_whole(store, pub) for pub in kept)


def failing(_env: Environment, _map_bytes: int) -> lmdb.Environment:
    raise lmdb.MemoryError("no room")
