"""The folder of a store: its access rights, and the lock that processes hold on it.

Every process that has the store open holds a shared lock (`flock`) on `diskprefix.lock`. A process that replaces
`data.mdb` needs the lock exclusively, because LMDB does not expect that its file is replaced.

The owner of a folder can replace any file in it by a link, also between a check and a use, and LMDB opens its files by
their paths. So root works in no folder that another user controls.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeAlias

import msgspec

from diskprefix.errors import SettingsError, StoreUnavailable
from diskprefix.prefixstore.store.processes import described, flock_holder
from diskprefix.private_file import distrusted_by_root
from diskprefix.units import format_size

log = logging.getLogger("diskprefix")

DATA, LMDB_LOCK, LOCK = "data.mdb", "lock.mdb", "diskprefix.lock"
NAMES_LOCK = "names.lock"
"""The file whose lock protects the names of the other files; see `locked_names`."""
CRASH = "crash.log"
"""The file to which a daemon writes the stacks of its threads when a signal ends it."""
_FILES = (DATA, LMDB_LOCK, LOCK, NAMES_LOCK, CRASH)
_MAX_CRASH_BYTES = 1 << 14
REPLACEMENT = "replacement"
"""The folder in which a new `data.mdb` is written before it replaces the old one."""
_LMDB_LOCK_BYTES = 8192
"""The size of LMDB's lock file with its default of 126 readers."""
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Links are not followed, and a pipe does not block."""
_POLL_S, _LOG_AGAIN_S = 0.05, 60.0
_MOMENT_S = 10.0
"""How long to wait for a lock that other processes hold for a moment."""
_MAX_MARK_BYTES = 1 << 12
OnWait: TypeAlias = Callable[[str], None]
"""A function that is called before a wait, with the reason."""
PASSING = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
"""Errors that may end by themselves. A daemon serves without saving until they do."""
FULL_BELOW_BYTES = 1 << 20
"""With fewer free bytes, a disk is full."""
_UNSYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
"""Ignored errors of a folder that cannot be synced: file systems of networks and FUSE may lack fsync of a folder, or
need it open for writing, and a process that may create names in a folder may not be allowed to read it."""


class FolderUnavailable(StoreUnavailable):
    """The file system refuses an operation that the store needs. `passing`: the problem may end by itself, as for a
    full or read-only file system. `is_full`: the disk has no room, or only the `min_free_bytes` that must stay free.
    `is_for_room`: it is full, or a quota is used up."""

    def __init__(self, path: Path, error: OSError, min_free_bytes: int = 0) -> None:
        self.passing = error.errno in PASSING
        # LMDB reports EIO for a write that a full disk cut short.
        is_cut_short = error.errno == errno.EIO and 0 <= free_bytes(path) < FULL_BELOW_BYTES
        self.is_full = error.errno == errno.ENOSPC or is_cut_short
        self.is_for_room = self.is_full or error.errno == errno.EDQUOT
        todo = "make room, or choose" if error.errno == errno.EDQUOT else "repair it or choose"
        why = f"--kv-cache-dir {path}: {error.strerror or error}; {todo} another folder"
        super().__init__(disk_full(path, min_free_bytes) if self.is_full else why)


def free_bytes(path: Path) -> int:
    """Returns the free bytes on the disk of a folder, which need not exist, or -1 if they cannot be read."""
    disk = _disk_of(path)
    return -1 if disk is None else disk.f_bavail * disk.f_frsize


def require_on_disk(path: Path, budget_bytes: int) -> None:
    """Raises `SettingsError` for a budget above the size of the disk of a folder, which need not exist. The budget of a
    folder stays for all its processes, and such a one limits nothing."""
    disk = _disk_of(path)
    disk_bytes = 0 if disk is None else disk.f_blocks * disk.f_frsize
    # Some file systems do not tell their size.
    if 0 < disk_bytes < budget_bytes:
        budget, size = format_size(budget_bytes), format_size(disk_bytes)
        raise SettingsError(f"--kv-cache-budget: {budget} are more than the disk of {path} has: {size}; give less")


def _disk_of(path: Path) -> os.statvfs_result | None:
    try:
        place = next(place for place in (path, *path.absolute().parents) if place.exists())
        return os.statvfs(place)
    except OSError:
        return None


def disk_full(path: Path, min_free_bytes: int) -> str:
    """Returns the message for a disk without room for the store in folder `path`. `min_free_bytes` must stay free."""
    free, disk = max(0, free_bytes(path)), f"the disk of --kv-cache-dir {path}"
    if free < FULL_BELOW_BYTES or free > min_free_bytes:
        return f"{disk} is full: {format_size(free)} are free; make room, or choose another folder"
    left = f"the store leaves {format_size(min_free_bytes)} of a disk to others"
    return f"{disk} has {format_size(free)} free, and {left}; make room, or choose a folder on a larger disk"


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turns errors of the file system into `FolderUnavailable`."""
    try:
        yield
    except OSError as error:
        raise FolderUnavailable(path, error) from error


