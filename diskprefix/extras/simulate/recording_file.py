"""The file of a recording, to which several processes may append whole lines."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diskprefix.errors import SettingsError

log = logging.getLogger("diskprefix")

_LOOK_EVERY_S = 2.0
"""Seconds between checks whether the file was moved or deleted."""
_LOCK_PATIENCE_S, _LOCK_PAUSE_S = 1.0, 0.02
"""The time that opening the file waits for another process which holds it, and between two tries."""
_BEGINNING = b'{"version":'
_LONGEST_LINE_BYTES = 1 << 24


class RecordingFile:
    """An open recording. If it was moved or deleted, a new one is started."""

    def __init__(self, path: Path) -> None:
        """Opens the file. A new file is private to its owner. Raises `SettingsError` if the file cannot be written or
        is no recording."""
        self._path = path
        self._fd = _open(path)
        self._looked_at = time.monotonic()

    def close(self) -> None:
        os.close(self._fd)

    def append(self, line: bytes) -> None:
        """Writes the whole line or nothing. A partial line could never be repaired."""
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            if not _is_at(self._fd, self._path):
                moved, self._fd = self._fd, _open(self._path)
                os.close(moved)
            self._looked_at = time.monotonic()
        with _locked(self._fd, self._path):
            end = os.fstat(self._fd).st_size
            if end and os.pread(self._fd, 1, end - 1) != b"\n":
                # Another process was killed while it wrote.
                _check_content(self._fd, self._path)
                end = os.fstat(self._fd).st_size
            written = 0
            try:
                while written < len(line):
                    written += os.write(self._fd, line[written:])
            except OSError:
                if written:
                    os.ftruncate(self._fd, end)
                raise


def _is_at(fd: int, path: Path) -> bool:
    """Returns whether the open file still has this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    """Opens the file for appending, and removes an unfinished last line. Raises `SettingsError`."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # Non-blocking, because opening a pipe would wait.
        fd = os.open(path, flags | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise _refused(f"cannot write {path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _refused(f"{path} is no regular file")
        with _locked(fd, path, patience_s=_LOCK_PATIENCE_S):
            _check_content(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def _locked(fd: int, path: Path, *, patience_s: float | None = None) -> Iterator[None]:
    """Holds the file for this process. Where it cannot be locked, others are not held off. Raises `SettingsError` if
    another process holds it for longer than `patience_s`."""
    since = time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if patience_s is None else fcntl.LOCK_NB))
                break
            except BlockingIOError:
                if time.monotonic() - since > (patience_s or 0.0):
                    raise _refused(f"another process holds {path}") from None
                time.sleep(_LOCK_PAUSE_S)
    except OSError as error:
        log.debug("[record] %s cannot be locked: %s", path, error)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def _check_content(fd: int, path: Path) -> None:
    """Raises `SettingsError` if the file is no recording. Removes an unfinished last line, which a crash may leave."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, _LONGEST_LINE_BYTES, max(size - _LONGEST_LINE_BYTES, 0))
    last_line = len(tail) - (tail.rfind(b"\n") + 1)
    is_other = not _BEGINNING.startswith(os.pread(fd, len(_BEGINNING), 0))
    if is_other or (last_line == len(tail) and size > len(tail)):
        raise _refused(f"{path} is not a recording; give another name")
    if last_line:
        log.warning("[record] %s: %d bytes of an unfinished last line are removed", path, last_line)
        os.ftruncate(fd, size - last_line)


def _refused(message: str) -> SettingsError:
    return SettingsError(f"--record: {message}")
