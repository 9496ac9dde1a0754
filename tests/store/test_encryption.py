"""An encrypted store: nothing of it is in the file as it is, nothing opens in another place or with another key, and
what is read is what was saved."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest

from diskprefix.errors import CacheError, SettingsError, StoreCorrupt, StoreUnavailable
from diskprefix.store import sealed_records, sealed_values
from diskprefix.store.changes import Use
from diskprefix.store.codec.codec import address
from diskprefix.store.compact import compact_folder
from diskprefix.store.encryption import EncryptionKey
from diskprefix.store.maintenance.repair import repair_index
from diskprefix.store.maintenance.verify import verify_index
from diskprefix.store.note_record import NoteKind, NoteTimes, encode_note, note_key
from diskprefix.store.schema import DATABASES, piece_key, verified
from diskprefix.store.store import Publication, Store
from tests.store.building import Clock, is_clean, is_whole, layout_of, open_store, prompt, publication, read_payload

KEY, OTHER = EncryptionKey(bytes(range(32))), EncryptionKey(bytes(32))
GROUP = b"of a key"


def encrypted(path: Path, key: EncryptionKey | None = KEY) -> Store:
    return Store(path, budget_bytes=32 << 20, clock=Clock(), key=key, on_corruption="quarantine", serving=True)


def saved(store: Store, *seeds: int) -> list[Publication]:
    """Prompts with tokens that no page header has by chance, saved with a note each."""
    found = []
    for seed in seeds:
        pub = publication(store, prompt(seed, 40) + np.int32(0x5EAD0000))
        store.publish(pub)
        with store.changes() as changes:
            key = note_key(pub.root, NoteKind.TURN, f"note {seed}")
            changes.put_note(key, encode_note(key, b"what was said " * 9, NoteTimes(1.0, 1.0, 60)))
            changes.remember(pub.root, prompt(seed, 300) + np.int32(0x5EAD0000), 4, GROUP)
        found.append(pub)
    return found


def stored_records(path: Path) -> Iterator[tuple[str, bytes, bytes]]:
    """All records as they stand in the file."""
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=len(DATABASES)) as env:
        for database in DATABASES:
            with env.begin(db=env.open_db(database.encode(), create=False)) as txn:
                yield from ((database, key, value) for key, value in txn.cursor())


def put_stored(path: Path, database: str, key: bytes, value: bytes) -> None:
    with lmdb.open(str(path), max_dbs=len(DATABASES), map_size=32 << 20) as env, env.begin(write=True) as txn:
        txn.put(key, value, db=env.open_db(database.encode(), txn=txn, create=False))


def test_a_store_reads_what_it_wrote_also_after_a_restart_and_compaction(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    pubs = saved(store, 1, 2, 3)
    store.close()
    compact_folder(tmp_path)  # It needs no key.
    store = encrypted(tmp_path)
    assert all(is_whole(store, pub) for pub in pubs)
    assert is_clean(store)
    with store.snapshot() as snapshot:
        assert [group for group, _ in snapshot.recent_prompts(pubs[0].root, 2)] == [b"", GROUP]
        assert {note.kind for note in snapshot.notes()} == {NoteKind.TURN}
        assert [entry.preview for _, entry in snapshot.entries()] == ["hello"] * 3
        part = pubs[1].nodes[0].token_ids.copy()
        part[9:] += 1
        assert next(snapshot.similar_children(pubs[1].root, part.tobytes())) == pubs[1].nodes[0].name
    store.close()


def test_a_copy_keeps_payloads_in_the_order_in_which_prompts_read_them(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    pubs = [publication(store, prompt(seed, 40), layout=layout_of(600_000)) for seed in range(2)]
    for pub in pubs:
        store.publish(pub)
    store.close()
    form = store_form(tmp_path)
    expected = [
        form.stored_key("payloads", piece_key(node.name, index))
        for pub in pubs
        for node in pub.nodes
        for index, piece in enumerate(node.pieces)
        if piece.num_bytes > mmap.PAGESIZE
    ]
    assert len(expected) > 8
    assert payload_order(tmp_path) == expected
    compact_folder(tmp_path)
    assert payload_order(tmp_path) == expected


def payload_order(path: Path) -> list[bytes]:
    """The stored keys of the payloads that have pages of their own, as the file has their values."""
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=len(DATABASES)) as env:
        payloads = env.open_db(b"payloads", create=False)
        with env.begin(db=payloads, buffers=True) as txn:
            found = [(address(value), bytes(key)) for key, value in txn.cursor() if len(value) > mmap.PAGESIZE]
            return [key for _, key in sorted(found)]


def test_no_token_text_name_or_payload_is_in_the_file(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    pubs = saved(store, 1, 2, 3)
    for pub in pubs:
        names = [node.name for node in pub.nodes]
        if pub is pubs[0]:
            # What was deleted was never there, so the free pages have nothing either.
            with store.changes() as changes:
                for node in reversed(pub.nodes):
                    changes.delete_node(node.name, node.parent)
        content = (tmp_path / "data.mdb").read_bytes()
        for name in [*names, pub.root, GROUP]:
            assert name not in content
        for node in pub.nodes:
            for token in node.token_ids:
                assert token.tobytes() not in content
            for start in range(0, len(node.payload) - 16, 1000):
                assert bytes(node.payload[start : start + 16]) not in content
    for text in (b"hello", b"what was said", b"tiny", b"bfloat16"):
        assert text not in content
    store.close()


def test_a_changed_byte_or_a_record_in_anothers_place_is_never_read(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    (pub,) = saved(store, 1)
    store.close()
    first, second = (piece_key(node.name, 0) for node in pub.nodes[:2])
    form = store_form(tmp_path)
    stored = {key: value for database, key, value in stored_records(tmp_path) if database == "payloads"}
    here, there = form.stored_key("payloads", first), form.stored_key("payloads", second)
    for place in (0, 17, 30, len(stored[here]) // 2, len(stored[here]) - 1):
        changed = bytearray(stored[here])
        changed[place] ^= 1
        put_stored(tmp_path, "payloads", here, bytes(changed))
        require_damaged(tmp_path, pub)
    put_stored(tmp_path, "payloads", here, stored[there])
    require_damaged(tmp_path, pub)
    nodes = {key: value for database, key, value in stored_records(tmp_path) if database == "nodes"}
    here, there = (form.stored_key("nodes", node.name) for node in pub.nodes[:2])
    put_stored(tmp_path, "nodes", here, nodes[there])
    store = encrypted(tmp_path)
    with store.snapshot() as snapshot, pytest.raises(StoreCorrupt):
        snapshot.node(pub.nodes[0].name)
    store.close()


def require_damaged(path: Path, pub: Publication) -> None:
    store = encrypted(path)
    with store.snapshot() as snapshot, pytest.raises(StoreCorrupt):
        read_payload(snapshot, pub.nodes[0])
    store.close()


def store_form(path: Path) -> sealed_records.SealedRecords:
    remembered = next(
        value for database, key, value in stored_records(path) if (database, key) == ("meta", b"encryption")
    )
    form = sealed_records.SealedRecords.open(KEY.secret, verified(b"encryption", remembered))
    assert form is not None
    return form


def change_byte(path: Path, database: str, stored_key: bytes, place: int) -> None:
    value = next(value for where, key, value in stored_records(path) if (where, key) == (database, stored_key))
    changed = bytearray(value)
    changed[place] ^= 1
    put_stored(path, database, stored_key, bytes(changed))


def opened_databases(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Fills with the names of the databases that are decrypted from now on."""
    opens, databases = sealed_values.SealedValues.opens, set()

    def noted(values: sealed_values.SealedValues, associated: bytes, *place: memoryview) -> bool:
        databases.add(associated.partition(b"\0")[0].decode())
        return opens(values, associated, *place)

    monkeypatch.setattr(sealed_values.SealedValues, "opens", noted)
    return databases


