"""Opening the file of a store: its names, other files, and damage that LMDB does not survive."""

from __future__ import annotations

import errno
import faulthandler
import json
import mmap
import os
import random
import shutil
import signal
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import Queue
from typing import Any

import lmdb
import pytest

from diskprefix.errors import CacheError, StoreCorrupt, StoreFormatError, StoreUnavailable
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.store.compact import compact_folder, copy_store, rewrite_folder
from diskprefix.prefixstore.store.environment import Environment
from diskprefix.prefixstore.store.folder import CRASH, DATA, LOCK, FolderLock, crash_file, mark_made
from diskprefix.prefixstore.store.housekeeping import Housekeeping
from diskprefix.prefixstore.store.lmdb_engine import open_lmdb
from diskprefix.prefixstore.store.opening import DAMAGED, inode_of, open_environment
from diskprefix.prefixstore.store.schema import FORMAT_VERSION
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.store_file import OnCorruption
from tests.faults.file_damage import DataFile
from tests.faults.isolated import run_isolated
from tests.faults.power.check import leave_mark
from tests.prefixstore.store import other_process
from tests.prefixstore.store.building import BLOCK, change_format, is_clean, is_whole, open_store, prompt, publication
from tests.prefixstore.store.other_process import beside

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


def test_commands_need_no_key(tmp_path: Path) -> None:
    opened(tmp_path, A).close()
    tool = Store(tmp_path, read_only=True)
    assert tool.secret == A.names_seed


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
@pytest.mark.parametrize("pages", [(0,), (1,), (0, 1)])
def test_a_data_version_or_page_size_of_meta_pages_that_are_where_ours_are_is_damage(
    pages: tuple[int, ...], place: int, tmp_path: Path
) -> None:
    opened(tmp_path, None).close()
    file = tmp_path / DATA
    for page in pages:
        file.write_bytes(with_number(file.read_bytes(), page * PAGE + place, 2 * PAGE))
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


def look(folder: Path) -> None:
    """Opens a store as `inspect` does."""
    Store(folder, read_only=True).close()


def change_words(folder: Path, **values: object) -> None:
    """Changes what the lock file says."""
    said = json.loads((folder / LOCK).read_bytes())
    (folder / LOCK).write_text(json.dumps(said | values))


def words(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / LOCK).read_bytes()))


def serve(ready: Path, folder: Path) -> None:
    """A daemon that saves something, and waits to be killed."""
    store = daemon(folder)
    store.publish(publication(store, prompt(2, BLOCK)))
    ready.touch()
    time.sleep(3600)


def is_killed(work: Callable[[], object]) -> bool:
    """Does work in another process, which is then killed."""

    def works() -> str:
        kept = work()
        os.kill(os.getpid(), signal.SIGKILL)
        return str(kept)

    return run_isolated(works, 60) == "signal SIGKILL"


