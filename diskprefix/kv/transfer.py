"""Tensors as bytes of main memory, and the pages of that memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch

from diskprefix.store.codec.planes import Bytes

_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
"""Linux 5.14. Older kernels return EINVAL, and make the pages when they are written."""
_POPULATED_BYTES = 2 << 20
"""The bytes that are made at a time: one huge page. Meanwhile the process cannot map other memory."""
_libc = ctypes.CDLL(None, use_errno=True)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Returns the bytes of a tensor in main memory, without a copy."""
    return tensor.view(torch.uint8).numpy()


def fill_device(part: torch.Tensor, write: Callable[[Bytes], None]) -> None:
    """Has `write` fill a buffer in main memory, shape [rows, row_bytes], and copies the buffer to a tensor on a device,
    shape [rows, …]. If `write` raises, nothing is copied. Waits for the device. For any thread."""
    staged = np.empty((len(part), part[:1].numel() * part.dtype.itemsize), np.uint8)
    write(staged)
    part.copy_(torch.from_numpy(staged).view(part.dtype).view(part.shape))


def read(payload: Bytes, part: torch.Tensor) -> None:
    """Copies a tensor on any device to flat bytes in main memory."""
    if part.device.type == "cpu":
        # By numpy: torch would use all compute threads for each copy, while the model computes.
        source = bytes_of(part)
        payload.reshape(source.shape)[...] = source
    elif len(payload):
        read_device(payload, part)


def read_device(payload: Bytes, part: torch.Tensor) -> None:
    """Copies a tensor to flat bytes in main memory with torch. Waits for the device."""
    torch.from_numpy(payload).view(part.dtype).view(part.shape).copy_(part)


def populate(tensors: Sequence[torch.Tensor], is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Has the kernel make the pages of tensors in main memory while `is_wanted` returns True. The content stays. For
    any thread, also while others use the tensors."""
    for tensor in (tensor for tensor in tensors if tensor.device.type == "cpu"):
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
