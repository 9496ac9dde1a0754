"""Which mount holds a folder, and whether the folder outlives a container."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from diskprefix import file_system
from diskprefix.daemon import app
from diskprefix.daemon.settings import Settings
from diskprefix.file_system import Mount, lost_with_container, mount_of

OVERLAY = "1 0 0:30 / / rw,relatime - overlay overlay rw,lowerdir=/a,upperdir=/b"
NUMBER = "0123456789abcdef" * 4
PLACES = ["/var/lib/docker/volumes", "/home/me/.local/share/containers/storage/volumes", "/@/volumes"]


@pytest.fixture(autouse=True)
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "mountinfo"
    monkeypatch.setattr(file_system, "_MOUNTS", file)
    monkeypatch.setenv(file_system.VOLUME, "/var/cache/diskprefix")
    return file


def volume_at(place: Path, root: str, kind: str = "ext4") -> str:
    return f"{OVERLAY}\n2 1 8:1 {root} {place} rw shared:3 master:1 - {kind} /dev/sda1 rw"


def test_the_innermost_mount_holds_a_folder_that_may_not_be_there_yet(mounts: Path, tmp_path: Path) -> None:
    mounts.write_text(volume_at(tmp_path, "/a volume".replace(" ", "\\040")), encoding="utf-8")
    assert mount_of(tmp_path / "kv/deep") == Mount(str(tmp_path), "/a volume", "ext4")
    assert mount_of(Path(f"{tmp_path}-else")) == Mount("/", "/", "overlay")
    mounts.unlink()
    assert mount_of(tmp_path) is None


@pytest.mark.parametrize("where", PLACES)
def test_a_cache_outlives_its_container_in_a_volume_with_a_name_or_a_folder_of_the_host(
    mounts: Path, tmp_path: Path, where: str
) -> None:
    for root in (f"{where}/diskprefix/_data", "/home/me/cache", "/", f"/{NUMBER}/_data/cache"):
        mounts.write_text(volume_at(tmp_path, root), encoding="utf-8")
        assert lost_with_container(tmp_path / "kv") == ""


@pytest.mark.parametrize("where", PLACES)
def test_a_cache_ends_with_its_container_without_a_volume_that_has_a_name(
    mounts: Path, tmp_path: Path, where: str
) -> None:
    for listed, why in (
        (OVERLAY, f"no volume is mounted at {tmp_path / 'kv'}"),
        (volume_at(tmp_path / "else", "/x"), "no volume is mounted"),
        (volume_at(tmp_path, f"{where}/{NUMBER}/_data"), f"the volume at {tmp_path} has no name"),
        (volume_at(tmp_path, "/", "tmpfs"), f"{tmp_path} is in memory"),
    ):
        mounts.write_text(listed, encoding="utf-8")
        assert lost_with_container(tmp_path / "kv").startswith(why)
        assert lost_with_container(tmp_path / "kv").endswith("`-v diskprefix:/var/cache/diskprefix`")


def test_outside_our_images_nothing_is_said(mounts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(file_system.VOLUME)
    mounts.write_text(OVERLAY, encoding="utf-8")
    assert lost_with_container(tmp_path) == ""


@pytest.mark.parametrize("has_volume", [False, True])
def test_a_container_without_a_volume_is_served_and_the_log_says_that_the_cache_ends_with_it(
    has_volume: bool, mounts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = list[Settings]()
    monkeypatch.setattr(app, "open_router", lambda _: served.append)
    mounts.write_text(volume_at(tmp_path, "/volumes/named/_data") if has_volume else OVERLAY, encoding="utf-8")
    settings = Settings(kv_cache_dir=tmp_path / "kv", model=None)
    with caplog.at_level(logging.WARNING):
        app.serve(settings)
    assert served == [settings]
    said = [record.message for record in caplog.records if "end with this container" in record.message]
    assert ["no volume is mounted" in line for line in said] == [True] * (not has_volume)