def make_folder(path: Path) -> None:
    """Creates the folder and the missing ones above it with mode 0700, durably, and checks it. Raises
    `StoreUnavailable`."""
    check_folder(path)
    with file_errors(path):
        for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
            _make_durably(folder)
    check_folder(path)


@contextmanager
def folder_made(path: Path) -> Iterator[None]:
    """Creates the folder of a copy as `make_folder` does. If the block fails, removes what was created for it."""
    new = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    try:
        make_folder(path)
        yield
    except BaseException:
        if new and not os.path.lexists(path / DATA):
            for name in (LOCK, NAMES_LOCK):
                (path / name).unlink(missing_ok=True)
            with suppress(OSError):
                for folder in new:
                    folder.rmdir()
        raise


def _make_durably(folder: Path) -> None:
    """Creates a folder that only the user may enter. If its name cannot be made durable, removes it, so that the next
    attempt tries again."""
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        sync(folder.parent)
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        raise


def reserve_lmdb_lock(folder: Path, *, create: bool) -> None:
    """Allocates the disk space of LMDB's lock file, which is created if `create`. Raises `OSError`.

    LMDB maps the file, and a write to a hole in it ends the process if the disk is full. A file without holes is not
    opened, because closing it would release this process's LMDB locks on it.
    """
    file = folder / LMDB_LOCK
    try:
        if file.lstat().st_blocks * 512 >= _LMDB_LOCK_BYTES:
            return
    except FileNotFoundError:
        if not create:
            return
    fd = os.open(file, os.O_RDWR | (os.O_CREAT if create else 0) | _OPEN_FLAGS, 0o600)
    try:
        os.posix_fallocate(fd, 0, _LMDB_LOCK_BYTES)
    finally:
        os.close(fd)


def check_folder(path: Path) -> None:
    """Raises `StoreUnavailable` if another user can write to the folder or the store's files, and so could plant state
    that a model would answer from, or if a file is not a regular file. For root, also if another user can replace the
    folder. A folder or file that does not exist is no error."""
    if problem := distrusted_by_root(path):
        raise StoreUnavailable(f"--kv-cache-dir {path}: {problem}; run this as that user, or choose another folder")
    for name in ("", *_FILES):
        with file_errors(path), suppress(FileNotFoundError):
            _check_place(path, name, os.lstat(path / name) if name else os.stat(path))


def make_private(path: Path) -> None:
    """Makes the store's files in folder `path` unreadable for other users. A user who can open a file can also lock it,
    and so keep this user waiting. Raises `OSError`."""
    for name in _FILES:
        with suppress(FileNotFoundError):
            status = os.lstat(path / name)
            is_open_to_others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and is_open_to_others:
                os.chmod(path / name, 0o600)


def _check_place(path: Path, name: str, status: os.stat_result) -> None:
    """Checks the folder itself if `name` is empty, otherwise the file `name` in it."""
    place, problem = path / name, None
    if name and not stat.S_ISREG(status.st_mode):
        problem = f"{place} is a link or no regular file; remove it"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        cure = "give a folder of your own in it" if mode & stat.S_ISVTX else f"chmod {'600' if name else '700'} it"
        problem = f"others may write to {place} (mode {mode:o}); {cure}"
    elif status.st_uid not in (os.geteuid(), 0):
        problem = f"{place} belongs to another user (uid {status.st_uid}); run this as that user"
    if problem:
        raise StoreUnavailable(f"--kv-cache-dir {path}: {problem}, or choose another folder")


@cache
def boot_id() -> str:
    """Returns the random id of this start of the machine, empty if the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    boot, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
    with suppress(AttributeError):
        # macOS.
        ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", boot, ctypes.byref(size), None, 0)
    return boot.value.decode(errors="replace")


_MARK_BYTES = 256
"""A mark is padded with spaces, so that equal marks have equal bytes."""


class FileMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of the lock file; see DISK.md. The data file with inode `file` was checked, or made, in the boot
    `boot`. Since then `openings` processes in a row have opened it for writing and have not called `prove`. `holder`
    says which process holds the lock exclusively, and why."""

    boot: str = ""
    file: int = 0
    openings: int = 0
    holder: str = ""

    def needs_check(self, file: int) -> bool:
        """Returns whether the file with this inode must be checked before LMDB walks its B-trees."""
        is_of_this_boot = self.boot == boot_id() != ""
        return not is_of_this_boot or self.file != file or self.openings > 1


