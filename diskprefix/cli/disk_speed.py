"""How fast a disk reads, measured with a temporary file past the page cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

_MIB = 1 << 20
_FILE_BYTES = 64 * _MIB
_MOST_WRITING_S = 0.15
_MOST_READING_S = 0.1
_CONTENT_BYTES = 4 * _MIB
"""What is written and read at a time."""


def disk_speed(folder: Path) -> float | None:
    """Returns the bytes a second of a sequential read from the disk under `folder`; None if the folder takes no file or
    is nearly full. Takes about half a second, and longer where the disk is busy. The file is always removed."""
    try:
        free = os.statvfs(folder)
        if free.f_bavail * free.f_frsize < 4 * _FILE_BYTES:
            return None
        writing, name = tempfile.mkstemp(prefix="speed-", dir=folder)
        with open(writing, "wb", buffering=0):
            try:
                reading = _open_past_the_cache(name)
            finally:
                os.unlink(name)  # nothing is left whatever happens
            with open(reading, "rb", buffering=0):
                return _read(reading, _write(writing, os.urandom(_CONTENT_BYTES))) or None
    except OSError:
        return None


def _open_past_the_cache(name: str) -> int:
    try:
        return os.open(name, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # not every file system can
        return os.open(name, os.O_RDONLY)


def _write(descriptor: int, content: bytes) -> int:
    """Bytes that are on the disk now: less than planned where it is slow."""
    written = 0
    started = time.perf_counter()
    while written < _FILE_BYTES and time.perf_counter() - started < _MOST_WRITING_S:
        written += os.write(descriptor, content)
        os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return written


def _read(descriptor: int, num_bytes: int) -> float:
    """Bytes a second of reading that much from the start, or what there is time for."""
    part = mmap.mmap(-1, _CONTENT_BYTES)  # whole pages, as reading past the cache demands
    found = 0
    started = time.perf_counter()
    while found < num_bytes and time.perf_counter() - started < _MOST_READING_S:
        found += os.preadv(descriptor, [part], found)
    return found / (time.perf_counter() - started)
