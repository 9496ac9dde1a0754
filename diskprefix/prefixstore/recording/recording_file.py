"""The file of a recording, to which several processes may append whole lines."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from diskprefix.errors import SettingsError

_BEGINNING = b'{"version":'


def append(path: Path, line: bytes) -> None:
    """Appends a line. A part of a line, which a crash or a full disk may leave, becomes a line of its own. A new file
    is private to its owner. The file is opened for each line, because it may be moved or deleted meanwhile. With an
    empty line, it is only checked.

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
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SettingsError(f"--record: {path} is no regular file")
        if not _BEGINNING.startswith(os.pread(fd, len(_BEGINNING), 0)):
            raise SettingsError(f"--record: {path} is not a recording; give another name")
        size = os.fstat(fd).st_size
        if line and size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(fd, line) :]
    finally:
        os.close(fd)
