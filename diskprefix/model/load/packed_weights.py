"""The folder of packed weights: a file for each model, made once, in idle time, and mapped by later starts.

A file's name is the digest of the model's contents, as the identity of its state has it. Files are private, are written
under another name, and replace the old one at once. They are made only where the disk has room, and cost nothing but
the seconds of one start: the one that was not used for longest is removed first.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from diskprefix.model.load.packed_file import PackedFile, PackedMatrix, UnusableFile, packed_bytes, write_packed
from diskprefix.model.quants.file_matrix import MatrixPacking
from diskprefix.native.library import Operators
from diskprefix.private_file import distrusted_by_root, make_private_folder
from diskprefix.settings import cache_home
from diskprefix.store.folder import sync
from diskprefix.units import format_size

log = logging.getLogger("diskprefix")

_SUFFIX, _PARTIAL = ".packed", ".partial-"
LEAST_BYTES = 1 << 24
"""Less than this is packed at each start, which takes a few milliseconds."""
_DISK_SHARE = 4
"""The files take at most this part of the disk, and leave as much free."""


class PackedFiles(Struct, frozen=True):
    """The packed weights in a `folder`."""

    folder: Path

    @classmethod
    def of(cls, setting: str) -> PackedFiles | None:
        """Returns the files that `--packed-weights` names, None for `off`. Raises `SettingsError` without a home."""
        if setting == "off":
            return None
        return cls(cache_home() / "weights" if setting == "auto" else Path(setting))

    def path_of(self, digest: str) -> Path:
        """Returns where the file of a model is, given by the digest of its contents."""
        return self.folder / f"{digest}{_SUFFIX}"

    def opened(self, digest: str, operators: Operators) -> PackedFile | None:
        """Returns the file of a model, None if there is none that can be used. Notes its use."""
        path = self.path_of(digest)
        try:
            _remove_leftovers(self.folder)
            file = self._open(digest, operators)
            os.utime(path)
        except OSError:
            return None  # `keep` says what is wrong with the folder
        except (UnusableFile, MemoryError) as error:
            log.info("[model] the packed weights in %s are made anew: %s", path, error)
            return None
        return file

    def _open(self, digest: str, operators: Operators) -> PackedFile:
        if problem := distrusted_by_root(self.folder):
            raise UnusableFile(problem)
        return PackedFile.open(self.path_of(digest), operators)

    def all(self) -> list[tuple[Path, int]]:
        """Returns the files and their sizes in bytes, the one that was not used for longest first."""
        with suppress(OSError):
            files = [(path, path.lstat()) for path in self.folder.glob(f"*{_SUFFIX}")]
            return [(path, of.st_size) for path, of in sorted(files, key=lambda file: file[1].st_mtime)]
        return []

    def num_bytes(self) -> int:
        return sum(size for _, size in self.all())

    def remove(self, digest: str) -> int:
        """Removes the file of a model, if there is one. Returns its size in bytes. Raises `OSError`."""
        path = self.path_of(digest)
        with suppress(FileNotFoundError):
            size = path.lstat().st_size
            path.unlink()
            return size
        return 0

    def keep(self, digest: str, packing: MatrixPacking) -> Iterator[None]:
        """Writes the matrices of a model for later starts, and yields after each piece of 16 MiB. Logs what came of it.
        If it is ended before, nothing stays."""
        is_small = sum(matrix.packed.nbytes for matrix in packing.matrices.values()) < LEAST_BYTES
        if is_small or (packing.stored is None and self._has(digest, packing)):
            return
        try:
            matrices = [*packing.matrices.values(), *_others(packing)]
            yield
            self._make_room(digest, packed_bytes(matrices))
            with self._partial() as file:
                yield from write_packed(file, matrices, packing.operators)
                path = self.path_of(digest)
                Path(file.name).replace(path)
                sync(self.folder)
            log.info("[model] the next start maps the weights: %s in %s", format_size(path.stat().st_size), path)
        except _NoRoom as error:
            log.info("[model] the packed weights are not kept: %s", error)
        except OSError as error:
            log.info("[model] the packed weights are not kept in %s: %s", self.folder, error.strerror or error)

    def _has(self, digest: str, packing: MatrixPacking) -> bool:
        """Returns whether there is a whole file of the matrices: this start did not know the model's digest, or another
        process has made it meanwhile."""
        with suppress(OSError, UnusableFile, MemoryError):
            file = self._open(digest, packing.operators)
            return all(digest in file for digest in packing.matrices)
        return False

    def _make_room(self, digest: str, num_bytes: int) -> None:
        """Removes files until there is room for one more. Raises `_NoRoom`, `OSError`."""
        make_private_folder(self.folder)
        if problem := distrusted_by_root(self.folder):
            raise _NoRoom(problem)
        _remove_leftovers(self.folder)
        own = self.path_of(digest)
        others = [(path, size) for path, size in self.all() if path != own]
        disk = shutil.disk_usage(self.folder)
        used, free = sum(size for _, size in others), disk.free
        for path, size in others:
            if _fits(num_bytes, used, free, disk.total):
                return
            path.unlink(missing_ok=True)
            used, free = used - size, free + size
        if not _fits(num_bytes, used, free, disk.total):
            raise _NoRoom(f"{format_size(num_bytes)} of {format_size(free)} that {self.folder} has free")

    @contextmanager
    def _partial(self) -> Iterator[BinaryIO]:
        """Yields a new file, which is removed at the end unless it has got another name."""
        path = self.folder / f"{_PARTIAL}{secrets.token_hex(8)}"
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield file
            finally:
                path.unlink(missing_ok=True)


class _NoRoom(Exception):
    """The message says why nothing is kept."""


def _others(packing: MatrixPacking) -> Iterator[PackedMatrix]:
    """Yields the matrices that the file of an earlier start has, and this start did not take: with other settings."""
    if packing.stored is not None:
        yield from packing.stored.others(packing.matrices)


def _fits(num_bytes: int, used: int, free: int, total: int) -> bool:
    return used + num_bytes <= total // _DISK_SHARE and free - num_bytes >= min(num_bytes, total // _DISK_SHARE)


def _remove_leftovers(folder: Path) -> None:
    """Removes the files of writers that have ended, whose locks are free."""
    for leftover in folder.glob(f"{_PARTIAL}*"):
        with suppress(OSError), open(leftover, "rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
