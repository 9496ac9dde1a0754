"""The folder that a store lives in: who may use it, and who holds it.

Every process that has the store open holds a shared lock on `diskprefix.lock`. Whoever replaces `data.mdb` (compaction,
moving a damaged file aside) needs it exclusively: LMDB knows nothing of a file that changes under its map.
The lock is the kernel's (`flock`), so it ends with the process, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from diskprefix.errors import StoreUnavailable

DATA, LMDB_LOCK, LOCK = "data.mdb", "lock.mdb", "diskprefix.lock"
REPLACEMENT = "replacement"
"""A folder in which `data.mdb` is written anew before it takes the old one's place."""
_LMDB_LOCK_BYTES = 8192
"""What LMDB makes it for the 126 readers that it has room for unless told otherwise."""
_POLL_S = 0.05
PASSING = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
"""What may end by itself: a daemon serves without saving until it does."""


class FolderUnavailable(StoreUnavailable):
    """`passing`: it may end by itself, as a read-only or full file system does; a mistaken path does not."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"--kv-cache-dir {path}: {error.strerror or error}; mend it or choose another folder")
        self.passing = error.errno in PASSING


def make_folder(path: Path) -> None:
    """Create the folder, mode 0700, unless it is there. Raises `FolderUnavailable`."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FolderUnavailable(path, error) from error


def reserve_lmdb_lock(path: Path) -> None:
    """Make sure that LMDB's lock file has its place on the disk: LMDB maps it, and a hole that a full disk cannot fill
    ends the process.

    Raises `OSError`. Only a file that is new or has holes is touched, so no lock of this process on it is given up.
    """
    file = path / LMDB_LOCK
    try:
        if file.stat().st_blocks * 512 >= _LMDB_LOCK_BYTES:
            return
    except FileNotFoundError:
        pass
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _LMDB_LOCK_BYTES)
    finally:
        os.close(fd)


def require_writable(path: Path) -> None:
    """Raises `FolderUnavailable` if nothing can be written there; what is tried is the lock file."""
    try:
        os.close(os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise FolderUnavailable(path, error) from error


def refuse_shared_folder(path: Path) -> None:
    """Raises `StoreUnavailable` if others may write there: they could plant state that a model then answers from."""
    for place in (path, path / DATA):
        try:
            found = place.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise FolderUnavailable(path, error) from error
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            right = "700" if place is path else "600"
            raise StoreUnavailable(
                f"--kv-cache-dir {path}: others may write to {place} (mode {stat.S_IMODE(found.st_mode):o}); "
                f"chmod {right} it or choose another folder"
            )
        if found.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
            raise StoreUnavailable(f"--kv-cache-dir {path}: {place} belongs to another user; choose another folder")


class FolderLock:
    """A lock on the folder, shared until `try_exclusive` succeeds. Without write permission there may be none to take:
    then it stands for nothing, as the process could not change anything anyway."""

    def __init__(self, path: Path, patience_s: float) -> None:
        """Take it shared, waiting up to `patience_s` for whoever replaces the file. Raises `StoreUnavailable`."""
        self._path = path
        self._patience_s = patience_s
        self._fd: int | None = None
        self._take_shared(patience_s)

    def try_exclusive(self) -> bool:
        """Whether nobody else has the store open: the lock is exclusive now. If not, it is shared as before.

        Raises `StoreUnavailable` if somebody got it exclusively meanwhile and keeps it.
        """
        if self._fd is None:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # A conversion that fails has given the old lock up.
            self.close()
            self._take_shared(self._patience_s)
            return False
        return True

    def share(self) -> None:
        """Back from exclusive to shared."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _take_shared(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            fd = self._open()
            if fd is None:
                return
            if _flock_shared(fd):
                if self._is_current(fd):
                    self._fd = fd
                    return
                os.close(fd)
                continue
            os.close(fd)
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"--kv-cache-dir {self._path}: another process is replacing the store's file (`diskprefix "
                    "compact`?); try again when it has ended"
                )
            time.sleep(_POLL_S)

    def _open(self) -> int | None:
        """The lock file; opened for reading where it cannot be written, None where there is none to read either."""
        file = self._path / LOCK
        try:
            return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (*PASSING, errno.EACCES, errno.EPERM):
                raise FolderUnavailable(self._path, error) from error
        try:
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None

    def _is_current(self, fd: int) -> bool:
        """Whether the file that was locked still is the one in the folder: somebody may have removed it meanwhile."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path / LOCK))
        except OSError:
            return False


def _flock_shared(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def put_in_place(path: Path) -> None:
    """Let the file that was written in `REPLACEMENT` take the place of the store's, once it is safe on disk.

    For whoever holds the folder exclusively. Raises `OSError`.
    """
    new = path / REPLACEMENT / DATA
    give_to_owner(path, new)
    fd = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    new.replace(path / DATA)
    # It counts the transactions of the old file; LMDB makes a new one.
    (path / LMDB_LOCK).unlink(missing_ok=True)
    sync_folder(path)


def give_to_owner(path: Path, *files: Path) -> None:
    """Give files to the owner of folder `path`, if we are root: the daemon that it belongs to must be able to use them.

    Raises `OSError`.
    """
    if os.geteuid() != 0:
        return
    owner = path.stat()
    for file in files:
        with suppress(FileNotFoundError):
            os.chown(file, owner.st_uid, owner.st_gid)


def sync_folder(path: Path) -> None:
    """Make a rename in this folder last. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
