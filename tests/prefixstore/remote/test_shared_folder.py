"""A folder in place of a bucket: its mode, those of its objects, and which folders are refused."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from diskprefix.errors import SettingsError
from diskprefix.prefixstore.remote.objects import ObjectStore, RemoteUnavailable
from diskprefix.prefixstore.remote.shared_folder import prepare_folder

PATH = "namespace/root/name.3"


@pytest.fixture(params=[0, 0o022, 0o077], ids="umask{:03o}".format)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """The modes of a folder and of everything in it."""
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.mark.usefixtures("umask")
def test_only_the_user_reads_a_folder_that_the_daemon_made_whatever_the_umask_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "shared" / "tier"
    ObjectStore(folder.as_uri()).put(PATH, b"token ids")
    assert modes(folder) == {".": 0o700, "namespace": 0o700, "namespace/root": 0o700, PATH: 0o600}
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert caplog.messages == []


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(
    ("mode", "object_mode", "readers"),
    [
        (0o700, 0o600, None),
        (0o750, 0o640, "the group"),
        (0o770, 0o660, "the group"),
        (0o755, 0o644, "every user of the machine"),
        (0o711, 0o600, "every user of the machine"),
    ],
)
def test_objects_may_be_read_by_whom_the_folder_was_made_for(
    mode: int, object_mode: int, readers: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    folder.chmod(mode)
    # Not root, for whom a folder of a group is one that others can replace.
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patched:
        patched.setattr("diskprefix.prefixstore.remote.shared_folder.distrusted_by_root", lambda _path: None)
        objects = ObjectStore(folder.as_uri())
        objects.put(PATH, b"token ids")
        # A command that purges reads nothing out to anybody.
        ObjectStore(folder.as_uri(), makes_folder=False)
    assert modes(folder) == {".": mode, "namespace": mode, "namespace/root": mode, PATH: object_mode}
    assert [line.partition(" may read ")[0].removeprefix("[remote] ") for line in caplog.messages] == (
        [readers if readers.startswith("every") else f"the group {folder.stat().st_gid}"] if readers else []
    )
    assert [*objects.list("namespace/")] == [PATH]


def test_a_group_keeps_its_objects_where_the_folder_hands_on_its_group(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    folder.chmod(0o2700)
    ObjectStore(folder.as_uri()).put(PATH, b"token ids")
    assert modes(folder) == {".": 0o2700, "namespace": 0o2700, "namespace/root": 0o2700, PATH: 0o600}


@pytest.mark.parametrize("makes_folder", [True, False])
@pytest.mark.parametrize(("mode", "cure"), [(0o777, "chmod it to 700"), (0o1777, "give a folder of your own in it")])
def test_a_folder_to_which_every_user_may_write_is_refused(
    mode: int, cure: str, makes_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.prefixstore.remote.shared_folder.distrusted_by_root", lambda _path: None)
    tmp_path.chmod(mode)
    with pytest.raises(SettingsError, match=f"--remote-tier: every user may write to .* {cure}"):
        ObjectStore(tmp_path.as_uri(), makes_folder=makes_folder)


def test_a_folder_of_another_user_is_refused_and_one_of_roots_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid != 0:
        with pytest.raises(SettingsError, match="belongs to another user"):
            prepare_folder("--remote-tier", tmp_path, makes_folder=True)
    else:
        prepare_folder("--remote-tier", tmp_path, makes_folder=True)
        os.chown(tmp_path, 12345, -1)
        with pytest.raises(SettingsError, match=r"belongs to another user \(uid 12345\)"):
            prepare_folder("--remote-tier", tmp_path, makes_folder=True)


def test_root_uses_no_folder_that_another_user_could_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    folder = tmp_path / "tier"
    folder.mkdir(mode=0o700)
    if tmp_path.stat().st_uid == 0:
        os.chown(folder, 12345, -1)
    with pytest.raises(SettingsError, match="belongs to another user"):
        ObjectStore(folder.as_uri())


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(0o600)
    with pytest.raises(SettingsError, match=r"--remote-tier: .*(is not a folder|cannot be used)"):
        ObjectStore(file.as_uri())


def test_no_object_is_written_through_a_link(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "tier", tmp_path / "elsewhere"
    elsewhere.mkdir()
    objects = ObjectStore(folder.as_uri())
    (folder / "namespace").symlink_to(elsewhere)
    with pytest.raises(RemoteUnavailable):
        objects.put(PATH, b"token ids")
    (folder / "object").symlink_to(elsewhere / "file")
    objects.put("object", b"token ids")
    assert [*elsewhere.iterdir()] == []
    assert (folder / "object").read_bytes() == b"token ids"


def test_a_write_that_fails_leaves_no_file_and_the_old_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = ObjectStore(tmp_path.as_uri())
    objects.put(PATH, b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RemoteUnavailable, match="the disk is full"):
        objects.put(PATH, b"new")
    assert [file.name for file in (tmp_path / PATH).parent.iterdir()] == ["name.3"]
    assert (tmp_path / PATH).read_bytes() == b"old"


def test_a_folder_that_is_gone_takes_nothing(tmp_path: Path) -> None:
    objects = ObjectStore((tmp_path / "tier").as_uri())
    (tmp_path / "tier").rmdir()
    with pytest.raises(RemoteUnavailable, match="there is no such bucket"):
        objects.put(PATH, b"token ids")
