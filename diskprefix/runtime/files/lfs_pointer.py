"""Pointers of Git LFS: the few lines that a clone without `git lfs` has in the place of a large file."""

from __future__ import annotations

from pathlib import Path

_BEGIN = b"version https://git-lfs."
IS_POINTER = "it is a pointer of Git LFS, without the content: run `git lfs pull` in its folder, or fetch it again"


def fault_or_pointer(file: Path, fault: str) -> str:
    """Returns the fault of a file that cannot be read, or that it is a pointer."""
    try:
        with file.open("rb") as opened:
            begin = opened.read(len(_BEGIN))
    except OSError:
        return fault
    return IS_POINTER if begin == _BEGIN else fault
