"""Files whose tables stay on the disk: a step reads single rows of them."""

from __future__ import annotations

import os
from pathlib import Path

from diskprefix.errors import ModelError


class TableFile:
    """An open file, for reading anywhere. It is closed with the object.

    The file is not mapped: a page of a mapped one that is cut short meanwhile would end the process.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ModelError`."""
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if hasattr(os, "posix_fadvise"):
                # Without it, the system reads 128 KiB ahead of each row.
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
