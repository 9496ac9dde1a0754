"""The kernel's pages of memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable

_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
"""Linux 5.14. Older kernels return EINVAL, and populate pages when they are first written."""
_POPULATED_BYTES = 2 << 20
"""The bytes that are populated at a time: one huge page. Meanwhile the process cannot map other memory."""
_libc = ctypes.CDLL(None, use_errno=True)


def populate(memory: Iterable[tuple[int, int]], is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Has the kernel populate memory, given as pairs of address and number of bytes, while `is_wanted` returns True.
    The content does not change. For any thread, also while others use the memory."""
    for start, num_bytes in memory:
        first, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, start + num_bytes
        # Bound: each part has at least one byte.
        while first < stop and is_wanted():
            part = min(_POPULATED_BYTES - first % _POPULATED_BYTES, stop - first)
            if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(part), _MADV_POPULATE_WRITE):
                return
            first += part


def give_back(start: int, num_bytes: int) -> None:
    """Gives private memory back to the kernel. The content is lost: it reads as zeros."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    is_given = first < stop and not _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), _MADV_DONTNEED)
    if not is_given:
        # The kernel refuses, for example, if the memory is locked.
        first = stop = start + num_bytes
    # The kernel pages at both ends may be shared with neighbours, so they are not given back but zeroed.
    ctypes.memset(start, 0, first - start)
    ctypes.memset(stop, 0, start + num_bytes - stop)
