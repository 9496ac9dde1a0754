from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest

from diskprefix.errors import StoreCorrupt, StoreFormatError, StoreUnavailable
from diskprefix.store import migration
from diskprefix.store.changes import NewNode
from diskprefix.store.codec.codec import PIECE_BYTES, Codec, Element, check_piece, piece_seed
from diskprefix.store.folder import REPLACEMENT, FolderUnavailable
from diskprefix.store.maintenance.verify import verify_index
from diskprefix.store.migration import migrate, needs_migration
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import Kind, history_sequence
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Publication, Store
from diskprefix.tokens import TokenIds, block_hash
from tests.faults.isolated import run_isolated
from tests.store.building import prompt, publication, read_payload
from tests.store.format_1 import BLOCK, CREATED_AT, SECRET, SMALL, STORE_ID, WIDE, Format1File, OldNode

ROOT, OTHER = b"r" * 16, b"s" * 16
LAST_USED = 1_700_000_000.5


def sample(folder: Path) -> Format1File:
    """Two models; prompts that share, branch, end on the grid, and one shorter than a block."""
    file = Format1File(folder)
    file.add_root(ROOT, SMALL)
    file.add_root(OTHER, WIDE, created_at=CREATED_AT + 5)
    long = prompt(1, 4 * BLOCK + 5)
    branch = np.concatenate([long[: 2 * BLOCK], prompt(2, BLOCK + 3)])
    for number, token_ids in enumerate([long[: 3 * BLOCK], long, branch, prompt(3, 5), prompt(4, BLOCK)]):
        file.add_prompt(ROOT, token_ids, last_used=LAST_USED + number, hits=number)
    for number, token_ids in enumerate([prompt(5, 3 * BLOCK + 1), prompt(6, 2 * BLOCK)]):
        file.add_prompt(OTHER, token_ids, last_used=LAST_USED + 100 + number, hits=7)
    return file.write()


def damage_at(database: str, offset: int, bit: int = 0) -> Callable[[Format1File, OldNode], None]:
    return lambda file, node: file.damage(database, node.name, offset, bit=bit)


def shorten(file: Format1File, node: OldNode) -> None:
    with file.edit() as (txn, databases):
        txn.put(node.name, node.payload[:-1], db=databases["payloads"])


def drop(file: Format1File, node: OldNode) -> None:
    with file.edit() as (txn, databases):
        txn.delete(node.name, db=databases["payloads"])


def cut_record(file: Format1File, node: OldNode) -> None:
    with file.edit() as (txn, databases):
        txn.put(node.name, node.record()[:-3], db=databases["nodes"])


def payload_of(snapshot: Snapshot, file: Format1File, node: OldNode) -> bytes:
    """The payload as format 2 has it, decoded; its pieces are raw and as the layout cuts them."""
    layout = PayloadLayout.parse(file.roots[node.root]["layout"])
    pieces = layout.pieces(len(node.token_ids), Kind(node.kind))
    stored = [view for _, view in snapshot.pieces(node.name)]
    checked = [check_piece(view, piece_seed(node.name, index)) for index, view in enumerate(stored)]
    assert checked == [(piece.num_bytes, Codec.RAW, piece.element) for piece in pieces]
    new = NewNode(node.name, node.parent, node.position, node.token_ids, Kind(node.kind), memoryview(b""), pieces)
    return read_payload(snapshot, new)


def assert_carried_over(store: Store, file: Format1File, without: set[bytes] | None = None) -> None:
    """The store holds the nodes and entries of the file, bit for bit, but for those in `without`."""
    kept = {name: node for name, node in file.nodes.items() if name not in (without or set())}
    with store.snapshot() as snapshot:
        assert {name for name, _ in snapshot.nodes()} == set(kept)
        assert {name for name, _ in snapshot.entries()} == set(file.entries) & set(kept)
        for node in kept.values():
            record, usage = snapshot.node(node.name), snapshot.usage(node.name)
            assert record is not None
            assert usage is not None
            assert (record.parent, record.root, record.position) == (node.parent, node.root, node.position)
            assert (record.token_ids.tolist(), record.kind) == (node.token_ids.tolist(), node.kind)
            assert payload_of(snapshot, file, node) == node.payload
            assert record.raw_bytes == len(node.payload)
            assert record.num_pieces == len(list(snapshot.pieces(node.name)))
            assert record.stored_bytes == sum(len(view) for _, view in snapshot.pieces(node.name))
            assert usage.children == sum(child.parent == node.name for child in kept.values())
    assert not verify_index(store).problems