def _read_mark(fd: int | None) -> FileMark:
    """Returns the mark in the lock file, or an empty mark if it cannot be read."""
    # Any bytes may be there: also those of no text, and brackets that are nested too deeply for a decoder.
    with suppress(OSError, ValueError, RecursionError):
        return msgspec.json.decode(os.pread(fd, _MAX_MARK_BYTES, 0) if fd is not None else b"", type=FileMark)
    return FileMark()


def _write_mark(fd: int, mark: FileMark) -> None:
    """Overwrites the whole mark in one write, so a kill leaves the old mark or the new one. On a full disk the old mark
    may stay, or no mark at all: then the data file is checked once more."""
    content = msgspec.json.encode(mark) if mark != FileMark() else b""
    with suppress(OSError):
        os.pwrite(fd, content.ljust(max(_MARK_BYTES, os.fstat(fd).st_size)), 0)


def mark_made(folder: Path) -> None:
    """Marks the store's file in `folder`, which this process has just made, as needing no check."""
    with suppress(OSError):
        fd = _open_regular(folder / LOCK, os.O_RDWR)
        try:
            inode, holder = (folder / DATA).stat().st_ino, _read_mark(fd).holder
            _write_mark(fd, FileMark(boot_id(), inode, holder=holder))
        finally:
            os.close(fd)


class FolderLock:
    """A lock on the folder: shared, or exclusive once `try_exclusive` returned True.

    Without `create`, there is no lock if the lock file cannot be read: such a process can only read.
    """

    def __init__(self, path: Path, on_wait: OnWait | None = None, *, create: bool = True) -> None:
        """Takes the lock shared. If a process holds it exclusively, raises `StoreUnavailable`. With `on_wait`, logs
        which process it is, calls `on_wait` with the reason, and waits for it.

        Raises `FolderUnavailable` if, with `create`, the lock file cannot be written.
        """
        self._path, self._on_wait, self._create = path, on_wait, create
        self._fd: int | None = None
        self._is_exclusive = self._is_proven = False
        self._mark_before = self._own_mark = self._mark_after = FileMark()
        """The mark that was there when this process opened the file, the mark that it wrote then, and the mark that it
        will write at a clean end."""
        if create:
            with file_errors(path):
                make_private(path)
        self._take_shared()

    @property
    def mark(self) -> FileMark:
        return _read_mark(self._fd)

    def try_exclusive(self, doing: str) -> bool:
        """Makes the lock exclusive. Processes that wait for it log `doing`. Returns False, and the lock is
        shared as before, if another process has the store open. Raises `StoreUnavailable` as `__init__` does."""
        if self._fd is None:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # A failed conversion has released the shared lock.
            self._close()
            self._take_shared()
            return False
        self._is_exclusive = True
        self.say(doing)
        return True

    def say(self, doing: str) -> None:
        """Writes what this process does into the lock file, if it holds the lock exclusively."""
        if self._is_exclusive and self._fd is not None:
            _write_mark(self._fd, msgspec.structs.replace(self.mark, holder=f"process {os.getpid()} is {doing}"))

    def record_opening(self, file: int, *, is_checked: bool) -> None:
        """Records that this process is about to write to the file with this inode, and then makes the lock shared.

        If other processes have the store open, this process leaves their mark as it is, unless it has checked the file.
        """
        before = msgspec.structs.replace(self.mark, holder="")
        openings = 0 if is_checked else before.openings
        if self._fd is not None and (self._is_exclusive or is_checked):
            self._mark_before, self._own_mark = before, FileMark(boot_id(), file, openings + 1)
            self._mark_after = FileMark(boot_id(), file, openings)
            _write_mark(self._fd, self._own_mark)
        self.share()

    def prove(self) -> None:
        """Records that this process has used the file without being ended by a signal."""
        if not self._is_proven and self._fd is not None:
            self._is_proven = True
            if (mark := self.mark).openings:
                _write_mark(self._fd, msgspec.structs.replace(mark, openings=0))

    def share(self) -> None:
        """Makes an exclusive lock shared again."""
        if self._is_exclusive and self._fd is not None:
            _write_mark(self._fd, msgspec.structs.replace(self.mark, holder=""))
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            self._is_exclusive = False

    def close(self, *, is_refused: bool = False) -> None:
        """Gives the lock back. If the mark is still the one that `record_opening` wrote, subtracts this process's
        opening, or restores the mark from before `record_opening` if this process refused the file. Leaves any other
        mark as it is."""
        if self._fd is not None and self._own_mark.boot and self.mark == self._own_mark:
            _write_mark(self._fd, self._mark_before if is_refused else self._mark_after)
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            if self._is_exclusive:
                _write_mark(self._fd, msgspec.structs.replace(self.mark, holder=""))
            os.close(self._fd)
            self._fd, self._is_exclusive = None, False

    def _take_shared(self) -> None:
        logged_at = -math.inf
        # Bound: the process that replaces the file. The kernel releases the lock when that process ends, and the log
        # names the process until then.
        while True:
            fd = self._open()
            if fd is None:
                return
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if self._is_current(fd):
                    self._fd = fd
                    return
            except (BlockingIOError, FileNotFoundError):
                pass  # Another process holds the lock, or has removed the file.
            except OSError as error:
                # The file system has no locks: waiting would not end.
                os.close(fd)
                raise FolderUnavailable(self._path, error) from error
            holder = _read_mark(fd).holder or "another process is replacing the store's file"
            os.close(fd)
            if self._on_wait is None:
                raise StoreUnavailable(f"--kv-cache-dir {self._path}: {holder}; try again when that has ended")
            if time.monotonic() >= logged_at + _LOG_AGAIN_S:
                logged_at = time.monotonic()
                log.warning("[disk-cache] waiting for --kv-cache-dir %s: %s", self._path, holder)
                self._on_wait(holder)
            time.sleep(_POLL_S)

    def _open(self) -> int | None:
        file = self._path / LOCK
        if self._create:
            with file_errors(self._path):
                return _open_regular(file, os.O_RDWR | os.O_CREAT)
        with suppress(OSError):
            return _open_regular(file, os.O_RDONLY)
        return None

    def _is_current(self, fd: int) -> bool:
        """Returns whether the locked file is still the one in the folder. Another process may have removed it
        meanwhile."""
        return os.path.samestat(os.fstat(fd), os.lstat(self._path / LOCK))


