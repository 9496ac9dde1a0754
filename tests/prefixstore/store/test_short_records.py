"""Records and keys that are cut short: what they name is not believed, and nothing of another root is removed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from diskprefix.errors import CacheError, StoreCorrupt
from diskprefix.prefixstore.store import evictor, note_record, notes
from diskprefix.prefixstore.store.changes import Changes
from diskprefix.prefixstore.store.ghosts import forget_prompts, newest_first
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.notes import Notes
from diskprefix.prefixstore.store.schema import DATABASES
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.savings import keep_counts
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.verify import remove_damaged, verify_index
from tests.prefixstore.store.building import BLOCK, names_of_every_run, open_store, prompt, publication

ROOTS = tuple(bytes([number]) * 16 for number in (1, 2, 3))
OWN = tuple(database for database in DATABASES if database != "meta")
Record = tuple[str, bytes]


class Undone(Exception):
    """Rolls a transaction back."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store with three roots. Each has a saved prompt, two that were only seen, and a note."""
    folder = tmp_path_factory.mktemp("template")
    with names_of_every_run():
        store = open_store(folder)
    held = Notes(store, lambda: None)
    for number, root in enumerate(ROOTS):
        saved = publication(store, prompt(number, 2 * BLOCK + 3), root=root, payload_bytes=200)
        store.publish(saved)
        for seed in (1, 2):
            seen = publication(store, prompt(10 * seed + number, 3 * BLOCK), root=root, payload_bytes=200)
            store.publish(seen.without_nodes())
        held.put(store.epochs.of(""), root, saved.root_record, NoteKind.RESPONSE, "one", b"content", 1e6)
    held.write()
    store.close()
    return folder


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Store:
    shutil.copy(template / "data.mdb", tmp_path / "data.mdb")
    return open_store(tmp_path)


def owner(snapshot: Snapshot, database: str, key: bytes) -> bytes:
    """The root of a sound record."""
    if database in ("roots", "seen", "notes"):
        return key[:16]
    node = snapshot.node_or_ghost(key[-16:] if database == "children" else key[:16])
    assert node is not None
    return node.root


def of_others(snapshot: Snapshot) -> set[Record]:
    """The records of all roots but the first."""
    listed = ((database, key) for database in OWN for key in snapshot.keys(database))
    return {record for record in listed if owner(snapshot, *record) != ROOTS[0]}


def remaining(snapshot: Snapshot, records: set[Record]) -> set[Record]:
    return {record for record in records if snapshot.has_record(*record)}


def removals(changes: Changes, database: str, key: bytes) -> list[Callable[[], object]]:
    """All ways to remove what a record of this key belongs to, with its root as the key or the record says."""
    name = key[-16:] if database == "children" else key[:16]
    match database:
        case "roots":
            return [lambda: keep_counts(changes, [key]), lambda: changes.delete_bare_roots({key})]
        case "seen":
            return [lambda: forget_prompts(changes, [key]), lambda: changes.forget_seen(key[:16], "it is damaged")]
        case "notes":
            return [lambda: changes.forget_notes([key]), lambda: changes.delete_bare_roots({key[:16]})]
    parent = changes.parent(name)
    return [
        lambda: changes.delete_node(name, ROOTS[0]),
        lambda: changes.delete_node(name, parent),
        lambda: changes.delete_bare_roots({parent}),
    ]


def cuts(num_bytes: int) -> list[int]:
    """Each length within a header, and some behind it."""
    return sorted({*range(min(num_bytes, 90)), num_bytes - 1})


@pytest.mark.cases(5)
@pytest.mark.parametrize("database", OWN)
def test_removing_a_record_of_any_length_removes_nothing_of_another_root(store: Store, database: str) -> None:
    with store.snapshot() as snapshot:
        others = of_others(snapshot)
        own = [key for key in snapshot.keys(database) if owner(snapshot, database, key) == ROOTS[0]]
        lengths = [(key, length) for key in own for length in cuts(len(snapshot.get_record(database, key)))]
    for key, length in lengths:
        with suppress(Undone), store.changes() as changes:
            value = bytes(changes.get_record(database, key))
            for number in range(len(removals(changes, database, key))):
                changes._put_record(database, key, value[:length])
                removals(changes, database, key)[number]()
            gone = others - remaining(changes, others)
            assert not gone, f"{database}, {length} bytes: {gone}"
            raise Undone