def test_everything_is_carried_over(tmp_path: Path) -> None:
    file = sample(tmp_path)
    assert needs_migration(tmp_path)
    store = Store.open(tmp_path)
    assert (store.store_id, store.secret) == (STORE_ID, SECRET)
    assert_carried_over(store, file)
    with store.snapshot() as snapshot:
        assert snapshot.meta("created_at") == struct.pack("<d", CREATED_AT)
        roots = {root: msgspec.structs.asdict(record) for root, record in snapshot.roots()}
        assert roots == {root: record | {"identity": "", "tenant": ""} for root, record in file.roots.items()}
        entries = {name: msgspec.structs.asdict(entry) for name, entry in snapshot.entries()}
        assert entries == file.entries
    store.close()


def test_use_is_carried_over_and_a_node_is_as_old_as_its_entry_or_its_last_use(tmp_path: Path) -> None:
    file = sample(tmp_path)
    odd = next(iter(file.entries))
    with file.edit() as (txn, databases):
        # The clock was set back after it was saved.
        later = msgspec.msgpack.encode(file.entries[odd] | {"created_at": LAST_USED + 1e6})
        txn.put(odd, later, db=databases["entries"])
    store = Store.open(tmp_path)
    with store.snapshot() as snapshot:
        for name, node in file.nodes.items():
            usage = snapshot.usage(name)
            assert usage is not None
            assert (usage.last_used, usage.hits, usage.prefill_s) == (node.last_used, node.hits, 0.0)
            has_age = name in file.entries and name != odd
            assert usage.created_at == (file.entries[name]["created_at"] if has_age else node.last_used)
    store.close()


