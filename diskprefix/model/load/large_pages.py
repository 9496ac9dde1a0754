"""Memory for weights, in pages of 2 MiB."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import numpy as np
import numpy.typing as npt

from diskprefix.units import format_size

_LARGE_PAGE = 1 << 21
LINE_BYTES = 64
_PIECE_BYTES = 1 << 26
"""The memory that small arrays share."""


def large_pages(num_bytes: int) -> np.ndarray:
    """Returns memory, uint8 [num_bytes], in pages of 2 MiB: read up to 1.4 times as fast. Raises `MemoryError`."""
    size = num_bytes + _LARGE_PAGE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no memory left for {format_size(size)}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    first = -whole.ctypes.data % _LARGE_PAGE
    return whole[first : first + num_bytes]


class LargePages:
    """Large pages, which are filled from the first to the last."""

    def __init__(self) -> None:
        self._free: np.ndarray | None = None

    def take(self, shape: Sequence[int], dtype: npt.DTypeLike) -> np.ndarray:
        """Returns an array that begins with a line of the caches. Raises `MemoryError`."""
        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        room = -(-num_bytes // LINE_BYTES) * LINE_BYTES
        if self._free is None or room > len(self._free):
            self._free = large_pages(max(room, _PIECE_BYTES))
        place, self._free = self._free[:num_bytes], self._free[room:]
        return place.view(dtype).reshape(shape)

    def put(self, array: np.ndarray) -> np.ndarray:
        """Returns a copy of an array. Raises `MemoryError`."""
        found = self.take(array.shape, array.dtype)
        found[...] = array
        return found