@pytest.mark.parametrize("database", OWN)
def test_removing_a_key_of_any_length_removes_nothing_of_another_root(store: Store, database: str) -> None:
    """It is the beginning or the end of keys of another root."""
    with store.snapshot() as snapshot:
        others = of_others(snapshot)
        whole = next(key for key in snapshot.keys(database) if owner(snapshot, database, key) != ROOTS[0])
    for key in [part for length in range(1, 16) for part in (whole[:length], whole[-length:])]:
        with suppress(Undone), store.changes() as changes:
            if changes.has_record(database, key):
                raise Undone
            for number in range(len(removals(changes, database, key))):
                changes._put_record(database, key, b"short")
                removals(changes, database, key)[number]()
            gone = others - remaining(changes, others)
            assert not gone, f"{database}, {key.hex()}: {gone}"
            raise Undone


def seen(store: Store) -> list[int]:
    with store.snapshot() as snapshot:
        return [len(list(newest_first(snapshot, root))) for root in ROOTS]


def test_a_block_that_is_cut_short_forgets_the_prompts_of_its_own_root_with_their_ghosts(store: Store) -> None:
    with store.snapshot() as snapshot:
        before = snapshot.counts()["ghosts"]
        own = [name for name in snapshot.keys("nodes") if owner(snapshot, "nodes", name) == ROOTS[0]]
        first = next(name for name in own if snapshot.is_ghost(name) and snapshot.parent(name) == ROOTS[0])
    with store.changes() as changes:
        changes._put_record("nodes", first, b"short")
        changes.delete_node(first, ROOTS[0])
    assert seen(store) == [0, 3, 3]
    with store.snapshot() as snapshot:
        assert snapshot.counts()["ghosts"] == before * 2 // 3
    assert not verify_index(store).problems


@pytest.mark.parametrize("database", OWN)
def test_fixing_and_evicting_with_a_key_that_is_cut_short_leaves_the_other_roots(store: Store, database: str) -> None:
    with store.snapshot() as snapshot:
        others = of_others(snapshot)
        key = next(key for key in snapshot.keys(database) if owner(snapshot, database, key) == ROOTS[1])
    for length in (1, 7, 15, 17, 20):
        # With 16 bytes or more, a seen prompt belongs to the root.
        if length < min(len(key), 16 if database == "seen" else 40):
            with store.changes() as changes:
                changes._put_record(database, key[:length], b"short")
            remove_damaged(store)
            with store.snapshot() as snapshot:
                gone = others - remaining(snapshot, others)
            assert not gone, f"{database}, {length} bytes: {gone}"
            assert not verify_index(store).problems


def test_a_seen_prompt_with_a_short_key_does_not_keep_new_ones_from_being_saved(store: Store) -> None:
    with store.changes() as changes:
        changes._put_record("seen", ROOTS[0] + b"\xff", b"short")
    store.publish(publication(store, prompt(50, 2 * BLOCK + 3), root=ROOTS[0], payload_bytes=200))
    assert seen(store) == [1, 3, 3]
    assert not verify_index(store).problems


def test_a_note_with_a_short_key_is_removed_with_those_beyond_the_share(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.changes() as changes:
        changes._put_record("notes", b"\x07" * 9, b"short")
    held = Notes(store, lambda: None)
    for module in (notes, note_record):
        monkeypatch.setattr(module, "total_limit", lambda _budget: 0)
    held.make_fit()
    with store.snapshot() as snapshot:
        assert not list(snapshot.keys("notes"))


def test_roots_with_short_keys_are_evicted_alone(store: Store) -> None:
    with store.snapshot() as snapshot:
        others = of_others(snapshot)
    with store.changes() as changes:
        for key in (b"\x01", b"\x02" * 15, b"\x03" * 8):
            changes._put_record("roots", key, b"short")
    with mock.patch.object(evictor, "_ROOTS_SHARE", 1 << 40), suppress(CacheError, StoreCorrupt):
        store.evictor.evict_for(store.budget_bytes // 2, frozenset())
        store.evictor._drop_roots([b"\x01", b"\x02" * 15, b"\x03" * 8])
    with store.snapshot() as snapshot:
        assert others == remaining(snapshot, others)
        assert sorted(snapshot.keys("roots")) == sorted(ROOTS)
