"""A model's folder is made once, and neither a kill nor a fault leaves one that is not whole."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from diskprefix.errors import ModelError
from diskprefix.runtime.fetch import made_once as module
from diskprefix.runtime.fetch.made_once import build_once, require_disk

Usage = namedtuple("Usage", "total used free")


def one_file(work: Path) -> Path:
    """A stand-in for a model, where only what happens around it matters."""
    made = work / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "config.json").write_text("{}")
    return made


def never(work: Path) -> Path:
    raise AssertionError(f"built again in {work}")


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_the_files_have_the_mode_that_the_umask_gives_but_nobody_else_may_change_them(umask: int, cache: Path) -> None:
    assert not cache.exists()
    before = os.umask(umask)
    try:
        made = build_once("one", one_file, print)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (made, *made.iterdir(), cache)}
    files = {mode for path, mode in modes.items() if path.is_file()}
    assert (modes[made], files, modes[cache]) == (0o755 & ~umask, {0o644 & ~umask}, 0o700)


@pytest.mark.parametrize("finished", [False, True])
def test_leftovers_of_dead_processes_are_removed(finished: bool, cache: Path) -> None:
    if finished:
        build_once("one", one_file, print)
    leftover = cache / ".partial-one" / "model"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    build_once("one", never if finished else one_file, print)
    assert sorted(path.name for path in cache.iterdir()) == [".lock-one", "one"]


def test_leftovers_are_left_alone_while_somebody_works(cache: Path) -> None:
    build_once("one", one_file, print)
    at_work = cache / ".partial-two"
    at_work.mkdir()
    with (cache / ".lock-two").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        build_once("one", never, print)
    assert at_work.is_dir()


def test_a_second_process_waits_says_so_and_takes_what_the_first_made(cache: Path) -> None:
    cache.mkdir(parents=True)
    waiting = threading.Event()
    got: list[Path] = []

    def second() -> None:
        got.append(build_once("one", never, lambda line: waiting.set() if "waiting" in line else None))

    with (cache / ".lock-one").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(30)
        # What the first process does under its lock.
        work = cache / "work"
        work.mkdir()
        module._publish(one_file(work), cache / "one")
        work.rmdir()
    thread.join(30)
    assert got == [cache / "one"]


def test_a_model_does_not_wait_for_another_one_that_is_being_made(cache: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(work: Path) -> Path:
        has_begun.set()
        assert may_end.wait(30)
        return one_file(work)

    thread = threading.Thread(target=build_once, args=("two", slow, print))
    thread.start()
    assert has_begun.wait(30)
    made: list[Path] = []
    other = threading.Thread(target=lambda: made.append(build_once("one", one_file, print)), daemon=True)
    other.start()
    other.join(30)
    assert made == [cache / "one"]
    may_end.set()
    thread.join(30)
    assert (cache / "two").is_dir(), "the first one's work was left alone"


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def failing(_: Path) -> Path:
    raise ModelError("no good")


def test_a_build_that_fails_or_fills_the_disk_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="no good"):
        build_once("one", failing, print)
    monkeypatch.setattr(module, "sync", full)
    with pytest.raises(ModelError, match=r"the disk of .* is full"):
        build_once("one", one_file, print)
    assert [path.name for path in cache.iterdir()] == [".lock-one"]


def small_disk(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 3 * 1024**2))


def file_in_the_place_of_the_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "blocked").write_text("a file where a folder should be")
    patch.setenv("XDG_CACHE_HOME", str(folder / "blocked"))


def needing(work: Path) -> Path:
    require_disk(work, 1 << 30)
    return one_file(work)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (small_disk, r"not enough disk space.*needed, 3\.0 MiB free"),
        (file_in_the_place_of_the_folder, r"cannot write the cache folder .*XDG_CACHE_HOME"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_the_error_says_why_this_machine_cannot_make_a_model(
    problem: Callable[[pytest.MonkeyPatch, Path], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match=words):
        build_once("one", needing, print)
