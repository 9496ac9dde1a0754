"""Who may use the folder of a store, and its lock. The owner of a folder can replace every file in it by a link."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from diskprefix.errors import CacheError, StoreCorrupt, StoreUnavailable
from diskprefix.prefixstore.store import folder as folder_module
from diskprefix.prefixstore.store.compact import compact_folder, copy_store, replace_store, rewrite_folder
from diskprefix.prefixstore.store.folder import (
    LMDB_LOCK,
    LOCK,
    NAMES_LOCK,
    FolderLock,
    FolderUnavailable,
    locked_names,
    make_folder,
    reserve_lmdb_lock,
    sync,
)
from diskprefix.prefixstore.store.opening import DAMAGED, inode_of, set_aside
from diskprefix.prefixstore.store.store import Store
from tests.prefixstore.store.building import BLOCK, open_store, prompt, publication


def test_a_lock_file_that_is_replaced_again_and_again_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_current = FolderLock._is_current

    def replaced(lock: FolderLock, fd: int) -> bool:
        (tmp_path / LOCK).unlink()
        (tmp_path / LOCK).touch()
        return is_current(lock, fd)

    monkeypatch.setattr(FolderLock, "_is_current", replaced)
    with pytest.raises(StoreUnavailable, match="try again"):
        FolderLock(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 9000, b"[]", b'{"boot":"\xe4"}', b'{"x":' + b"[" * 9000, b'{"file":1e400}', b'{"file":-1}']
)
def test_whatever_bytes_are_in_a_lock_file_a_daemon_starts(tmp_path: Path, content: bytes) -> None:
    with closing(open_store(tmp_path / "kv")) as store:
        pub = publication(store, prompt(1, BLOCK + 1))
    for name in (LOCK, NAMES_LOCK, LMDB_LOCK):
        (tmp_path / "kv" / name).write_bytes(content)
        with closing(Store(tmp_path / "kv", serving=True)) as store:
            store.publish(pub)


def test_a_lock_is_exclusive_only_while_nobody_else_has_it(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    second = FolderLock(tmp_path)
    assert not first.try_exclusive("replacing the file")
    second.close()
    assert first.try_exclusive("replacing the file")
    with pytest.raises(StoreUnavailable, match="is replacing the file; try again"):
        FolderLock(tmp_path)
    first.share()
    FolderLock(tmp_path).close()
    first.close()


@pytest.mark.parametrize(
    ("name", "open_file"),
    [
        (LOCK, lambda folder: FolderLock(folder)),
        (LMDB_LOCK, lambda folder: reserve_lmdb_lock(folder, create=True)),
    ],
)
def test_a_link_in_the_place_of_a_file_is_not_followed(
    tmp_path: Path, name: str, open_file: Callable[[Path], object]
) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / name).symlink_to(tmp_path / "target")
    with pytest.raises((StoreUnavailable, OSError)):
        open_file(tmp_path / "kv")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "error", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EIO], ids=errno.errorcode.get
)
def test_a_folder_that_cannot_be_synced_is_made_unless_the_disk_fails(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_fd: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", failing)
    folder = tmp_path / "above" / "kv"
    if error == errno.EIO:
        with pytest.raises(FolderUnavailable):
            make_folder(folder)
    else:
        make_folder(folder)
    assert folder.exists() == (error != errno.EIO)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=os.strerror(error)):
        sync(tmp_path / "file")


OWNER, GROUP = 12345, 12346
NAMES = ("data.mdb", "lock.mdb", "diskprefix.lock", "names.lock")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to work in the folders of other users")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may enter, with a store in `home/kv`."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folder = Path(name, "home", "kv")
        folder.parent.mkdir()
        store = open_store(folder)
        store.publish(publication(store, prompt(1, 3 * BLOCK)))
        store.close()
        yield Path(name)


def state(path: Path) -> dict[str, tuple[bytes, int, int]]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = {file.name: file.lstat() for file in files}
    return {f.name: (f.read_bytes(), found[f.name].st_uid, stat.S_IMODE(found[f.name].st_mode)) for f in files}


def read(folder: Path) -> None:
    Store(folder, read_only=True).close()


def write(folder: Path) -> None:
    Store(folder, budget_bytes=32 << 20, on_corruption="quarantine").close()


def compact(folder: Path) -> None:
    compact_folder(folder)


def copy(folder: Path) -> None:
    copy_store(folder, folder.parent / "copy")


ACTIONS = pytest.mark.parametrize("action", [read, write, compact, copy])
REFUSED = rf"belongs to another user \(uid {OWNER}\); run this as that user"


@needs_root
@ACTIONS
@pytest.mark.parametrize("what", ["home", "home/kv", *(f"home/kv/{name}" for name in NAMES)])
def test_root_opens_no_store_that_another_user_can_exchange(
    place: Path, what: str, action: Callable[[Path], None]
) -> None:
    os.chown(place / what, OWNER, GROUP)
    before = state(place / "home/kv")
    with pytest.raises(StoreUnavailable, match=REFUSED):
        action(place / "home/kv")
    assert state(place / "home/kv") == before
    assert not (place / "home/copy").exists()


@needs_root
@pytest.mark.parametrize("action", [write, lambda folder: copy_store(folder.parents[1] / "roots/kv", folder)])
def test_nothing_is_created_below_a_folder_or_through_a_link_of_another_user(
    place: Path, action: Callable[[Path], None]
) -> None:
    (place / "home").rename(place / "roots")
    (place / "home").mkdir()
    (place / "link").symlink_to(place / "home")
    os.chown(place / "home", OWNER, GROUP)
    for folder in (place / "home/new", place / "link/new"):
        with pytest.raises(StoreUnavailable, match=REFUSED):
            action(folder)
    assert list((place / "home").iterdir()) == []


@needs_root
@pytest.mark.parametrize(("mode", "is_safe"), [(0o755, True), (0o1777, True), (0o777, False), (0o775, False)])
def test_a_folder_that_others_may_write_to_must_keep_their_hands_off_its_names(
    place: Path, mode: int, is_safe: bool
) -> None:
    os.chown(place / "home", 0, GROUP)
    (place / "home").chmod(mode)
    if is_safe:
        read(place / "home/kv")
        return
    with pytest.raises(StoreUnavailable, match="may be written to by other users"):
        read(place / "home/kv")


@ACTIONS
@pytest.mark.parametrize("name", NAMES)
def test_a_link_in_the_place_of_a_file_is_refused(place: Path, name: str, action: Callable[[Path], None]) -> None:
    folder, victim = place / "home/kv", place / "victim"
    victim.touch(mode=0o640)
    (folder / name).unlink()
    (folder / name).symlink_to(victim)
    before = state(victim)
    with pytest.raises(CacheError, match="is a link or no regular file"):
        action(folder)
    assert state(victim) == before


def test_reading_creates_and_changes_nothing(place: Path) -> None:
    folder = place / "home/kv"
    (folder / "lock.mdb").unlink()
    (folder / "diskprefix.lock").unlink()
    (folder / "names.lock").unlink()
    (folder / "data.mdb").chmod(0o640)
    before = state(folder)
    read(folder)
    assert state(folder) == before


def restore(folder: Path) -> None:
    replace_store(folder.parent / "copy", folder)


def erase(folder: Path) -> None:
    rewrite_folder(folder)


def move_aside(folder: Path) -> None:
    set_aside(folder, inode_of(folder), StoreCorrupt("it is damaged"))
    assert (folder / DAMAGED).exists()


def test_a_lock_that_another_user_can_have_holds_up_nobody(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_MOMENT_S", 0.0)
    folder = place / "home/kv"
    copy(folder)
    folder.chmod(0o755)
    with ExitStack() as held:
        for path in (folder, folder.parent, folder.parent / "copy"):
            fd = os.open(path, os.O_RDONLY)
            held.callback(os.close, fd)
            # The lock of a process that never ends.
            fcntl.flock(fd, fcntl.LOCK_EX)
        for action in (write, read, compact, erase, restore, move_aside, write):
            action(folder)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(_fd: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreUnavailable, match=f"{os.strerror(number)}; repair it or choose another folder"):
        write(place / "home/kv")


def test_whoever_locks_a_file_of_the_store_needs_the_right_of_its_owner(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, locked = fcntl.flock, set[tuple[bool, int]]()

    def noted(fd: int, operation: int) -> None:
        mode = os.fstat(fd).st_mode
        locked.add((stat.S_ISREG(mode), stat.S_IMODE(mode)))
        flock(fd, operation)

    folder = place / "home/kv"
    folder.chmod(0o755)
    for name in NAMES:
        (folder / name).chmod(0o644)
    monkeypatch.setattr(fcntl, "flock", noted)
    for action in (write, compact, copy, erase, restore, move_aside, write):
        action(folder)
    assert locked == {(True, 0o600)}
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == dict.fromkeys(
        [*NAMES, DAMAGED], 0o600
    )


def test_a_process_that_keeps_a_lock_for_long_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_MOMENT_S", 0.1)
    folder = place / "home/kv"
    with locked_names(folder, change=True):
        for action in (read, write, compact, copy):
            with pytest.raises(StoreUnavailable, match=rf"process {os.getpid()} .*has locked names.lock and does not"):
                action(folder)
    write(folder)


def test_a_reader_joins_the_lock_files_that_are_there(place: Path) -> None:
    reader = Store(place / "home/kv", read_only=True)
    lock = FolderLock(place / "home/kv")
    assert not lock.try_exclusive("replacing the file")
    lock.close()
    reader.close()