def saves(folder: Path) -> Store:
    store = daemon(folder)
    store.publish(publication(store, prompt(2, BLOCK)))
    return store


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that this process checks from now on."""
    checked: list[Path] = []
    check = Environment.require_survivable

    def counted(env: Environment) -> None:
        checked.append(env.path)
        check(env)

    monkeypatch.setattr(Environment, "require_survivable", counted)
    return checked


def lose_a_page(folder: Path) -> None:
    """Nothing would crash: the meta pages just know one page more."""
    data = bytearray((folder / DATA).read_bytes())
    for at in (136, PAGE + 136):
        data[at : at + 8] = (int.from_bytes(data[at : at + 8], "little") + 1).to_bytes(8, "little")
    (folder / DATA).write_bytes(bytes(data) + bytes(PAGE))


def free_a_page_that_is_used(folder: Path) -> None:
    file = DataFile(bytearray((folder / DATA).read_bytes()))
    at, _ = file.record_at(file.leaf_nodes(file.root(file.free))[-1])
    # The numbers descend, so the last one may become the lowest.
    file.put(at + 8 * file.number(at, 8), sorted(file.structure)[2].to_bytes(8, "little"))
    (folder / DATA).write_bytes(file.data)


def test_a_kill_needs_no_check_before_the_machine_is_started_again(folder: Path, checks: list[Path]) -> None:
    for _ in range(3):
        assert is_killed(lambda: saves(folder))
    store = daemon(folder)
    assert checks == []
    assert is_whole(store, publication(store, prompt(1, 3 * BLOCK)))
    store.close()
    change_words(folder, boot="another")
    for _ in range(2):
        daemon(folder).close()
    assert checks == [folder]


@pytest.mark.parametrize(
    "said", [b"", b"x", b'{"boot": 3}', b'{"boot": "", "file": 1}'], ids=["nothing", "no JSON", "types", "no boot"]
)
def test_without_a_mark_that_can_be_read_the_file_is_checked(folder: Path, said: bytes, checks: list[Path]) -> None:
    (folder / LOCK).write_bytes(said)
    daemon(folder).close()
    assert checks == [folder]


def test_a_system_without_an_id_of_its_boot_checks_at_every_start(
    folder: Path, checks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.prefixstore.store.folder.boot_id", lambda: "")
    for _ in range(2):
        daemon(folder).close()
    assert len(checks) == 2


def test_a_file_in_the_place_of_the_one_that_was_checked_is_checked(folder: Path, checks: list[Path]) -> None:
    shutil.copy(folder / DATA, folder / "copy")
    (folder / "copy").replace(folder / DATA)
    daemon(folder).close()
    assert checks == [folder]


def test_what_rewriting_the_file_made_needs_no_check(folder: Path, checks: list[Path]) -> None:
    assert rewrite_folder(folder)
    compact_folder(folder)
    checks.clear()
    daemon(folder).close()
    assert checks == []


def test_two_processes_that_end_before_they_write_cause_a_check_and_one_does_not(
    folder: Path, checks: list[Path]
) -> None:
    assert is_killed(lambda: daemon(folder))
    # Neither hides nor causes it: a daemon that writes nothing and ends, and a command that is killed.
    daemon(folder).close()
    assert is_killed(lambda: Store(folder, read_only=True))
    assert checks == []
    assert is_killed(lambda: daemon(folder))
    daemon(folder).close()
    assert checks == [folder]
    daemon(folder).close()
    assert checks == [folder]


def test_a_daemon_that_lives_and_saves_nothing_is_killed_as_often_as_one_likes(
    folder: Path, checks: list[Path]
) -> None:
    for _ in range(2):
        assert is_killed(lambda: Housekeeping(daemon(folder), 0.0).maintain())
    daemon(folder).close()
    assert checks == []


def test_a_kill_while_the_mark_is_written_leaves_one_that_can_be_read(
    folder: Path, checks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        change_words(folder, holder="a process with a long name that was killed")
        assert is_killed(lambda: daemon(folder))
    daemon(folder).close()
    assert checks == []


def test_a_signal_that_ends_a_daemon_after_its_first_commit_causes_one_check(
    folder: Path, checks: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    def dies() -> str:
        store = saves(folder)
        faulthandler.enable(crash_file(folder))
        os.kill(os.getpid(), signal.SIGSEGV)
        return str(store)

    assert run_isolated(dies, 60) == "signal SIGSEGV"
    assert checks == []
    for _ in range(2):
        daemon(folder).close()
    assert checks == [folder]
    assert "Segmentation fault" in caplog.text
    assert (folder / CRASH).read_bytes() == b""


def test_a_file_that_lmdb_dies_of_ends_two_processes_and_the_third_moves_it_aside(folder: Path) -> None:
    """It was damaged after it was checked, so nobody looks at it before LMDB does."""
    cut(folder)

    def dies() -> str:
        faulthandler.disable()
        daemon(folder).counts()
        return "lives"

    for _ in range(2):
        assert run_isolated(dies, 30).startswith("signal")
    store = daemon(folder)
    assert store.counts()["entries"] == 0
    assert (folder / DAMAGED).exists()


def refused(folder: Path) -> None:
    with pytest.raises(StoreUnavailable):
        opened(folder, A)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "other", [lambda folder: Store(folder).close(), look, refused, lambda folder: copy_store(folder, folder / "copy")]
)
def test_a_process_that_closes_leaves_what_the_others_need(folder: Path, other: Callable[[Path], None]) -> None:
    with beside(serve, folder):
        before = words(folder)
        other(folder)
        assert words(folder) == before
    assert words(folder) == before


def test_a_needed_check_is_made_beside_a_command_that_reads(folder: Path, checks: list[Path]) -> None:
    with beside(other_process.hold, folder, True):
        change_words(folder, boot="another")
        daemon(folder).close()
        assert checks == [folder]
    daemon(folder).close()
    assert checks == [folder]


def test_who_comes_second_waits_for_the_check_and_is_told_why(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock, told = FolderLock(folder), Queue[str]()
    assert lock.try_exclusive("checking the store's file")
    with pytest.raises(StoreUnavailable, match=r"process \d+ is checking the store's file; try again when that has"):
        compact_folder(folder)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(Store, folder, budget_bytes=BUDGET, serving=True, on_wait=told.put)
        assert told.get(timeout=60) == f"process {os.getpid()} is checking the store's file"
        assert not second.done()
        lock.close()
        second.result(60).close()
    assert [record.message for record in caplog.records if "waiting for" in record.message] == [
        f"[disk-cache] waiting for --kv-cache-dir {folder}: process {os.getpid()} is checking the store's file"
    ]


def test_a_daemon_that_runs_does_not_wait_for_who_replaces_the_file(folder: Path) -> None:
    store = daemon(folder)
    (folder / DATA).rename(folder / "away")
    (folder / LOCK).unlink()
    lock = FolderLock(folder)
    assert lock.try_exclusive("replacing the store's file")
    assert not store.maintain()
    assert "replacing the store's file" in str(store.problem)
    lock.close()
    store._retry_at = 0.0
    assert store.maintain()


def test_a_store_that_is_refused_keeps_its_file_and_its_mark(folder: Path) -> None:
    cut(folder)
    leave_mark(folder)
    before = (folder / LOCK).read_bytes()
    with pytest.raises(StoreCorrupt):
        Store(folder)
    assert words(folder) | {"holder": ""} == json.loads(before) | {"holder": ""}
    assert not (folder / DAMAGED).exists()


@pytest.mark.parametrize("place", [0, 10, 12], ids=["number", "kind", "count"])
def test_pages_whose_header_is_damaged_are_not_deleted_by_lmdb_before_it_is_written_again(
    folder: Path, place: int
) -> None:
    """LMDB would free other pages than those of the piece: a thousand, or as many as memory has room for."""
    store = daemon(folder)
    store.publish(pub := publication(store, prompt(3, BLOCK), payload_bytes=100_000))
    node = pub.nodes[0]
    store.close()
    file = DataFile(bytearray((folder / DATA).read_bytes()))
    for at, size in file.databases[b"payloads"]:
        if size > PAGE:
            file.put(at - 16 + place, (file.number(at - 16 + place, 2) + 1000).to_bytes(2, "little"))
    (folder / DATA).write_bytes(file.data)
    store = daemon(folder)
    with pytest.raises(StoreCorrupt, match=r"header of a piece|Located page was wrong type"):
        store.quarantine(node.name, node.parent)
    assert store.maintain()
    assert store.problem is None
    assert not (folder / DAMAGED).exists()
    assert is_whole(store, pub)
    assert is_whole(store, publication(store, prompt(1, 3 * BLOCK)))
    assert store.quarantine(node.name, node.parent) == len(pub.nodes)
    assert is_clean(store)


def test_a_page_of_a_payload_that_lies_over_that_of_another_does_not_make_lmdb_free_the_other(folder: Path) -> None:
    """As a misdirected write leaves it: the header names another page, which is there and has the same bytes."""
    store = daemon(folder)
    pubs = [publication(store, prompt(seed, BLOCK), payload_bytes=100_000, root=b"q" * 16) for seed in (3, 4)]
    for pub in pubs:
        store.publish(pub)
    store.close()
    file = DataFile(bytearray((folder / DATA).read_bytes()))
    first, second = (at // PAGE * PAGE for at, size in file.databases[b"payloads"] if size > 50_000)
    file.data[second : second + PAGE] = file.data[first : first + PAGE]
    (folder / DATA).write_bytes(file.data)
    store = daemon(folder)
    (damaged,) = [pub for pub in pubs if not is_sound(store, pub)]
    node = damaged.nodes[0]
    with pytest.raises(StoreCorrupt, match="header of a piece"):
        store.quarantine(node.name, node.parent)
    assert store.maintain()
    assert store.quarantine(node.name, node.parent) == len(damaged.nodes)
    store.publish(damaged)
    store.environment.require_survivable()
    assert all(is_sound(store, pub) for pub in pubs)
    assert is_clean(store)


def is_sound(store: Store, pub: Publication) -> bool:
    try:
        return is_whole(store, pub)
    except StoreCorrupt:
        return False


def test_damage_that_is_found_while_a_daemon_runs_moves_the_file_aside(folder: Path) -> None:
    """A record was damaged; a child then finds that the file is, too."""
    store = daemon(folder)
    cut(folder)
    store.try_file()
    assert "is damaged" in str(store.problem)
    assert store.maintain()
    assert store.problem is None
    assert (folder / DAMAGED).exists()


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


def damaged(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Changes the file and has it checked, as after a start of the machine."""

    def change_and_forget(path: Path) -> None:
        change(path)
        change_words(path, boot="another")

    return change_and_forget


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
    "pages that are gone": (damaged(cut), StoreCorrupt, "is not in the file"),
    "a page that is lost": (damaged(lose_a_page), StoreCorrupt, "neither in use nor free"),
    "a page that is used twice": (damaged(free_a_page_that_is_used), StoreCorrupt, "both free and in use"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_unusable_file_is_refused_as_it_is_and_a_daemon_moves_it_aside(folder: Path, what: str) -> None:
    change, error, problem = UNUSABLE[what]
    change(folder)
    before = (folder / DATA).read_bytes()
    options: tuple[dict[str, Any], ...] = ({"budget_bytes": BUDGET}, {"read_only": True})
    for refused in options:
        with pytest.raises(error, match=problem) as caught:
            Store(folder, **refused)
        assert "\n" not in caught.value.message
    assert (folder / DATA).read_bytes() == before
    assert not (folder / DAMAGED).exists()
    store = opened(folder, None)
    store.publish(pub := publication(store, prompt(1, BLOCK)))
    assert is_whole(store, pub)
    store.close()
    assert (folder / DAMAGED).read_bytes() == before
    assert stat.S_IMODE((folder / DAMAGED).stat().st_mode) == 0o600


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "kv"
    open_store(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_a_process_that_checked_a_file_leaves_the_mark_of_the_one_that_replaced_it_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Environment.require_survivable

    def replaced(env: Environment) -> None:
        check(env)
        shutil.copy(folder / DATA, folder / "new")
        (folder / "new").replace(folder / DATA)
        mark_made(folder)

    monkeypatch.setattr(Environment, "require_survivable", replaced)
    with closing(FolderLock(folder)):
        env, lock = open_environment(folder, budget_bytes=BUDGET, read_only=False, checks=True, on_wait=None)
        env.close()
        lock.close()
    assert json.loads((folder / LOCK).read_bytes())["file"] == inode_of(folder)


@pytest.mark.parametrize("name", [b"theirs", b"meta"])
def test_the_file_of_another_program_is_refused_and_left_alone(tmp_path: Path, name: bytes) -> None:
    with open_lmdb(tmp_path, max_dbs=8, map_size=1 << 24, mode=0o600) as env:
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
