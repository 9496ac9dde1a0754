"""Copies between payloads, which are bytes in main memory, and tensors on any device."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Bytes: TypeAlias = npt.NDArray[np.uint8]

_MADV_POPULATE_WRITE = 23
"""Linux 5.14. Older kernels return EINVAL, and the pages come when they are written."""
_POPULATED_BYTES = 2 << 20
"""At a time, a large page: while the kernel makes pages, the process can map no other memory, which a request does."""
_libc = ctypes.CDLL(None, use_errno=True)


def tensor_over(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Returns a flat tensor over the bytes of `payload`, without a copy. It is good while `payload` lives."""
    # `torch.frombuffer` warns about every read-only buffer, such as a view of the store's memory map: hence ctypes.
    address = np.frombuffer(payload, dtype=np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * len(payload)).from_address(address), dtype=dtype)


def copy_into(payload: Bytes, part: torch.Tensor) -> None:
    """Copies a tensor's values to flat bytes in main memory."""
    if in_main_memory(part):
        source = bytes_of(part)
        payload.reshape(source.shape)[...] = source
    elif len(payload):
        tensor_over(payload.data, part.dtype).view(part.shape).copy_(part)


def write_through(write: Callable[[Bytes], None], part: torch.Tensor) -> None:
    """Has `write` fill a tensor of shape [rows, …] on another device, by way of main memory."""
    staged = _staging.take(part.numel() * part.dtype.itemsize, part.device)
    write(staged.numpy().reshape(len(part), -1))
    part.copy_(staged.view(part.dtype).view(part.shape))


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Returns the bytes of a tensor in main memory, without a copy."""
    return tensor.view(torch.uint8).numpy()


def populate(tensors: Sequence[torch.Tensor], is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Has the kernel make the pages of tensors in main memory, whose content stays, as long as `is_wanted`. For any
    thread, beside others that use them."""
    for tensor in filter(in_main_memory, tensors):
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = tensor.data_ptr() + tensor.numel() * tensor.dtype.itemsize
        while first < end and is_wanted():
            part = min(_POPULATED_BYTES - first % _POPULATED_BYTES, end - first)
            if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(part), _MADV_POPULATE_WRITE):
                return
            first += part


def in_main_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


class _Staging(threading.local):
    """Main memory on the way to another device, kept for each thread because fresh pages are slow. It is page-locked
    for CUDA, which copies once more otherwise."""

    memory: torch.Tensor | None = None

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Returns bytes, shape [num_bytes], uint8, that are good until the next call in the thread."""
        if self.memory is None or len(self.memory) < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
            if device.type == "cuda":
                # Otherwise the first GPU is used, with which the model may have nothing to do.
                with torch.cuda.device(device):
                    self.memory = self.memory.pin_memory()
        return self.memory[:num_bytes]


_staging = _Staging()
