"""The rights of a folder's owner, for a root process that works in the folder of another user.

The owner of a folder can replace any file in it by a link at any moment, also between a check and a use. So root takes
the owner's rights on files (`setfsuid`) for as long as it works there. Only Linux has this call; elsewhere root
is refused. See "Who may use the folder" in `README.md`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from diskprefix.errors import StoreUnavailable

_QUERY = 0xFFFFFFFF
"""An id that no user has: `setfsuid` and `setfsgid` change nothing and return the present one."""


@contextmanager
def owner_rights(path: Path) -> Iterator[Path]:
    """Run a block with the rights on files that the owner of folder `path` has, where this process is root and the
    owner is another user. Only the calling thread has them, and blocks may be nested.

    Yields the path by which the block reaches the folder. It stays valid if `path` is renamed, and needs no right on
    the folders above. For everybody else the block runs as it is and the path is `path`.

    Raises `OSError` if the folder cannot be opened, `StoreUnavailable` if a link to it is not to be trusted or the
    rights cannot be taken.
    """
    if os.geteuid() != 0:
        yield path
        return
    if not sys.platform.startswith("linux"):
        if path.stat().st_uid != 0:
            raise StoreUnavailable(f"--kv-cache-dir {path}: another user owns the folder; run this as that user")
        yield path
        return
    before = _rights()
    _take(0, 0)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            folder = os.fstat(fd)
            _refuse_planted_links(path, folder.st_uid)
            if folder.st_uid == 0:
                yield path
            else:
                # Root has every right without them; they would add to the owner's.
                with suppress(PermissionError):
                    os.setgroups([])
                _take(folder.st_uid, folder.st_gid)
                yield Path(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
    finally:
        _take(*before)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.setfsuid.restype = libc.setfsgid.restype = ctypes.c_uint
    return libc


def _rights() -> tuple[int, int]:
    return _libc().setfsuid(_QUERY), _libc().setfsgid(_QUERY)


def _take(uid: int, gid: int) -> None:
    # The group first: only root may change it.
    _libc().setfsgid(gid)
    _libc().setfsuid(uid)
    if _rights() != (uid, gid):
        raise StoreUnavailable(f"root cannot take the rights of user {uid}, who owns the folder; run this as that user")


def _refuse_planted_links(path: Path, owner: int) -> None:
    """Raises `StoreUnavailable` if a link in `path` belongs neither to root nor to the folder's owner: whoever made it
    would choose the folder in which root works."""
    for place in (path, *path.parents):
        if place.is_symlink() and place.lstat().st_uid not in (0, owner):
            raise StoreUnavailable(f"--kv-cache-dir {path}: {place} is a link that another user made; give its target")
