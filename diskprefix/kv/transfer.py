"""Tensors as bytes, and the kernel's pages of their memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence

import torch

from diskprefix.store.codec.planes import Bytes

_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
"""Linux 5.14. Older kernels return EINVAL, and make the pages when they are written."""
_POPULATED_BYTES = 2 << 20
"""The bytes that are made at a time: one huge page. Meanwhile the process cannot map other memory."""
_libc = ctypes.CDLL(None, use_errno=True)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Returns the bytes of a tensor without a copy."""
    return tensor.view(torch.uint8).numpy()


def populate(tensors: Sequence[torch.Tensor], is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Has the kernel make the pages of tensors while `is_wanted` returns True. The content stays. For
    any thread, also while others use the tensors."""
    for tensor in tensors:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = tensor.data_ptr() + tensor.numel() * tensor.dtype.itemsize
        while first < stop and is_wanted():
            part = min(_POPULATED_BYTES - first % _POPULATED_BYTES, stop - first)
            if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(part), _MADV_POPULATE_WRITE):
                return
            first += part


def give_back(tensor: torch.Tensor) -> None:
    """Gives the pages within a tensor, which must be private memory, back to the kernel. The content is lost."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.numel() * tensor.dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < stop:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), _MADV_DONTNEED)