def test_a_payload_is_cut_as_a_new_one_would_be(tmp_path: Path) -> None:
    file = sample(tmp_path)
    node = next(node for node in file.nodes.values() if node.root == OTHER and not node.kind)
    store = Store.open(tmp_path)
    with store.snapshot() as snapshot:
        pieces = list(snapshot.pieces(node.name))
    row_bytes = 2048 * 4 * BLOCK
    rows = PIECE_BYTES // row_bytes
    assert 1 <= rows < 6, "the sample's payloads must be cut"
    assert len(pieces) == -(-6 // rows)
    assert [(view[16], view[17]) for _, view in pieces] == [(Codec.RAW, Element.FP32)] * len(pieces)
    store.close()


def publication_like(store: Store, file: Format1File, root: bytes, token_ids: TokenIds) -> Publication:
    """What a request with this prompt publishes after the migration."""
    return publication(store, token_ids, root=root, layout=file.roots[root]["layout"])


def test_the_history_keeps_its_order_and_is_as_old_as_the_last_use_of_its_root(tmp_path: Path) -> None:
    file = sample(tmp_path)
    store = Store.open(tmp_path, budget_bytes=64 << 20)
    with store.snapshot() as snapshot:
        for root, prompts in file.history.items():
            there = snapshot.recent_prompts(root, 100)
            assert [p.tolist() for _, p in there] == [p.tolist() for p in prompts]
        numbers = [history_sequence(key) for key, _ in snapshot.history(ROOT)]
    newest = int((LAST_USED + 4) * 1e6)
    assert numbers == [newest - i for i in range(5)]
    store.publish(publication_like(store, file, OTHER, prompt(9, 2 * BLOCK)))
    with store.snapshot() as snapshot:
        assert snapshot.recent_prompts(OTHER, 1)[0][1].tolist() == prompt(9, 2 * BLOCK).tolist()
    store.close()


def test_a_prompt_that_continues_a_migrated_one_shares_its_blocks(tmp_path: Path) -> None:
    file = sample(tmp_path)
    known = next(p for p in file.history[ROOT] if len(p) == 4 * BLOCK + 5)
    longer = np.concatenate([known, prompt(9, 2 * BLOCK)])
    store = Store.open(tmp_path, budget_bytes=64 << 20)
    before = store.counts()["blocks"]
    store.publish(publication_like(store, file, ROOT, longer))
    # Six blocks and a tail, of which four were there.
    assert store.counts()["blocks"] == before + 3
    store.close()
    reopened = Store.open(tmp_path)
    with reopened.snapshot() as snapshot:
        tip = next(name for name, entry in snapshot.entries() if entry.num_tokens == len(longer))
        assert [record.kind for _, record in snapshot.path(tip)] == [Kind.BLOCK] * 6 + [Kind.TAIL]
    reopened.close()


def test_what_is_migrated_once_is_not_migrated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sample(tmp_path)
    with caplog.at_level(logging.INFO, logger="diskprefix"):
        Store.open(tmp_path).close()
    assert "migrated" in caplog.text
    assert not needs_migration(tmp_path)
    monkeypatch.setattr(migration, "_write_replacement", None)
    Store.open(tmp_path).close()


def test_nothing_but_the_new_file_is_left_and_it_is_private(tmp_path: Path) -> None:
    sample(tmp_path)
    (tmp_path / REPLACEMENT).mkdir()
    (tmp_path / REPLACEMENT / "data.mdb").write_bytes(b"of a migration that was killed")
    migrate(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["data.mdb"]
    assert stat.S_IMODE((tmp_path / "data.mdb").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_store_that_root_migrates_stays_its_owners(tmp_path: Path) -> None:
    sample(tmp_path)
    os.chown(tmp_path, 12345, 12346)
    migrate(tmp_path)
    owner = (tmp_path / "data.mdb").stat()
    assert (owner.st_uid, owner.st_gid) == (12345, 12346)


@pytest.mark.parametrize("content", [None, b""])
def test_where_there_is_no_store_there_is_nothing_to_migrate(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "data.mdb").write_bytes(content)
    assert not needs_migration(tmp_path)
    assert not (tmp_path / "lock.mdb").exists()


def test_a_format_that_is_neither_is_left_to_the_store(tmp_path: Path) -> None:
    file = sample(tmp_path)
    with file.edit() as (txn, databases):
        txn.put(b"format", struct.pack("<I", 3), db=databases["meta"])
    before = (tmp_path / "data.mdb").read_bytes()
    assert not needs_migration(tmp_path)
    with pytest.raises((StoreFormatError, StoreCorrupt)):
        Store.open(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before


DAMAGES = {
    "a bit of the payload": damage_at("payloads", 100),
    "the payload's end": shorten,
    "the whole payload": drop,
    "the record's end": cut_record,
    "the parent": damage_at("nodes", 3),
    "the root": damage_at("nodes", 17),
    "the position": damage_at("nodes", 32, 4),
    "the number of tokens": damage_at("nodes", 36),
    "the codec": damage_at("nodes", 40, 1),
    "the kind": damage_at("nodes", 41),
    "an unknown kind": damage_at("nodes", 41, 6),
    "raw_bytes": damage_at("nodes", 48, 5),
    "a huge length": damage_at("nodes", 55, 7),
    "stored_bytes": damage_at("nodes", 56),
    "the checksum": damage_at("nodes", 64),
    "a token id": damage_at("nodes", 72 + 4),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_node_is_left_out_with_all_that_continues_it(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = sample(tmp_path)
    # The second block of the prompts that share two.
    node = next(n for n in file.nodes.values() if sum(c.parent == n.name for c in file.nodes.values()) == 2)
    assert node.position == BLOCK
    DAMAGES[what](file, node)
    lost = file.below(node.name)
    store = Store.open(tmp_path)
    assert_carried_over(store, file, lost)
    store.close()
    assert f"{len(lost)} of {len(file.nodes)} blocks, 3 of 7 entries" in caplog.text
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_nodes_that_continue_each_other_are_left_out(tmp_path: Path) -> None:
    file = sample(tmp_path)
    second = next(n for n in file.nodes.values() if n.root == OTHER and n.position == BLOCK)
    first = file.nodes[second.parent]
    with file.edit() as (txn, databases):
        txn.put(first.name, replace(first, parent=second.name).record(), db=databases["nodes"])
    store = Store.open(tmp_path)
    assert_carried_over(store, file, file.below(first.name))
    store.close()


def test_nothing_continues_a_tail(tmp_path: Path) -> None:
    file = sample(tmp_path)
    tail = next(node for node in file.nodes.values() if node.root == OTHER and node.kind)
    with file.edit() as (txn, databases):
        # All about it is right but its place.
        ids = prompt(9, BLOCK)
        name = block_hash(SECRET, tail.name, ids)
        payload = bytes(3 * 2 * 2048 * 4 * BLOCK)
        position = tail.position + len(tail.token_ids)
        node = OldNode(name, tail.name, OTHER, position, ids, 0, payload, LAST_USED, 0)
        txn.put(name, node.record(), db=databases["nodes"])
        txn.put(name, payload, db=databases["payloads"])
    store = Store.open(tmp_path)
    assert_carried_over(store, file)
    store.close()


@pytest.mark.parametrize("change", [{"layout": "{}"}, {"created_at": float("inf")}, {"block_size": 0}, {"model": 7}])
def test_a_root_that_cannot_be_read_takes_what_is_under_it_along(
    tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    file = sample(tmp_path)
    with file.edit() as (txn, databases):
        txn.put(OTHER, msgspec.msgpack.encode(file.roots[OTHER] | change), db=databases["roots"])
    store = Store.open(tmp_path)
    lost = {name for name, node in file.nodes.items() if node.root == OTHER}
    assert_carried_over(store, file, lost)
    with store.snapshot() as snapshot:
        assert [root for root, _ in snapshot.roots()] == [ROOT]
        assert not snapshot.recent_prompts(OTHER, 10)
    store.close()
    assert f"1 of 2 roots, {len(lost)} of {len(file.nodes)} blocks, 2 of 7 entries, 2 of 7 prompts" in caplog.text


def test_a_damaged_entry_or_prompt_is_left_out_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = sample(tmp_path)
    names = [name for name in file.entries if file.nodes[name].root == ROOT]
    garbled = msgspec.msgpack.encode(file.entries[names[1]] | {"num_tokens": 4 * BLOCK})
    with file.edit() as (txn, databases):
        txn.put(names[0], b"\xc1", db=databases["entries"])
        txn.put(names[1], garbled, db=databases["entries"])
        txn.put(ROOT + struct.pack(">Q", 2), b"no zstd frame", db=databases["history"])
    del file.entries[names[0]], file.entries[names[1]], file.history[ROOT][2]
    store = Store.open(tmp_path)
    assert_carried_over(store, file)
    with store.snapshot() as snapshot:
        there = snapshot.recent_prompts(ROOT, 10)
    assert [p.tolist() for _, p in there] == [p.tolist() for p in file.history[ROOT]]
    store.close()
    assert "2 of 7 entries, 1 of 7 prompts" in caplog.text


@pytest.mark.parametrize(
    "usage",
    [b"short", *(struct.pack("<dIIQ", when, 9, 0, 0) for when in (-1.0, float("nan"), 1e300))],
    ids=["short", "negative", "not a number", "beyond all time"],
)
def test_a_node_whose_use_is_unreadable_counts_as_unused(tmp_path: Path, usage: bytes) -> None:
    file = sample(tmp_path)
    node = next(iter(file.nodes.values()))
    with file.edit() as (txn, databases):
        txn.put(node.name, usage, db=databases["usage"])
    store = Store.open(tmp_path)
    assert_carried_over(store, file)
    with store.snapshot() as snapshot:
        there = snapshot.usage(node.name)
    assert there is not None
    assert (there.last_used, there.created_at, there.hits) == (CREATED_AT, CREATED_AT, 0.0)
    store.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"secret", b""), (b"store_id", b"short"), (b"created_at", b"1234567"), (b"checksum", b"12345678")],
)
def test_a_store_that_says_nonsense_of_itself_is_damaged(tmp_path: Path, key: bytes, value: bytes) -> None:
    file = sample(tmp_path)
    with file.edit() as (txn, databases):
        txn.put(key, value, db=databases["meta"])
    refused_and_unchanged(tmp_path, StoreCorrupt, "what the store says of itself is damaged")


def test_a_store_of_which_no_block_is_sound_is_damaged(tmp_path: Path) -> None:
    file = sample(tmp_path)
    file.damage("meta", b"secret", 3)
    refused_and_unchanged(tmp_path, StoreCorrupt, "no block of it is sound")


def refused_and_unchanged(folder: Path, error: type[Exception], match: str) -> None:
    before = (folder / "data.mdb").read_bytes()
    with pytest.raises(error, match=match):
        Store.open(folder)
    assert (folder / "data.mdb").read_bytes() == before
    assert not (folder / REPLACEMENT).exists()


def test_the_old_file_is_not_written_to(tmp_path: Path) -> None:
    """Whoever still has it open, as `cp` may, goes on reading the old store."""
    sample(tmp_path)
    before = (tmp_path / "data.mdb").read_bytes()
    with (tmp_path / "data.mdb").open("rb") as old:
        migrate(tmp_path)
        assert old.read() == before
    assert not needs_migration(tmp_path)


def test_an_empty_store_is_migrated(tmp_path: Path) -> None:
    file = Format1File(tmp_path).write()
    store = Store.open(tmp_path)
    assert store.store_id == STORE_ID
    assert_carried_over(store, file)
    store.close()


def test_a_disk_without_room_for_both_files_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sample(tmp_path)
    free = os.statvfs_result((4096, 4096, 1000, 200, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    refused_and_unchanged(
        tmp_path, FolderUnavailable, r"needs \d+\.\d MiB of free disk, \d+\.\d MiB more than there is.*another folder"
    )
    monkeypatch.undo()
    store = Store.open(tmp_path)
    assert_carried_over(store, file)
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_disk_that_fills_up_meanwhile_leaves_the_old_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,mode=0700", "none", folder], check=False).returncode:
        pytest.skip("no tmpfs can be mounted")
    try:
        file = sample(folder)
        free = os.statvfs(folder)
        (folder / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - (2 << 20)))
        monkeypatch.setattr(migration, "_require_room", lambda *_: None)
        refused_and_unchanged(folder, FolderUnavailable, "the disk is full or fails .*another folder")
        with file.edit() as (txn, databases):
            assert txn.get(b"format", db=databases["meta"]) == struct.pack("<I", 1)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


_OLD_PROCESS = """
import sys, lmdb
env = lmdb.open(sys.argv[1], map_size=1 << 30, max_dbs=7, readonly=sys.argv[2] == "ro")
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("mode", ["rw", "ro"])
def test_a_store_that_an_older_process_has_open_is_not_touched(tmp_path: Path, mode: str) -> None:
    """A process of format 1 takes no lock but LMDB's."""
    file = sample(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", _OLD_PROCESS, tmp_path, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as old:
        assert old.stdout is not None
        assert old.stdout.readline() == b"open\n"
        for refused in (migrate, Store.open, migrate):
            with pytest.raises((StoreUnavailable, StoreFormatError), match="older diskprefix"):
                refused(tmp_path)
        assert not (tmp_path / REPLACEMENT).exists()
        old.communicate()
    store = Store.open(tmp_path)
    assert_carried_over(store, file)
    store.close()


def test_an_older_process_that_comes_meanwhile_has_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample(tmp_path)
    looked: list[str] = []

    def look(_: Path, __: int) -> None:
        looked.append(run_isolated(lambda: lock_as_lmdb_does(tmp_path), 30))

    monkeypatch.setattr(migration, "_require_room", look)
    migrate(tmp_path)
    assert looked == ["held"]


def lock_as_lmdb_does(folder: Path) -> str:
    """In another process: try for the shared lock that LMDB waits for when it opens an environment."""
    with (folder / "lock.mdb").open("r+b") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
        except BlockingIOError:
            return "held"
    return "free"


def test_the_log_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = sample(tmp_path)
    monkeypatch.setattr(migration, "_PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO, logger="diskprefix"):
        migrate(tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith(f"[disk-cache] migrating {tmp_path} to format 2: ")
    assert len(lines) == 2 + len(file.nodes)
    done, total = lines[-2].removeprefix("[disk-cache] migrating: ").split(" of ")
    assert done == total
    assert lines[-1].endswith(f"2 roots, {len(file.nodes)} blocks, 7 entries, 7 prompts")


def test_a_store_larger_than_a_transaction_is_migrated_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sample(tmp_path)
    monkeypatch.setattr(migration, "_BATCH_BYTES", 1)
    store = Store.open(tmp_path)
    assert_carried_over(store, file)
    store.close()


class Killer:
    """Counts the lines of the migration's modules as they run in this process, and kills it before one of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0
        self.swap = 0
        """The first line of putting the new file in the old one's place."""

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if Path(frame.f_code.co_filename).name not in ("migration.py", "format_1.py", "opening.py", "folder.py"):
            return None
        if event == "line":
            self.lines += 1
            if frame.f_code.co_name == "put_in_place" and not self.swap:
                self.swap = self.lines
            if self.lines == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace

    def open_store(self, folder: Path) -> str:
        sys.settrace(self.trace)
        store = Store.open(folder)
        sys.settrace(None)
        store.close()
        return f"{self.swap} {self.lines}"


def test_a_migration_killed_anywhere_leaves_the_old_store_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every run has the same lines.
    monkeypatch.setattr(migration, "_PROGRESS_S", 1e9)
    file = sample(tmp_path / "pristine")
    shutil.copytree(file.folder, tmp_path / "whole")
    swap, lines = map(int, run_isolated(lambda: Killer(-1).open_store(tmp_path / "whole"), 60).split())
    assert lines - swap > 20, "the swap takes a dozen lines"
    moments = np.random.default_rng(1).integers(1, swap, 20).tolist() + list(range(swap, swap + 20)) + [lines]
    outcomes = set()
    for moment in moments:
        folder = tmp_path / "killed"
        shutil.copytree(file.folder, folder)
        assert run_isolated(lambda: Killer(moment).open_store(folder), 60) == "signal SIGKILL"  # noqa: B023
        outcomes.add(needs_migration(folder))
        store = Store.open(folder)
        assert_carried_over(store, file)
        store.close()
        assert not (folder / REPLACEMENT).exists()
        shutil.rmtree(folder)
    assert outcomes == {True, False}, "some were killed before the renaming, some after"
