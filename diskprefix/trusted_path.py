"""Finds paths that another user could exchange between a check and a use by a process of root."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def distrusted_by_root(path: Path) -> str | None:
    """Describes the part of `path`, links followed, that another user could replace; None if there is none, and for
    processes of other users than root. Ignores parts that do not exist."""
    place = Path(os.path.realpath(path))
    for part in (place, *place.parents) if os.geteuid() == 0 else ():
        if not part.exists():
            continue
        found = part.stat()
        # Root's group is root's.
        others_write = stat.S_IWOTH if found.st_gid == 0 else stat.S_IWGRP | stat.S_IWOTH
        if found.st_uid != 0:
            return f"{part} belongs to another user (uid {found.st_uid})"
        if found.st_mode & others_write and not found.st_mode & stat.S_ISVTX:
            return f"{part} may be written to by other users (mode {stat.S_IMODE(found.st_mode):o})"
    return None
