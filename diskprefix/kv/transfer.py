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
"""The bytes of a large page, made at a time. Meanwhile the process can map no other memory, which a request does."""
_libc = ctypes.CDLL(None, use_errno=True)


def tensor_over(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Returns a flat tensor over the bytes of `payload`, without a copy. It is valid while `payload` lives."""
    # `torch.frombuffer` warns about every read-only buffer, such as a view of the store's memory map. ctypes avoids
    # that.
    address = np.frombuffer(payload, dtype=np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * len(payload)).from_address(address), dtype=dtype)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Returns the bytes of a tensor in main memory, without a copy."""
    return tensor.view(torch.uint8).numpy()


def fill_device(part: torch.Tensor, write: Callable[[Bytes], None]) -> None:
    """Has `write` fill a tensor on a device, shape [rows, …], by way of a buffer in main memory. `write` gets bytes of
    shape [rows, row_bytes]. If it raises, nothing is copied. Waits for the device. For any thread."""
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
    """Does what `read` does by torch's own copy. Waits for the device."""
    tensor_over(payload.data, part.dtype).view(part.shape).copy_(part)


def populate(tensors: Sequence[torch.Tensor], is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Has the kernel make the pages of tensors in main memory while `is_wanted`. Their content stays. For any thread,
    beside others that use the tensors."""
    for tensor in (tensor for tensor in tensors if tensor.device.type == "cpu"):
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = tensor.data_ptr() + tensor.numel() * tensor.dtype.itemsize
        while first < end and is_wanted():
            part = min(_POPULATED_BYTES - first % _POPULATED_BYTES, end - first)
            if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(part), _MADV_POPULATE_WRITE):
                return
            first += part


def give_back(tensor: torch.Tensor) -> None:
    """Gives the pages within a tensor back to the kernel. Its content is lost. For fresh memory of one's own."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED)