def crash_file(folder: Path) -> int:
    """Opens the file to which `faulthandler` writes the stacks of the threads. Raises `OSError` if there is no folder
    yet."""
    return _open_regular(folder / CRASH, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def read_crash(folder: Path) -> str:
    """Returns the text that a daemon wrote when a signal ended it; empty if there is none."""
    with suppress(OSError):
        fd = _open_regular(folder / CRASH, os.O_RDONLY)
        try:
            return os.pread(fd, _MAX_CRASH_BYTES, 0).decode(errors="replace").strip()
        finally:
            os.close(fd)
    return ""


def _open_regular(file: Path, flags: int) -> int:
    """Opens a file. Raises `OSError` for a link and for anything else that is not a regular file."""
    fd = os.open(file, flags | _OPEN_FLAGS, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, f"{file.name} is no regular file")
    return fd


@contextmanager
def locked_names(folder: Path, *, change: bool, create: bool = True) -> Iterator[None]:
    """Locks the names of the store's files: shared to open the files, exclusively to `change` the names. Otherwise two
    processes could use one file with two lock files of LMDB. Without `create` (for reading), does nothing if this
    process cannot read the lock file: there has been no writer, or the writer was another user.

    The lock has its own file, because other users may be able to open the folder, and so to lock it. Raises `OSError`,
    or `StoreUnavailable` if another process keeps the lock.
    """
    file = folder / NAMES_LOCK
    try:
        fd = _open_regular(file, (os.O_RDWR | os.O_CREAT) if create else os.O_RDONLY)
    except OSError:
        if create:
            raise
        yield
        return
    try:
        lock_for_moment(fd, fcntl.LOCK_EX if change else fcntl.LOCK_SH, file)
        yield
    finally:
        os.close(fd)


def lock_for_moment(fd: int, operation: int, file: Path) -> None:
    """Locks an open file of the store (`flock`) that processes lock for moments only. After ten seconds, raises
    `StoreUnavailable`, which names the process that has the lock."""
    deadline = time.monotonic() + _MOMENT_S
    # Bound: `deadline`.
    while True:
        try:
            return fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                who = f"{described(flock_holder(fd))} has locked {file.name} and does not release it"
                raise StoreUnavailable(
                    f"--kv-cache-dir {file.parent}: {who}; end that process, or choose another folder"
                ) from None
        time.sleep(_POLL_S / 10)


def put_in_place(folder: Path) -> None:
    """Makes the file in `REPLACEMENT` durable and replaces the store's file by it. The caller holds the folder's lock
    exclusively, or a write transaction of the old file. Raises `OSError`."""
    new = folder / REPLACEMENT / DATA
    sync(new)
    with locked_names(folder, change=True):
        new.replace(folder / DATA)
        # The lock file counts the transactions of the old file. LMDB creates a new one.
        (folder / LMDB_LOCK).unlink(missing_ok=True)
    mark_made(folder)
    sync(folder)


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, durable. Raises `OSError`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _UNSYNCED or not path.is_dir():
            raise
