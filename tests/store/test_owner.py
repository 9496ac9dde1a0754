"""Root in the folder of another user, who can replace every file in it by a link at any moment."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from diskprefix.cli import cli
from diskprefix.errors import CacheError, StoreUnavailable
from diskprefix.store import opening
from diskprefix.store.compact import compact_folder, copy_store
from diskprefix.store.folder import FolderLock
from diskprefix.store.owner import owner_rights
from diskprefix.store.store import Store
from tests.store.building import BLOCK, is_whole, open_store, prompt, publication

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can work in the folders of other users")

OWNER, GROUP, STRANGER = 12345, 12346, 54321
NAMES = ("data.mdb", "lock.mdb", "diskprefix.lock")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with one prompt in a folder of a service's user, below a folder that this user must not enter."""
    folder = tmp_path / "kv"
    store = open_store(folder)
    store.publish(publication(store, prompt(1, 3 * BLOCK)))
    store.close()
    for place in (folder, *folder.iterdir()):
        os.chown(place, OWNER, GROUP)
    tmp_path.chmod(0o700)
    return folder


@pytest.fixture
def victim() -> Iterator[Path]:
    """A file of root's that root's group may write, where everybody can reach it. It is empty: LMDB writes to an empty
    file at once."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o711)
        file = Path(place) / "victim"
        file.touch()
        file.chmod(0o660)
        os.setgroups([0])
        yield file


def state(file: Path) -> tuple[bytes, int, int, int]:
    found = file.stat()
    return file.read_bytes(), found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


def read(folder: Path) -> None:
    Store.open(folder, read_only=True).close()


def write(folder: Path) -> None:
    Store.open(folder, budget_bytes=32 << 20, on_corruption="quarantine").close()


def compact(folder: Path) -> None:
    compact_folder(folder)


def copy(folder: Path) -> None:
    copy_store(folder, folder.parent / "copy")


def inspect(folder: Path) -> None:
    cli.main(["inspect", "--kv-cache-dir", str(folder)], standalone_mode=False)


def verify(folder: Path) -> None:
    cli.main(["verify", "--kv-cache-dir", str(folder)], standalone_mode=False)


ACTIONS = pytest.mark.parametrize("action", [read, write, compact, copy, inspect, verify])


@ACTIONS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plant", [os.symlink, os.link], ids=["symbolic link", "hard link"])
def test_root_leaves_a_file_alone_that_a_link_in_the_folder_points_to(
    folder: Path, victim: Path, name: str, plant: Callable[[Path, Path], None], action: Callable[[Path], None]
) -> None:
    (folder / name).unlink()
    plant(victim, folder / name)
    before = state(victim)
    with pytest.raises(CacheError) as caught:
        action(folder)
    assert "\n" not in str(caught.value)
    assert state(victim) == before


@ACTIONS
@pytest.mark.parametrize("name", NAMES)
def test_a_link_that_is_planted_after_the_check_reaches_nothing_but_what_the_owner_may_reach(
    folder: Path, victim: Path, name: str, action: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks are left out, which is what a link does that appears right after them. LMDB follows it."""
    monkeypatch.setattr("diskprefix.store.folder._check_place", lambda *_: None)
    monkeypatch.setattr("diskprefix.store.folder._OPEN_FLAGS", os.O_CLOEXEC)
    monkeypatch.setattr(opening, "_require_sound", lambda *_: None)
    (folder / name).unlink()
    (folder / name).symlink_to(victim)
    before = state(victim)
    with suppress(CacheError):
        action(folder)
    assert state(victim) == before


def test_root_reads_a_store_and_creates_and_changes_nothing(folder: Path) -> None:
    (folder / "lock.mdb").unlink()
    (folder / "diskprefix.lock").unlink()
    (folder / "data.mdb").chmod(0o640)
    before = state(folder / "data.mdb")
    for action in (read, inspect, verify, copy):
        action(folder)
        assert [file.name for file in folder.iterdir()] == ["data.mdb"]
        assert state(folder / "data.mdb") == before


