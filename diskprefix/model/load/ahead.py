"""Files that a spare process reads before its turn, so that the load is shorter."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Values that were read from folders. Each can be taken once, unless a file there was written since."""

    def __init__(self) -> None:
        self._read: dict[Hashable, T] = {}

    def read(self, folders: Sequence[Path], how: Hashable, read: Callable[[], T]) -> None:
        """Keeps the result of `read`. `how` names what else it depends on. Raises its errors, and `OSError`."""
        # First: a file may be written while it is read.
        key = self._key(folders, how)
        self._read[key] = read()

    def take(self, folders: Sequence[Path], how: Hashable) -> T | None:
        """Returns the value that was read, None if there is none that is still valid."""
        with suppress(OSError):
            return self._read.pop(self._key(folders, how), None)
        return None

    def _key(self, folders: Sequence[Path], how: Hashable) -> Hashable:
        files = [
            (entry.path, entry.stat().st_size, entry.stat().st_mtime_ns, entry.inode())
            for folder in folders
            for entry in os.scandir(folder)
        ]
        return how, tuple(sorted(files))
