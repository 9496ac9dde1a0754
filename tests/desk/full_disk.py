"""Files that commands write beside the store: on a full disk, what was there stays, and no part of a file is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def assert_whole_on_a_full_disk(write: Callable[[Path, str], None], before: str | None, disk: Path) -> None:
    """Writes a file on a disk of 8 MiB, over the text `before` if that is given."""
    path = disk / "file"
    if before is not None:
        path.write_text(before)
    (disk / "daemons").mkdir()
    with pytest.raises(OSError, match=r"No space left|cannot write"):
        write(path, "x" * (9 << 20))
    left = {found.relative_to(disk).as_posix(): found.read_text() for found in disk.rglob("*") if found.is_file()}
    assert left == ({} if before is None else {"file": before})
