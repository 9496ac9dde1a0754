"""Reads files with secrets, which no other user may read or write, and files that say whom to trust. Makes folders for
what only the user may see, and finds paths that other users could exchange."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from diskprefix.errors import SettingsError


def read_private(flag: str, path: Path, max_bytes: int) -> bytes:
    """Returns the content of the file that `flag` names, up to `max_bytes` + 1 bytes.

    Raises `SettingsError` if it cannot be read, or if other users may read or write it.
    """
    return _read(flag, path, max_bytes, _forbidden_bits(path), "read or write", "600")


def read_trusted(what: str, path: Path, max_bytes: int) -> bytes:
    """Returns the content of a file that says whom this user trusts, and that all may read, up to `max_bytes` + 1
    bytes. Raises `SettingsError`, which begins with `what`, if it cannot be read, or if other users may write it."""
    return _read(what, path, max_bytes, stat.S_IWGRP | stat.S_IWOTH, "write", "644")


def _read(what: str, path: Path, max_bytes: int, forbidden: int, others_may: str, mode: str) -> bytes:
    try:
        # The open file is checked, not its name, which may lead to another file a moment later. O_NONBLOCK: opening a
        # named pipe without a writer would block.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SettingsError(f"{what}: {path} is not a file")
            if status.st_uid not in (0, os.geteuid()):
                owner = f"{path} belongs to another user (uid {status.st_uid})"
                raise SettingsError(f"{what}: {owner}; chown it to the daemon's")
            if status.st_mode & forbidden:
                now = f"(mode {stat.S_IMODE(status.st_mode):04o})"
                raise SettingsError(f"{what}: others may {others_may} {path} {now}; run `chmod {mode}` on it")
            return file.read(max_bytes + 1)
    except OSError as error:
        raise SettingsError(f"{what}: cannot read {path}: {error.strerror}") from error


def _forbidden_bits(path: Path) -> int:
    """Returns the mode bits that must not be set.

    systemd grants a credential to the service's user by an ACL, whose mask appears as the group's right to read.
    """
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    is_credential = credentials is not None and path.resolve().parent == Path(credentials).resolve()
    return 0o037 if is_credential else 0o077


def make_private_folder(path: Path) -> None:
    """Creates a folder and the missing ones above it, all with mode 0700: whoever can write to one above can replace
    the folder. Raises `OSError`."""
    for folder in (*reversed(path.parents), path):
        # Not `parents=True`, which gives them 0777 if the umask is 0.
        if folder == path or not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def distrusted_by_root(path: Path) -> str | None:
    """Describes the existing part of `path`, links followed, that another user could replace; None without one, and if
    this process is not root's."""
    place = Path(os.path.realpath(path))
    for part in (place, *place.parents) if os.geteuid() == 0 else ():
        if not part.exists():
            continue
        status = part.stat()
        # The members of root's group count as root.
        others_write = stat.S_IWOTH if status.st_gid == 0 else stat.S_IWGRP | stat.S_IWOTH
        if status.st_uid != 0:
            return f"{part} belongs to another user (uid {status.st_uid})"
        if status.st_mode & others_write and not status.st_mode & stat.S_ISVTX:
            return f"{part} may be written to by other users (mode {stat.S_IMODE(status.st_mode):o})"
    return None
