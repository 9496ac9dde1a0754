"""Root and the folder of another user, who can replace every file in it by a link at any moment."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diskprefix.cli import cli
from diskprefix.errors import CacheError, StoreUnavailable
from diskprefix.store.compact import compact_folder, copy_store
from diskprefix.store.folder import FolderLock, become_owner, require_trusted_path
from diskprefix.store.store import Store
from tests.faults.isolated import run_isolated
from tests.store.building import BLOCK, open_store, prompt, publication

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to work in the folders of other users")

OWNER, GROUP, STRANGER = 12345, 12346, 54321
NAMES = ("data.mdb", "lock.mdb", "diskprefix.lock")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of root's that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def saved(folder: Path) -> Path:
    """A store with one prompt."""
    store = open_store(folder)
    store.publish(publication(store, prompt(1, 3 * BLOCK)))
    store.close()
    return folder


def given(path: Path, user: int = OWNER) -> Path:
    """The same path, after a user got the folder and all that is in it."""
    for each in (path, *path.iterdir()):
        os.lchown(each, user, GROUP)
    return path


@pytest.fixture
def folder(place: Path) -> Path:
    """A store in a folder of a service's user."""
    return given(saved(place / "kv"))


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


def copy_into(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        copy_store(saved(Path(name) / "kv"), folder / "copy")


OPENING = pytest.mark.parametrize("action", [read, write, compact, copy])


@OPENING
def test_root_does_not_open_the_store_of_another_user(folder: Path, action: Callable[[Path], None]) -> None:
    before = state(folder)
    with pytest.raises(StoreUnavailable, match=rf"belongs to another user \(uid {OWNER}\).*run this as that user"):
        action(folder)
    assert state(folder) == before
    assert not (folder.parent / "copy").exists()


@OPENING
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_user_in_roots_own_folder_is_refused(
    place: Path, name: str, action: Callable[[Path], None]
) -> None:
    saved(place / "kv")
    os.chown(place / "kv" / name, STRANGER, GROUP)
    with pytest.raises(StoreUnavailable, match=rf"{name} belongs to another user \(uid {STRANGER}\)"):
        action(place / "kv")
    assert (place / "kv" / name).stat().st_uid == STRANGER


@OPENING
@pytest.mark.parametrize("name", NAMES)
def test_a_link_in_the_place_of_a_file_is_refused(place: Path, name: str, action: Callable[[Path], None]) -> None:
    saved(place / "kv")
    victim = place / "victim"
    victim.touch(mode=0o640)
    (place / "kv" / name).unlink()
    (place / "kv" / name).symlink_to(victim)
    before = state(victim)
    with pytest.raises(CacheError, match="is a link or no regular file"):
        action(place / "kv")
    assert state(victim) == before


@pytest.mark.parametrize("action", [read, write, compact, copy, copy_into])
def test_roots_own_store_below_a_folder_of_another_user_is_refused(place: Path, action: Callable[[Path], None]) -> None:
    """That user can put another folder in its place between a check and a use."""
    home = place / "home"
    home.mkdir()
    saved(home / "kv")
    os.chown(home, STRANGER, GROUP)
    before = state(home / "kv")
    with pytest.raises(StoreUnavailable, match=rf"home belongs to another user \(uid {STRANGER}\)"):
        action(home / "kv")
    assert state(home / "kv") == before
    assert [each.name for each in home.iterdir()] == ["kv"]


@pytest.mark.parametrize("action", [write, copy_into])
def test_nothing_is_created_below_a_folder_or_a_link_of_another_user(
    place: Path, action: Callable[[Path], None]
) -> None:
    (place / "roots").mkdir()
    (place / "home").mkdir()
    (place / "home" / "cache").symlink_to(place / "roots")
    given(place / "home", STRANGER)
    for path in (place / "home" / "new" / "kv", place / "home" / "cache" / "kv"):
        with pytest.raises(StoreUnavailable, match="belongs to another user"):
            action(path)
    assert list((place / "roots").iterdir()) == []
    assert [each.name for each in (place / "home").iterdir()] == ["cache"]


def test_a_link_is_followed_to_its_end(place: Path) -> None:
    (place / "roots").mkdir()
    (place / "inner").symlink_to("roots")
    (place / "outer").symlink_to(place / "inner")
    require_trusted_path(place / "outer", {0})
    os.lchown(place / "inner", STRANGER, GROUP)
    with pytest.raises(StoreUnavailable, match=rf"inner belongs to another user \(uid {STRANGER}\)"):
        require_trusted_path(place / "outer", {0})
    (place / "round").symlink_to("round")
    with pytest.raises(StoreUnavailable, match="too many links"):
        require_trusted_path(place / "round", {0})


@pytest.mark.parametrize(("mode", "is_safe"), [(0o755, True), (0o1777, True), (0o777, False), (0o775, False)])
def test_a_folder_that_others_may_write_to_must_keep_their_hands_off_its_names(
    place: Path, mode: int, is_safe: bool
) -> None:
    (place / "open" / "kv").mkdir(parents=True)
    os.chown(place / "open", 0, GROUP)
    (place / "open").chmod(mode)
    if is_safe:
        require_trusted_path(place / "open" / "kv", {0})
        return
    with pytest.raises(StoreUnavailable, match="may be written to by other users"):
        require_trusted_path(place / "open" / "kv", {0})


def test_reading_creates_and_changes_nothing(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "lock.mdb").unlink()
    (tmp_path / "diskprefix.lock").unlink()
    (tmp_path / "data.mdb").chmod(0o640)
    before = state(tmp_path)
    read(tmp_path)
    assert state(tmp_path) == before


def test_a_reader_joins_the_lock_files_that_are_there(tmp_path: Path) -> None:
    saved(tmp_path)
    reader = Store(tmp_path, read_only=True)
    lock = FolderLock(tmp_path, patience_s=0)
    assert not lock.try_exclusive()
    lock.close()
    reader.close()


def as_owner(folder: Path, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns what `work` returns in a forked process that has become the folder's owner."""
    # The modules are loaded already; the Python that runs the tests may be root's alone.
    monkeypatch.setattr(os, "access", lambda *_: True)

    def child() -> str:
        become_owner(folder)
        monkeypatch.undo()
        return str(work())

    return run_isolated(child, 60)


def test_a_command_becomes_the_owner_for_good(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.setgroups([0])
    ids = as_owner(folder, lambda: (os.getresuid(), os.getresgid(), os.getgroups()), monkeypatch)
    assert ids == str(((OWNER,) * 3, (GROUP,) * 3, []))


def test_what_the_owner_could_not_do_the_command_cannot(
    folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks are left out, which is what a link does that appears right after them. LMDB follows it."""
    victim = place / "victim"
    victim.touch(mode=0o660)
    (folder / "data.mdb").unlink()
    (folder / "data.mdb").symlink_to(victim)
    before = state(victim)

    def opened() -> None:
        monkeypatch.setattr("diskprefix.store.folder._check_place", lambda *_: None)
        write(folder)

    assert "Permission denied" in as_owner(folder, opened, monkeypatch)
    assert state(victim) == before


def test_what_the_command_writes_belongs_to_the_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed() -> int:
        store = Store(folder)
        store.publish(publication(store, prompt(2, 3 * BLOCK)))
        entries = store.counts()["entries"]
        store.close()
        compact_folder(folder)
        return entries

    assert as_owner(folder, changed, monkeypatch) == "2"
    assert {file.stat().st_uid for file in folder.iterdir()} == {OWNER}


def test_inspect_by_root_lists_the_store_of_another_user(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["inspect", "--json", "--kv-cache-dir", str(folder)]
    assert as_owner(folder, lambda: cli.main(arguments, standalone_mode=False), monkeypatch) == "None"
    assert '"num_tokens"' in capfd.readouterr().out


def test_a_folder_that_the_owner_can_reach_from_inside_alone_is_the_working_directory(
    folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /var/cache/private, where systemd keeps the folders of services with DynamicUser=."""
    place.chmod(0o700)
    monkeypatch.setattr(os, "access", lambda path, _mode: path != folder)

    def child() -> str:
        path = become_owner(folder)
        monkeypatch.undo()
        return f"{path} {Store(path, read_only=True).counts()['entries']}"

    assert run_isolated(child, 60) == ". 1"


def test_a_path_that_a_third_user_controls_is_not_followed(folder: Path, place: Path) -> None:
    (place / "link").symlink_to(folder)
    os.lchown(place / "link", STRANGER, GROUP)
    with pytest.raises(StoreUnavailable, match=rf"link belongs to another user \(uid {STRANGER}\)"):
        become_owner(place / "link")
    assert os.geteuid() == 0


def test_an_installation_that_the_owner_cannot_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def child() -> str:
        monkeypatch.setattr(os, "access", lambda *_: False)
        try:
            become_owner(folder)
        except StoreUnavailable as error:
            return error.message
        return "it went on"

    assert "cannot read this installation" in run_isolated(child, 60)


def test_nothing_happens_in_roots_own_folder_and_in_none(place: Path) -> None:
    assert [become_owner(path) for path in (place, place / "nothing")] == [place, place / "nothing"]
    assert os.geteuid() == 0
