"""A folder in place of a bucket: who may use it, and writing objects in it.

Objects hold token ids of prompts, so they get the mode of the folder whatever the umask is: who cannot list the folder
can read nothing in it. obstore, which reads and removes them, has no option for modes.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from diskprefix.errors import SettingsError
from diskprefix.private_file import distrusted_by_root, make_private_folder

log = logging.getLogger("diskprefix")

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def prepare_folder(flag: str, path: Path, *, makes_folder: bool) -> None:
    """Checks the folder that `flag` names. With `makes_folder`, creates it with mode 0700 if it is missing, and warns
    if others may read it. A missing folder passes.

    Raises `OSError`, and `SettingsError` if the folder belongs to another user, or if everybody may write to it: they
    could remove objects, or fill the disk. What they write there is refused, because it has no valid MAC. Members of
    the folder's group may write, because a group may share a folder. For root, nobody else may.
    """
    if problem := distrusted_by_root(path):
        raise SettingsError(f"{flag}: {problem}; run this as that user, or choose another folder")
    if makes_folder:
        make_private_folder(path)
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if problem := _problem(path, status):
        raise SettingsError(f"{flag}: {problem}, or choose another folder")
    if makes_folder and (readers := _readers(status)):
        mode = stat.S_IMODE(status.st_mode)
        log.warning("[remote] %s may read the prompts in %s (mode %o)", readers, path, mode)


def _problem(path: Path, status: os.stat_result) -> str | None:
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a folder; give its folder"
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user (uid {status.st_uid}); run this as that user, let root own it"
    if status.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(status.st_mode)
        cure = "give a folder of your own in it" if mode & stat.S_ISVTX else "chmod it to 700, or to 2770 for a group"
        return f"every user may write to {path} (mode {mode:o}); {cure}"
    return None


def _readers(status: os.stat_result) -> str | None:
    """Returns who else may read a folder or enter it, None if nobody may."""
    if status.st_mode & stat.S_IRWXO:
        return "every user of the machine"
    return f"the group {status.st_gid}" if status.st_mode & stat.S_IRWXG else None


def put_in_folder(root: Path, path: str, data: bytes) -> None:
    """Writes an object at `path`, relative to the folder `root`, atomically, with the rights that `root` gives. Links
    below `root` are not followed, because other members of a group may have put them there. Raises `OSError`."""
    *folders, name = path.split("/")
    fd = os.open(root, _FOLDER)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        for folder in folders:
            inner = _open_inner(fd, folder, mode)
            os.close(fd)
            fd = inner
        _write(fd, name, data, mode)
    finally:
        os.close(fd)


def _open_inner(outer: int, name: str, mode: int) -> int:
    """Opens the folder `name` in the folder `outer`. A missing folder is created with the rights in `mode`."""
    is_new = False
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=outer)
        is_new = True
    fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=outer)
    if is_new:
        # The system hands on the bit that gives new files the folder's group.
        inherited = os.fstat(fd).st_mode & stat.S_ISGID
        os.fchmod(fd, (mode & 0o777) | 0o700 | inherited)
    return fd


def _write(folder: int, name: str, data: bytes, mode: int) -> None:
    # obstore lists no names with # and digits: it uses them for the same purpose.
    new = f"{name}#{secrets.randbelow(10**9)}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, (mode & 0o666) | 0o600)
            file.write(data)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise
