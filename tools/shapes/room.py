"""The room on the disk that a file needs, which is looked at before it is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from diskprefix.errors import ModelError
from diskprefix.units import format_size

_SPARE_BYTES = 256 << 20
"""For the tokenizer, and so that others can go on writing."""


def require_room(folder: Path, num_bytes: int) -> None:
    """Raises `ModelError` if the disk of `folder` has no room for a file of so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _SPARE_BYTES:
        raise ModelError(
            f"not enough disk space in {folder}: {format_size(num_bytes)} needed, {format_size(free)} free; free some, "
            "or give --folder on a larger disk"
        )