def test_what_has_expired_is_found_without_decrypting_and_no_checksum_of_a_text_is_legible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(1.0)
    store = Store(tmp_path, budget_bytes=32 << 20, clock=clock, key=KEY)
    saved(store, 1)
    with store.snapshot() as snapshot:
        plain = [bytes(value) for database in ("notes", "history") for _, value in snapshot.records(database)]
    assert len(plain) > 2
    assert not any(value[:8] in (tmp_path / "data.mdb").read_bytes() for value in plain)
    databases = opened_databases(monkeypatch)
    clock.now += 58
    store.evictor.expire(1000)
    assert store.counts()["notes"] == 1
    clock.now += 1000
    store.evictor.expire(1000)
    assert not any(store.counts()[what] for what in ("entries", "blocks", "prompts", "notes"))
    assert not databases & {"notes", "history"}
    store.close()


@pytest.mark.parametrize("database", ["notes", "history"])
def test_a_time_that_was_changed_makes_a_record_unreadable(database: str, tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    saved(store, 1)
    store.close()
    stored = next(key for where, key, _ in stored_records(tmp_path) if where == database)
    change_byte(tmp_path, database, stored, -1)
    store = encrypted(tmp_path)
    assert [problem.database for problem in verify_index(store).problems] == [database]
    store.close()


def test_the_check_of_the_index_decrypts_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = encrypted(tmp_path)
    saved(store, 1)
    databases = opened_databases(monkeypatch)
    assert not verify_index(store).problems
    assert "nodes" in databases
    assert "payloads" not in databases
    store.close()


def test_what_a_damaged_node_continues_can_go_once_it_is_repaired(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    (pub,) = saved(store, 1)
    store.close()
    last = pub.nodes[-1]
    change_byte(tmp_path, "nodes", store_form(tmp_path).stored_key("nodes", last.name), 30)
    clock = Clock()
    store = Store(tmp_path, budget_bytes=32 << 20, clock=clock, key=KEY)
    store.touch({last.name: Use(clock.now)})
    clock.now += 1000
    with pytest.raises(StoreCorrupt, match="is damaged"):
        store.evictor.expire(100)
    assert repair_index(store) > 0
    store.evictor.expire(100)
    assert store.counts()["blocks"] == 0
    store.close()


@pytest.mark.parametrize("place", [0, 8, 39, None])
def test_damage_to_what_tells_the_key_is_not_taken_for_another_key(place: int | None, tmp_path: Path) -> None:
    encrypted(tmp_path).close()
    if place is None:
        # A bit that flips in the key of a record hides it.
        with lmdb.open(str(tmp_path), max_dbs=len(DATABASES)) as env, env.begin(write=True) as txn:
            txn.delete(b"encryption", db=env.open_db(b"meta", txn=txn, create=False))
    else:
        change_byte(tmp_path, "meta", b"encryption", place)
    for key in (KEY, None):
        with pytest.raises(StoreCorrupt, match="the identity of the store is damaged"):
            Store(tmp_path, key=key)
    store = encrypted(tmp_path)
    assert is_clean(store)
    assert (tmp_path / "damaged.mdb").exists()
    store.close()


@pytest.mark.parametrize(
    ("first", "then", "advice"),
    [
        (KEY, OTHER, "encrypted with another key; give that one with --kv-cache-encryption-key-file"),
        (KEY, None, "it is encrypted; give its key with --kv-cache-encryption-key-file"),
        (None, KEY, "it is not encrypted; leave --kv-cache-encryption-key-file out"),
    ],
)
def test_another_key_is_refused_and_changes_nothing(
    first: EncryptionKey | None, then: EncryptionKey | None, advice: str, tmp_path: Path
) -> None:
    encrypted(tmp_path, first).close()
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(StoreUnavailable, match=advice):
        encrypted(tmp_path, then)
    assert (tmp_path / "data.mdb").read_bytes() == before
    assert not (tmp_path / "damaged.mdb").exists()


def test_no_key_and_nonce_come_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_values, "MOST_VALUES", 7)
    for seed in range(4):
        store = encrypted(tmp_path)
        saved(store, seed)
        store.close()
    sealed = [value for database, key, value in stored_records(tmp_path) if database in ("nodes", "payloads", "notes")]
    seen = {value[:20] for value in sealed}
    assert len(seen) == len(sealed) > 20
    assert max(value[19] for value in sealed) == 6


def test_stores_with_one_key_file_do_not_read_each_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        store = encrypted(tmp_path / name)
        store.close()
    names = {path: value for path in ("a", "b") for _, key, value in stored_records(tmp_path / path) if key == b"names"}
    put_stored(tmp_path / "a", "meta", b"names", names["b"])
    with pytest.raises(CacheError, match="the identity of the store is damaged"):
        Store(tmp_path / "a", key=KEY)


def test_a_plain_store_is_as_before(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (pub,) = saved(store, 1)
    store.close()
    keys = {key for database, key, _ in stored_records(tmp_path) if database == "nodes"}
    assert keys == {node.name for node in pub.nodes}


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (bytes(31), 0o600, "must hold exactly 32 random bytes; write them with: .*head -c 32 /dev/urandom"),
        (bytes(33), 0o600, "must hold exactly 32 random bytes"),
        (bytes(32), 0o640, "others may read or write"),
    ],
)
def test_an_unfit_key_file_is_refused(content: bytes, mode: int, message: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(SettingsError, match=message):
        EncryptionKey.read(file)
    file.write_bytes(KEY.secret)
    file.chmod(0o600)
    assert EncryptionKey.read(file) == KEY
