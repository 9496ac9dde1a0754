"""The folder of packed weights: a file for each model, made once, in idle time, and mapped by later starts.

A file's name is the digest of the model's contents, as the identity of its state has it. Files are private, are written
under another name, and replace the old one at once. They are made only where the disk has room, and cost nothing but
the seconds of one start: those of models that are gone are removed first, then the one that was not used for longest.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from msgspec import Struct

from diskprefix.errors import SettingsError
from diskprefix.folders import cache_home, expanded
from diskprefix.prefixstore.store.folder import sync
from diskprefix.private_file import distrusted_by_root, make_private_folder
from diskprefix.runtime.files.packed_file import (
    DamagedFile,
    PackedFile,
    PackedMatrix,
    UnusableFile,
    opened,
    packed_bytes,
    sources_of,
    write_packed,
)
from diskprefix.units import counted, format_size

if TYPE_CHECKING:
    from diskprefix.native.library import Operators
    from diskprefix.runtime.files.file_matrix import MatrixPacking

log = logging.getLogger("diskprefix")

_SUFFIX, _PARTIAL = ".packed", ".partial-"
_OURS = re.compile(r"[0-9a-f]{32}\.packed|\.partial-[0-9a-f]{16}")
"""The names of our files: a user may give a folder that has others."""
LEAST_BYTES = 1 << 24
"""Less than this is packed at each start, which takes a few milliseconds."""
_DISK_SHARE = 4
"""The files take at most this part of the disk, and a new one half of what is free."""


class PackedFiles(Struct, frozen=True):
    """The packed weights in a `folder`."""

    folder: Path

    @classmethod
    def of(cls, setting: str) -> PackedFiles | None:
        """Returns the files that `--packed-weights` names, None for `off`. Raises `SettingsError` without a home."""
        if setting == "off":
            return None
        return cls(cache_home() / "weights" if setting == "auto" else expanded(setting))

    @classmethod
    def here(cls, setting: str) -> PackedFiles | None:
        """Returns what `of` returns, and None without a home: then there are none."""
        with suppress(SettingsError):
            return cls.of(setting)
        return None

    def path_of(self, digest: str) -> Path:
        """Returns where the file of a model is, given by the digest of its contents."""
        return self.folder / f"{digest}{_SUFFIX}"

    def opened(self, digest: str, operators: Operators) -> PackedFile | None:
        """Returns the file of a model, None if there is none that can be used. Notes its use."""
        path = self.path_of(digest)
        try:
            self._require_own()
            _remove_leftovers(self.folder)
            file = self._open(digest, operators)
        except OSError:
            return None  # `keep` says what is wrong with the folder
        except (UnusableFile, MemoryError) as error:
            log.info("[model] the packed weights in %s are made anew: %s", path, error)
            return None
        # Not on a disk that is read only.
        with suppress(OSError):
            os.utime(path)
        return file

    def _open(self, digest: str, operators: Operators) -> PackedFile:
        self._require_own()
        return PackedFile.open(self.path_of(digest), digest, operators)

    def _require_own(self) -> None:
        if problem := distrusted_by_root(self.folder):
            raise PermissionError(problem)

    def all(self) -> list[tuple[Path, int]]:
        """Returns the files and their sizes in bytes, the one that was not used for longest first."""
        files = []
        for path in _named_so(self.folder, f"*{_SUFFIX}"):
            # Another process may remove it meanwhile.
            with suppress(OSError):
                files.append((path, path.lstat()))
        return [(path, of.st_size) for path, of in sorted(files, key=lambda file: file[1].st_mtime)]

    @property
    def amounts(self) -> dict[str, Any]:
        """The folder, the number of files and their bytes, for JSON."""
        sizes = [size for _, size in self.all()]
        return {"folder": str(self.folder), "files": len(sizes), "bytes": sum(sizes)}

    @property
    def line(self) -> str:
        """The amounts, for people."""
        of = self.amounts
        return f"{counted(of['files'], 'file')}, {format_size(of['bytes'])} in {of['folder']}"

    def made_from(self, files: Collection[Path]) -> list[tuple[Path, int]]:
        """Returns the files that were packed from one of the `files`, whose links are resolved, and their sizes."""
        return [(path, size) for path, size in self.all() if not set(_sources(path)).isdisjoint(files)]

    def room_bytes(self, digest: str = "") -> int:
        """Returns how large a file may be that is made now, if all others except the one of `digest` go. Raises
        `OSError`."""
        folder = next(place for place in (self.folder, *self.folder.absolute().parents) if place.exists())
        disk = shutil.disk_usage(folder)
        others = sum(size for path, size in self.all() if path != self.path_of(digest))
        return min(disk.total // _DISK_SHARE, (disk.free + others) // 2)

    def compare(
        self, path: Path, operators: Operators | None, advance: Callable[[int], None] = lambda _bytes: None
    ) -> PackedProblem | None:
        """Compares a file with its digests, and calls `advance` with the bytes of each matrix. Returns what is wrong
        with it, None if nothing is."""
        try:
            damaged, of_all = PackedFile.open(path, path.stem, operators).compare(advance)
        except UnusableFile as error:
            return PackedProblem(path.name, str(error), is_damage=isinstance(error, DamagedFile))
        except (OSError, MemoryError) as error:
            return PackedProblem(path.name, getattr(error, "strerror", None) or str(error), is_damage=False)
        return PackedProblem(path.name, f"{damaged} of {of_all} matrices are damaged") if damaged else None

    def keep(self, digest: str, files: Collection[Path], packing: MatrixPacking) -> Iterator[None]:
        """Writes the matrices of a model, which has these `files`, for later starts, and yields after each piece of 16
        MiB. Logs what came of it. If it is ended before, nothing stays."""
        is_small = sum(matrix.packed.nbytes for matrix in packing.matrices.values()) < LEAST_BYTES
        if is_small or (packing.stored is None and self._has(digest, packing)):
            return
        try:
            matrices = [*packing.matrices.values(), *_others(packing)]
            yield
            sources = sorted(file.resolve() for file in files)
            self._make_room(digest, packed_bytes(matrices, sources), sources)
            with self._partial() as file:
                yield from write_packed(file, matrices, digest, sources, packing.operators)
                path = self.path_of(digest)
                Path(file.name).replace(path)
                sync(self.folder)
            log.info("[model] kept for a faster start: %s of weights in %s", format_size(path.stat().st_size), path)
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

    def _make_room(self, digest: str, num_bytes: int, sources: Collection[Path]) -> None:
        """Removes files that no start will map, and others until there is room for one more, of a model with the files
        `sources`. Raises `_NoRoom`, `OSError`."""
        make_private_folder(self.folder)
        self._require_own()
        _remove_leftovers(self.folder)
        own = self.path_of(digest)
        for path, _ in self.all():
            if path != own and _is_left(path, sources):
                path.unlink(missing_ok=True)
        others = [(path, size) for path, size in self.all() if path != own]
        used, disk = sum(size for _, size in others), shutil.disk_usage(self.folder)
        if not _fits(num_bytes, 0, disk.free + used, disk.total):
            raise _NoRoom(f"{format_size(num_bytes)} of {format_size(disk.free)} that {self.folder} has free")
        for path, size in others:
            if _fits(num_bytes, used, disk.free, disk.total):
                return
            path.unlink(missing_ok=True)
            # A file that another process has mapped takes its room until that ends.
            used, disk = used - size, shutil.disk_usage(self.folder)
        if not _fits(num_bytes, used, disk.free, disk.total):
            raise _NoRoom(f"{format_size(num_bytes)} of {format_size(disk.free)} that {self.folder} has free")

    @contextmanager
    def _partial(self) -> Iterator[BinaryIO]:
        """Yields a new file, which is removed at the end unless it has got another name."""
        path = self.folder / f"{_PARTIAL}{secrets.token_hex(8)}"
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                if not os.fstat(file.fileno()).st_nlink:
                    raise FileNotFoundError(errno.ENOENT, "another process has removed the new file")
                yield file
            finally:
                path.unlink(missing_ok=True)


class PackedProblem(Struct, frozen=True):
    """A `file` that is damaged (`is_damage`), or that no start of this version and user maps. `message` says why."""

    file: str
    message: str
    is_damage: bool = True


class _NoRoom(Exception):
    """The message says why nothing is kept."""


def _others(packing: MatrixPacking) -> Iterator[PackedMatrix]:
    """Yields the matrices that the file of an earlier start has, and this start did not take: with other settings."""
    if packing.stored is not None:
        yield from packing.stored.others(packing.matrices)


def _fits(num_bytes: int, used: int, free: int, total: int) -> bool:
    return used + num_bytes <= total // _DISK_SHARE and num_bytes <= free // 2


def _sources(path: Path) -> list[Path]:
    """Returns the files from which a file was packed, none if it cannot be read."""
    with suppress(UnusableFile, OSError):
        return sources_of(path)
    return []


def _is_left(path: Path, replaced: Collection[Path]) -> bool:
    """Returns whether the model of a file is gone, or was replaced by another one in the files `replaced`."""
    try:
        sources = sources_of(path)
    except UnusableFile:
        return True
    except OSError:
        return False
    return not all(map(os.path.exists, sources)) or not set(sources).isdisjoint(replaced)


def _named_so(folder: Path, pattern: str) -> list[Path]:
    return [path for path in folder.glob(pattern) if _OURS.fullmatch(path.name)]


def _remove_leftovers(folder: Path) -> None:
    """Removes the files of writers that have ended, whose locks are free."""
    for leftover in _named_so(folder, f"{_PARTIAL}*"):
        with suppress(OSError, UnusableFile), opened(leftover) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
