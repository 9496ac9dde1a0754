"""Root and the folders of other users.

The owner of a folder can replace any file in it by a link, also between a check and a use, and LMDB opens its files by
their paths. So root never works in a folder that another user controls. A command on the store of another user gives up
root's rights for good first, and goes on as that user.
"""

from __future__ import annotations

import os
from pathlib import Path

from diskprefix.errors import StoreUnavailable
from diskprefix.trusted_path import distrusted_part


def become_owner(path: Path) -> Path:
    """Turn a process of root's, for good, into one of the user who owns folder `path`.

    Returns the path by which the process reaches the folder from then on. That is `path`, or the working directory
    where the owner may not enter a folder above, as with the cache of a systemd service with `DynamicUser=`. Does
    nothing in processes of other users, for a folder of root's, and where there is no folder. Raises `StoreUnavailable`
    if a third user could replace the folder, or if the owner cannot run this installation.
    """
    if os.geteuid() != 0 or not path.is_dir():
        return path
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        owner = os.fstat(folder)
        if owner.st_uid == 0:
            return path
        require_trusted_path(path, {0, owner.st_uid})
        _become(owner.st_uid, owner.st_gid, path)
        if os.access(path, os.X_OK):
            return path
        os.fchdir(folder)
        return Path()
    finally:
        os.close(folder)


def _become(uid: int, gid: int, path: Path) -> None:
    try:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    except PermissionError as error:
        raise StoreUnavailable(f"root cannot become user {uid}, who owns {path}; run this as that user") from error
    # Modules that are imported from here on are read with the owner's rights.
    if not all(os.access(file, os.R_OK) for file in (__file__, os.__file__)):
        raise StoreUnavailable(
            f"user {uid}, who owns {path}, cannot read this installation of diskprefix; use one that all users can read"
        )


def require_trusted_path(path: Path, trusted: set[int]) -> None:
    """Raises `StoreUnavailable` if a user who is not in `trusted` could replace a part of `path`, or of a link on it.

    Parts that do not exist pass.
    """
    problem = distrusted_part(path, trusted)
    if problem:
        raise StoreUnavailable(
            f"--kv-cache-dir {path}: {problem}, who could exchange it; run this as that user or choose another folder"
        )
