"""Opening the file of a store: its names, other files, and damage that LMDB does not survive."""

from __future__ import annotations

import errno
import faulthandler
import mmap
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from diskprefix.errors import CacheError, StoreCorrupt, StoreFormatError, StoreUnavailable
from diskprefix.namespace_key import NamespaceKey
from diskprefix.store import opening, survival
from diskprefix.store.folder import DATA, LOCK
from diskprefix.store.opening import DAMAGED
from diskprefix.store.schema import FORMAT_VERSION
from diskprefix.store.store import Store
from diskprefix.store.store_file import OnCorruption
from diskprefix.store.survival import require_survivable
from tests.faults.isolated import run_isolated
from tests.faults.power.check import leave_mark
from tests.store import other_process
from tests.store.building import BLOCK, change_format, is_whole, open_store, prompt, publication
from tests.store.other_process import beside

A, B = NamespaceKey.of(b"key of the one fleet"), NamespaceKey.of(b"key of the other one")
BUDGET = 32 << 20


def opened(path: Path, namespace: NamespaceKey | None, on_corruption: OnCorruption = "quarantine") -> Store:
    return Store(path, budget_bytes=BUDGET, serving=True, namespace=namespace, on_corruption=on_corruption)


def test_stores_with_one_namespace_key_name_alike_and_others_do_not(tmp_path: Path) -> None:
    seeds = []
    for number, key in enumerate((A, A, B, None, None)):
        store = opened(tmp_path / str(number), key)
        seeds.append(store.secret)
        store.close()
    assert seeds[:3] == [A.names_seed, A.names_seed, B.names_seed]
    assert len(set(seeds)) == 4


@pytest.mark.parametrize(
    ("first", "then", "advice"),
    [
        (A, B, "another namespace key; give that one with --namespace-key-file, or choose another --kv-cache-dir"),
        (A, None, "with a namespace key; give the file with --namespace-key-file, or choose another --kv-cache-dir"),
        (None, A, "not made with a namespace key; leave --namespace-key-file out, or choose another --kv-cache-dir"),
    ],
    ids=["another", "none", "its own secret"],
)
def test_a_daemon_with_another_key_is_refused_and_the_store_stays(
    first: NamespaceKey | None, then: NamespaceKey | None, advice: str, tmp_path: Path
) -> None:
    store = opened(tmp_path, first)
    store_id, secret = store.store_id, store.secret
    store.close()
    with pytest.raises(StoreUnavailable) as caught:
        opened(tmp_path, then)
    assert caught.value.message.endswith(advice)
    assert "\n" not in caught.value.message
    again = opened(tmp_path, first)
    assert (again.store_id, again.secret) == (store_id, secret)
    again.close()


def test_commands_need_no_key(tmp_path: Path) -> None:
    opened(tmp_path, A).close()
    tool = Store(tmp_path, read_only=True)
    assert tool.secret == A.names_seed
    tool.close()


