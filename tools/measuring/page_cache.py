"""Files in and out of the operating system's page cache (Linux)."""

from __future__ import annotations

import mmap
import os
import time
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


def direct_read_s(path: Path, num_bytes: int) -> float:
    """Returns the seconds of reading the first `num_bytes` past the page cache, 4 MiB after 4 MiB.

    Raises `OSError` where the file system has no direct reads.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _READ_BYTES) as buffer:
            started = time.perf_counter()
            position = 0
            while position < num_bytes and (read := os.preadv(fd, [buffer], position)):
                position += read
            return time.perf_counter() - started
    finally:
        os.close(fd)
