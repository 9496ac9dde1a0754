"""Compacts a store in a process that is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from diskprefix.prefixstore.store.compact import compact_folder

_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.fsync", "shutil.rmtree")


def compact_until_killed(folder: Path, left: int) -> None:
    """Compacts, and dies before the operation on the file system that follows `left` others."""

    def count(event: str, _: object) -> None:
        nonlocal left
        if event in _OPERATIONS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    compact_folder(folder)
    left = 1000