def test_a_store_that_the_disk_does_not_make_durable_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path, None).close()

    def failing(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    store = opened(tmp_path, None)
    assert store.problem is not None
    with store.snapshot() as snapshot:
        assert snapshot.counts()["entries"] == 0
    store.close()


PAGE = mmap.PAGESIZE
VERSION, PAGE_SIZE = 20, 40
"""Places in a meta page."""


def with_number(page: bytes, place: int, number: int) -> bytes:
    return page[:place] + number.to_bytes(4, "little") + page[place + 4 :]


def of_later_lmdb(metas: list[bytes]) -> bytes:
    """A number of the transaction stands before what each meta page has."""
    later = [with_number(meta, VERSION, 3) for meta in metas]
    return b"".join(meta[:16] + bytes(8) + meta[16:-8] for meta in later)


def of_larger_pages(metas: list[bytes]) -> bytes:
    return b"".join(with_number(meta, PAGE_SIZE, 4 * PAGE) + bytes(3 * PAGE) for meta in metas)


OTHERS: dict[str, tuple[Callable[[list[bytes]], bytes], str]] = {
    "version": (lambda metas: b"".join(with_number(meta, VERSION, 2) for meta in metas), "has LMDB's data version 2"),
    "later": (of_later_lmdb, "has LMDB's data version 3"),
    "pages": (of_larger_pages, f"has pages of {4 * PAGE} bytes"),
}


@pytest.mark.parametrize("which", OTHERS)
def test_a_store_of_another_lmdb_or_another_kind_of_machine_is_left_alone(which: str, tmp_path: Path) -> None:
    opened(tmp_path, None).close()
    file, (change, problem) = tmp_path / DATA, OTHERS[which]
    data = file.read_bytes()
    file.write_bytes(change([data[:PAGE], data[PAGE : 2 * PAGE]]) + data[2 * PAGE :])
    before = file.read_bytes()
    with pytest.raises(StoreUnavailable, match=f"{DATA} {problem}, which LMDB .* cannot use on this machine") as caught:
        opened(tmp_path, None)
    assert "\n" not in caught.value.message
    assert file.read_bytes() == before
    assert not (tmp_path / DAMAGED).exists()


@pytest.mark.parametrize("place", [VERSION, PAGE_SIZE])
def test_a_data_version_or_page_size_that_one_meta_page_alone_has_is_damage(place: int, tmp_path: Path) -> None:
    opened(tmp_path, None).close()
    file = tmp_path / DATA
    file.write_bytes(with_number(file.read_bytes(), place, 2 * PAGE))
    opened(tmp_path, None).close()
    assert (tmp_path / DAMAGED).exists()


def test_a_store_that_the_installed_lmdb_refuses_for_its_version_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path, None).close()
    before = (tmp_path / DATA).read_bytes()

    def refusing(*_: object, **__: object) -> None:
        raise lmdb.VersionMismatchError("MDB_VERSION_MISMATCH: Database environment version mismatch")

    with monkeypatch.context() as patched:
        patched.setattr(lmdb, "open", refusing)
        with pytest.raises(StoreUnavailable, match=r"another version, which LMDB .* cannot use"):
            opened(tmp_path, None)
    assert (tmp_path / DATA).read_bytes() == before
    assert not (tmp_path / DAMAGED).exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with one prompt, closed."""
    store = open_store(tmp_path)
    store.publish(publication(store, prompt(1, 3 * BLOCK)))
    store.close()
    return tmp_path


def cut(folder: Path) -> None:
    """Leaves the meta pages alone: LMDB gets a signal at the first read."""
    os.truncate(folder / DATA, 2 * PAGE)


def daemon(folder: Path) -> Store:
    return Store(folder, budget_bytes=32 << 20, on_corruption="quarantine", serving=True)


def test_a_sound_file_and_none_survive(folder: Path) -> None:
    require_survivable(folder)
    require_survivable(folder, is_alone=True)
    require_survivable(folder / "none")
    (folder / DATA).write_bytes(b"")
    require_survivable(folder)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_file_that_ends_the_process_and_one_that_lmdb_refuses_are_damaged(folder: Path, is_alone: bool) -> None:
    cut(folder)
    with pytest.raises(StoreCorrupt, match=r"it ended a process that read it \(signal \d+\)"):
        require_survivable(folder, is_alone=is_alone)
    (folder / DATA).write_bytes(b"no file of LMDB" * 1000)
    with pytest.raises(StoreCorrupt, match=r"is damaged: lmdb\.InvalidError"):
        require_survivable(folder, is_alone=is_alone)


def test_a_file_that_lmdb_does_not_get_through_is_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survival, "_CHILD", "import time; time.sleep(60)")
    monkeypatch.setattr(survival, "_PATIENCE_S", 0.01)
    with pytest.raises(StoreCorrupt, match="LMDB was not through it"):
        require_survivable(folder)


def test_a_page_that_is_lost_between_the_trees_and_the_free_list_is_noticed(folder: Path) -> None:
    """Nothing would crash: the meta page just knows one page more."""
    data = bytearray((folder / DATA).read_bytes())
    for at in (136, PAGE + 136):
        data[at : at + 8] = (int.from_bytes(data[at : at + 8], "little") + 1).to_bytes(8, "little")
    (folder / DATA).write_bytes(bytes(data) + bytes(PAGE))
    with pytest.raises(StoreCorrupt, match="is damaged"):
        require_survivable(folder)


def test_a_process_that_dies_of_the_file_leaves_a_mark_and_the_next_one_moves_the_file_aside(folder: Path) -> None:
    cut(folder)

    def dies() -> str:
        faulthandler.disable()
        daemon(folder).counts()
        return "lives"

    assert run_isolated(dies, 30).startswith("signal")
    store = daemon(folder)
    assert store.counts()["entries"] == 0
    assert (folder / DAMAGED).exists()
    store.close()


def test_only_the_mark_of_a_process_that_is_gone_costs_a_child(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []
    monkeypatch.setattr(opening, "require_survivable", lambda path, **_: tried.append(path))
    daemon(folder).close()
    assert not (folder / LOCK).stat().st_size
    with beside(other_process.hold, folder, False):
        assert (folder / LOCK).stat().st_size
        Store(folder, read_only=True).close()
    assert tried == []
    store = daemon(folder)
    assert tried == [folder]
    assert is_whole(store, publication(store, prompt(1, 3 * BLOCK)))
    store.close()
    assert not (folder / LOCK).stat().st_size


def test_a_store_that_is_refused_keeps_its_file_and_its_mark(folder: Path) -> None:
    cut(folder)
    leave_mark(folder)
    with pytest.raises(StoreCorrupt):
        Store(folder)
    assert (folder / LOCK).stat().st_size
    assert not (folder / DAMAGED).exists()


def test_damage_that_is_found_while_a_daemon_runs_moves_the_file_aside(folder: Path) -> None:
    """A record was damaged; a child then finds that the file is, too."""
    store = daemon(folder)
    cut(folder)
    store.try_file()
    assert "is damaged" in str(store.problem)
    assert store.maintain()
    assert store.problem is None
    assert (folder / DAMAGED).exists()
    store.close()


def change_meta(key: str, *, is_removed: bool) -> Callable[[Path], None]:
    """Removes a part of what a store says of itself, or flips a bit in it."""

    def change(path: Path) -> None:
        store = open_store(path)
        with store.changes() as changes:
            value = bytearray(changes.meta(key) or b"")
            changes.delete_record("meta", key.encode())
            value[-1] ^= 1
            if not is_removed:
                changes.put_meta(key, bytes(value))
        store.close()

    return change


def write_noise(path: Path) -> None:
    (path / DATA).write_bytes(random.Random(1).randbytes(1 << 16))


NEWER = FORMAT_VERSION + 1
IDENTITY = "identity of the store is damaged; move the file away"
UNUSABLE: dict[str, tuple[Callable[[Path], None], type[CacheError], str]] = {
    "older": (lambda path: change_format(path, 1), StoreFormatError, "has format 1, .* or choose another"),
    "newer": (
        lambda path: change_format(path, FORMAT_VERSION + 1),
        StoreFormatError,
        f"has format {FORMAT_VERSION + 1}",
    ),
    "a wrong bit in the format": (change_meta("format", is_removed=False), StoreFormatError, "has format"),
    "a wrong bit in the names": (change_meta("names", is_removed=False), StoreCorrupt, IDENTITY),
    "no format": (change_meta("format", is_removed=True), StoreCorrupt, IDENTITY),
    "no names": (change_meta("names", is_removed=True), StoreCorrupt, IDENTITY),
    "no file of LMDB": (write_noise, StoreCorrupt, "is damaged"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_unusable_file_is_refused_as_it_is_and_a_daemon_moves_it_aside(tmp_path: Path, what: str) -> None:
    change, error, problem = UNUSABLE[what]
    open_store(tmp_path).close()
    change(tmp_path)
    before = (tmp_path / DATA).read_bytes()
    options: tuple[dict[str, Any], ...] = ({"budget_bytes": BUDGET}, {"read_only": True})
    for refused in options:
        with pytest.raises(error, match=problem) as caught:
            Store(tmp_path, **refused)
        assert "\n" not in caught.value.message
    assert (tmp_path / DATA).read_bytes() == before
    assert not (tmp_path / DAMAGED).exists()
    store = opened(tmp_path, None)
    store.publish(pub := publication(store, prompt(1, BLOCK)))
    assert is_whole(store, pub)
    store.close()
    assert (tmp_path / DAMAGED).read_bytes() == before
    assert stat.S_IMODE((tmp_path / DAMAGED).stat().st_mode) == 0o600


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "kv"
    open_store(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("name", [b"theirs", b"meta"])
def test_the_file_of_another_program_is_refused_and_left_alone(tmp_path: Path, name: bytes) -> None:
    with lmdb.open(str(tmp_path), max_dbs=8, map_size=1 << 24, mode=0o600) as env:
        database = env.open_db(name)
        with env.begin(write=True) as txn:
            txn.put(b"key", b"value", db=database)
    before = (tmp_path / "data.mdb").read_bytes()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="belongs to another program"):
            Store(tmp_path, budget_bytes=32 << 20, on_corruption="quarantine")
        assert (tmp_path / "data.mdb").read_bytes() == before
    if name == b"theirs":
        # What a process of ours had open when it died is its own, and damaged.
        leave_mark(tmp_path)
        Store(tmp_path, budget_bytes=32 << 20, on_corruption="quarantine").close()
        assert (tmp_path / DAMAGED).exists()


def test_a_folder_under_a_file_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnavailable, match="choose another folder"):
        open_store(tmp_path / "file" / "kv")


def test_reading_a_missing_store_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="holds no diskprefix store"):
        Store(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()
