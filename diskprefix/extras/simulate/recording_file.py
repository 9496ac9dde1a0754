"""The file of a recording, to which several processes may append whole lines."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from diskprefix.errors import SettingsError

log = logging.getLogger("diskprefix")

_BEGINNING = b'{"version":'
_LONGEST_LINE_BYTES = 1 << 24


def append(path: Path, line: bytes) -> None:
    """Appends a whole line or nothing: a partial line could never be repaired. A new file is private to its owner. The
    file is opened for each line, because it may be moved or deleted meanwhile. With an empty line, it is only checked.

    Raises `SettingsError` if the file cannot be opened or is no recording, and `OSError` if it cannot be written.
    """
    try:
        # Non-blocking, because opening a pipe would wait.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise SettingsError(f"--record: cannot write {path}: {error.strerror}") from error
    try:
        # Some file systems have no locks. Closing the file releases the lock.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        end, written = _end_of_lines(fd, path), 0
        try:
            while written < len(line):
                written += os.write(fd, line[written:])
        except OSError:
            os.ftruncate(fd, end)
            raise
    finally:
        os.close(fd)


def _end_of_lines(fd: int, path: Path) -> int:
    """Returns the size of the file in bytes. An unfinished last line, which a crash may leave, is removed. Raises
    `SettingsError` if the file is no recording."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise SettingsError(f"--record: {path} is no regular file")
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) == b"\n" and os.pread(fd, len(_BEGINNING), 0) == _BEGINNING:
        return size
    tail = os.pread(fd, _LONGEST_LINE_BYTES, max(size - _LONGEST_LINE_BYTES, 0))
    last_line = len(tail) - (tail.rfind(b"\n") + 1)
    is_other = not _BEGINNING.startswith(os.pread(fd, len(_BEGINNING), 0))
    if is_other or (last_line == len(tail) and size > len(tail)):
        raise SettingsError(f"--record: {path} is not a recording; give another name")
    if last_line:
        log.warning("[record] %s: %d bytes of an unfinished last line are removed", path, last_line)
        os.ftruncate(fd, size - last_line)
    return size - last_line
