"""Folders of models that are made once and kept. README.md describes how they are written."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from diskprefix.errors import ModelError
from diskprefix.folders import cache_home
from diskprefix.prefixstore.store.folder import sync
from diskprefix.printable import first_line
from diskprefix.private_file import distrusted_by_root, make_private_folder
from diskprefix.progress import Report
from diskprefix.units import format_size

_LOCK, _PARTIAL = ".lock-", ".partial-"
"""Prefixes of a model's name: the file that is locked while the model is made, and the folder that it is made in."""


def build_once(name: str, build: Callable[[Path], Path], report: Report) -> Path:
    """Returns the model folder `name`, which is whole. Without one, `build` makes it: it takes an empty folder to work
    in, and returns the folder inside it with the files. It may be interrupted, and other processes may do the same
    meanwhile."""
    models = cache_home() / "models"
    folder = models / name
    if problem := distrusted_by_root(folder):
        raise ModelError(
            f"the cache folder {models}: {problem}; run this as that user, or set XDG_CACHE_HOME to a folder of root's"
        )
    _remove_leftovers(models)
    if folder.is_dir():
        return folder
    with _failures_explained(models):
        make_private_folder(models)
        with _lock(models / f"{_LOCK}{name}", report):
            if folder.is_dir():
                return folder
            work = models / f"{_PARTIAL}{name}"
            try:
                # Of a process that was killed while this one waited.
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                _publish(build(work), folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            report(f"kept in {folder}")
    return folder


def _publish(made: Path, folder: Path) -> None:
    for path in (*filter(Path.is_file, made.iterdir()), made):
        # Also with umask 0, nobody else may change weights.
        path.chmod(path.stat().st_mode & ~0o022)
        sync(path)
    made.replace(folder)
    sync(folder.parent)


def _open_lock(file: Path) -> IO[bytes]:
    """Raises `OSError` if the file cannot be opened or is a symbolic link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(file, flags, 0o600), "r+b")


@contextmanager
def _lock(file: Path, report: Report) -> Iterator[None]:
    with _open_lock(file) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another diskprefix is preparing this model; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _remove_leftovers(models: Path) -> None:
    """Removes the partial folders of processes that have ended, whose locks are free."""
    for leftover in models.glob(f"{_PARTIAL}*"):
        lock = leftover.with_name(_LOCK + leftover.name.removeprefix(_PARTIAL))
        with suppress(OSError), _open_lock(lock) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _failures_explained(models: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"the disk of {models} is full; free some space, or set XDG_CACHE_HOME to a folder on a larger disk"
            ) from error
        raise ModelError(
            f"cannot write the cache folder {models}: {reason}; make it writable, set XDG_CACHE_HOME to a folder that "
            f"is, or give --model a local folder"
        ) from error


def require_disk(folder: Path, needed_bytes: int, variable: str = "XDG_CACHE_HOME") -> None:
    """Raises `ModelError` if the disk of `folder`, which `variable` sets, has less than `needed_bytes` free."""
    free = shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
    if free < needed_bytes:
        raise ModelError(
            f"not enough disk space in {folder.parent}: about {format_size(needed_bytes)} needed, {format_size(free)} "
            f"free; free some, or set {variable} to a folder on a larger disk"
        )
