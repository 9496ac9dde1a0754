"""Files in and out of the operating system's page cache (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

_READ_BYTES = 4 << 20


def drop(path: Path) -> None:
    """Drops a file's pages; those that a process has mapped stay."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def warm(path: Path) -> None:
    """Reads a file once, so that the page cache holds it."""
    with path.open("rb", buffering=0) as file:
        while file.read(_READ_BYTES):
            pass
