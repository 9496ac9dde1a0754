"""The file system that holds a folder, as Linux tells it, and whether what is in it outlives a container."""

from __future__ import annotations

import os
import re
from pathlib import Path

from msgspec import Struct

VOLATILE = frozenset({"tmpfs", "ramfs"})
"""File systems in memory."""
REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "fuse.ceph-fuse", "fuse.glusterfs"})
REMOTE |= {"lustre", "gpfs", "beegfs", "afs"}
LOCAL = VOLATILE | {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
    "bcachefs",
    "jfs",
    "overlay",
    "squashfs",
    "erofs",
}
"""File systems whose pages always arrive: a page of a map that does not ends the process. Those in user space may not
answer either."""
VOLUME = "DISKPREFIX_VOLUME"
"""The variable with the folder where an image expects a volume. Only images of diskprefix set it."""
_MOUNTS = Path("/proc/self/mountinfo")
_WITHOUT_NAME = re.compile(r"/[0-9a-f]{64}/_data$")
"""How the path of a volume ends that Docker or Podman made because none was named. No other container gets it."""


class Mount(Struct, frozen=True):
    """A mount: its `place`, the folder of its file system that is seen there, and Linux's name for the type."""

    place: str
    root: str
    kind: str


def mount_of(folder: Path) -> Mount | None:
    """Returns the mount that holds a folder, None if it is unknown, as on other systems than Linux."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    real, innermost, depth = folder.resolve(), None, -1
    for own, _, kind in (line.partition(" - ") for line in lines):
        fields = own.split()
        if len(fields) < 5 or not kind:
            continue
        root, place = (field.replace("\\040", " ") for field in fields[3:5])
        # Of two file systems at one place, the later one is seen.
        if real.is_relative_to(place) and len(Path(place).parts) >= depth:
            innermost, depth = Mount(place, root, kind.split()[0]), len(Path(place).parts)
    return innermost


def file_system(place: Path) -> str:
    """Returns Linux's name for the type of the file system that holds a path, or "" if it is unknown."""
    mount = mount_of(place)
    return mount.kind if mount else ""


def lost_with_container(folder: Path) -> str:
    """Returns why a folder is lost when the container of an image of diskprefix ends, and what to do; "" if it is
    not, or if this is no such container."""
    volume, mount = os.environ.get(VOLUME), mount_of(folder)
    if not volume or mount is None:
        return ""
    if mount.kind in VOLATILE:
        why = f"{mount.place} is in memory"
    elif mount.place == "/":
        why = f"no volume is mounted at {folder} or above it"
    elif _WITHOUT_NAME.search(mount.root):
        why = f"the volume at {mount.place} has no name, so no other container gets it"
    else:
        return ""
    return f"{why}: mount one, as with `-v diskprefix:{volume}`"


def file_stamp(file: Path) -> tuple[int, int, int]:
    """Returns what changes when a file is written or replaced."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
