"""Finds parts of a path that another user could exchange between a check and a use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_MAX_LINKS = 40


def distrusted_part(path: Path, trusted: set[int]) -> str | None:
    """Returns a description of the part of `path`, links included, that users outside `trusted` could replace.

    Returns None if there is none. Parts that do not exist pass.
    """
    return _distrusted(Path.cwd() / path, trusted, _MAX_LINKS)


def distrusted_by_root(path: Path) -> str | None:
    """Returns the `distrusted_part` for root's process, which would read and write files of other users with root's
    rights. Returns None for other users' processes."""
    return distrusted_part(path, {0}) if os.geteuid() == 0 else None


def _distrusted(path: Path, trusted: set[int], links_left: int) -> str | None:
    """Returns the description of a part of `path` that other users control, or None."""
    place = Path(path.anchor)
    for part in path.parts[1:]:
        place /= part
        try:
            found = place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if found.st_uid not in trusted:
            return f"{place} belongs to another user (uid {found.st_uid})"
        if stat.S_ISLNK(found.st_mode):
            target = place.parent / place.readlink()
            problem = (
                _distrusted(target, trusted, links_left - 1) if links_left else f"{place} is one of too many links"
            )
            if problem:
                return problem
        elif found.st_mode & _others_write(found) and not found.st_mode & stat.S_ISVTX:
            return f"{place} may be written to by other users (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _others_write(found: os.stat_result) -> int:
    """Returns the bits of the mode that let other users write. Root's group is root's."""
    return stat.S_IWOTH if found.st_gid == 0 else stat.S_IWGRP | stat.S_IWOTH