def test_the_owner_reads_a_store_and_creates_nothing(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "lock.mdb").unlink()
    (tmp_path / "diskprefix.lock").unlink()
    read(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["data.mdb"]


def test_a_reader_joins_the_lock_files_that_are_there(folder: Path) -> None:
    reader = Store.open(folder, read_only=True)
    lock = FolderLock(folder, patience_s=0)
    assert not lock.try_exclusive()
    lock.close()
    reader.close()


@pytest.mark.parametrize("action", [write, compact])
def test_what_root_creates_belongs_to_the_folders_owner(folder: Path, action: Callable[[Path], None]) -> None:
    (folder / "lock.mdb").unlink()
    (folder / "diskprefix.lock").unlink()
    action(folder)
    store = Store.open(folder)
    assert store.counts()["entries"] == 1
    pub = publication(store, prompt(2, 3 * BLOCK))
    store.publish(pub)
    assert is_whole(store, pub)
    store.close()
    found = {file.name: (file.stat().st_uid, file.stat().st_gid) for file in folder.iterdir()}
    assert found == dict.fromkeys(NAMES, (OWNER, GROUP))


def test_a_store_that_root_creates_in_a_folder_belongs_to_the_folders_owner(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    os.chown(tmp_path / "kv", OWNER, GROUP)
    open_store(tmp_path / "kv").close()
    found = {file.name: (file.stat().st_uid, file.stat().st_gid) for file in (tmp_path / "kv").iterdir()}
    assert found == dict.fromkeys(NAMES, (OWNER, GROUP))


def test_a_damaged_file_that_root_moves_aside_stays_the_owners(folder: Path) -> None:
    (folder / "data.mdb").write_bytes(b"\1" * 9000)
    write(folder)
    found = {file.name: file.stat().st_uid for file in folder.iterdir()}
    assert found == dict.fromkeys((*NAMES, "damaged.mdb"), OWNER)


@ACTIONS
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_a_third_user_is_refused(folder: Path, name: str, action: Callable[[Path], None]) -> None:
    os.chown(folder / name, STRANGER, GROUP)
    with pytest.raises(StoreUnavailable, match=rf"{name} belongs to another user \(uid {STRANGER}\)"):
        action(folder)
    assert (folder / name).stat().st_uid == STRANGER


def test_root_does_not_remove_what_a_replacement_folder_links_to(folder: Path, tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "data.mdb").write_bytes(b"root's")
    (folder / "replacement").symlink_to(treasure)
    with pytest.raises(CacheError):
        compact(folder)
    assert (treasure / "data.mdb").read_bytes() == b"root's"


def test_a_folder_that_another_user_linked_to_is_refused(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    read(link)
    os.lchown(link, OWNER, GROUP)
    read(link)
    os.lchown(link, STRANGER, GROUP)
    with pytest.raises(StoreUnavailable, match="link that another user made"):
        read(link)


def test_a_folder_that_the_group_may_write_to_is_refused_to_root_too(folder: Path) -> None:
    folder.chmod(0o770)
    with pytest.raises(StoreUnavailable, match="others may write to"):
        read(folder)


def test_a_message_names_the_folder_as_it_was_given(folder: Path) -> None:
    (folder / "data.mdb").write_bytes(b"\1" * 9000)
    with pytest.raises(CacheError) as caught:
        read(folder)
    assert str(folder / "data.mdb") in str(caught.value)
    assert "/proc/" not in str(caught.value)


def test_roots_groups_add_nothing_to_the_owners_rights(folder: Path, victim: Path) -> None:
    with owner_rights(folder), pytest.raises(PermissionError):
        victim.write_bytes(b"changed")


def test_the_rights_are_the_owners_inside_the_block_and_roots_after_it(
    folder: Path, victim: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    os.chown(other, STRANGER, GROUP)
    shutil.copy(victim, folder / "mine")
    with owner_rights(folder) as place:
        (place / "new").touch()
        with owner_rights(other) as nested:
            (nested / "new").touch()
            with pytest.raises(PermissionError):
                (place / "newer").touch()
        (place / "newer").touch()
        with pytest.raises(PermissionError):
            victim.write_bytes(b"changed")
    victim.write_bytes(b"changed by root")
    assert [file.stat().st_uid for file in (folder / "new", folder / "newer", other / "new")] == [
        OWNER,
        OWNER,
        STRANGER,
    ]


def test_where_a_thread_cannot_take_the_owners_rights_root_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found = os.stat(tmp_path)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: os.stat_result((*found[:4], 1000, *found[5:])))
    with pytest.raises(StoreUnavailable, match="run this as that user"), owner_rights(tmp_path):
        pass
