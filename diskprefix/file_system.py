"""The kind of the file system that holds a folder."""

from __future__ import annotations

from pathlib import Path

VOLATILE = frozenset({"tmpfs", "ramfs"})
REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"})


def file_system(place: Path) -> str:
    """Returns Linux's name for the type of the file system that holds a path, or "" if it is unknown."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    real, best, kind = place.resolve(), -1, ""
    for fields in map(str.split, lines):
        mount = Path(fields[1].replace("\\040", " ")) if len(fields) > 2 else None
        # Of two file systems at one place, the later one is seen.
        if mount is not None and real.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), fields[2]
    return kind
