"""The memory that a model's weights take, and the memory that is free."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from diskprefix.control_groups import MOUNTED, PROC, control_groups, read
from diskprefix.errors import ModelError
from diskprefix.units import format_size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ADVICE = "free some, or choose a smaller model, another --dtype or another --device"
_LARGE_PAGE = 1 << 21
LINE_BYTES = 64
_PIECE_BYTES = 1 << 26
"""The memory that small tensors share."""
_LIMITS = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""The files of a control group of version 2 and of version 1: its limit and its usage. In the statistics of version 1,
sums that include inner groups have a prefix."""


@contextmanager
def explain_out_of_memory(problem: str) -> Iterator[None]:
    """Turns what torch raises when memory runs out into a `ModelError` that names the `problem`."""
    try:
        yield
    except Exception as error:
        from diskprefix.prefixstore.kv.layout import is_out_of_memory

        if is_out_of_memory(error):
            raise ModelError(f"{problem}; {ADVICE}") from error
        raise


def large_pages(num_bytes: int) -> np.ndarray:
    """Returns memory, uint8 [num_bytes], in pages of 2 MiB: read up to 1.4 times as fast. Raises `MemoryError`."""
    import numpy as np  # Here, as the router counts memory without it.

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
        import numpy as np

        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        room = -(-num_bytes // LINE_BYTES) * LINE_BYTES
        if self._free is None or room > len(self._free):
            self._free = large_pages(max(room, _PIECE_BYTES))
        place, self._free = self._free[:num_bytes], self._free[room:]
        return place.view(dtype).reshape(shape)

    def put(self, array: np.ndarray) -> np.ndarray:
        """Returns a copy of an array. Raises `MemoryError`."""
        copy = self.take(array.shape, array.dtype)
        copy[...] = array
        return copy


def trim_heap() -> None:
    """Gives the heap's free memory back to the kernel, where the C library can. A start leaves tens of MiB."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def use_gpu(device: str) -> None:
    """Makes `device` the device of this thread, if it is one of several GPUs."""
    if int(device.partition(":")[2] or 0):
        import torch

        torch.accelerator.set_device_index(torch.device(device).index)


def available_bytes(device: str) -> int:
    """Returns the free memory of `device` in bytes, with what torch holds of it unused."""
    if device == "cpu":
        return available_ram_bytes()
    import torch

    if device == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    of_device = torch.get_device_module(device)
    unused = of_device.memory_reserved(device) - of_device.memory_allocated(device)
    return int(of_device.mem_get_info(device)[0] + max(0, unused))


def kv_bytes() -> int:
    """Returns how many bytes of the free main memory KV may take. The rest is for computing with it."""
    return int(available_ram_bytes() * 0.9)


def available_ram_bytes(proc: Path = PROC, cgroups: Path = MOUNTED) -> int:
    """Returns the RAM that this process can still take, in bytes: MemAvailable of the machine, or what its control
    groups leave, whichever is less. Without /proc (macOS) it is the RAM of the machine."""
    return min([_machine_ram(proc), *_cgroup_rests(proc, cgroups)])


def resident_bytes() -> int | None:
    """Returns the resident memory of this process in whole MiB, so that few pages more are no news. None without
    /proc."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20 << 20
    return None


def _machine_ram(proc: Path) -> int:
    for line in read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rests(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yields the memory left under each limit, from this process's control group up to the root."""
    for group in control_groups("memory", proc, cgroups):
        for limit_file, usage_file, prefix in _LIMITS:
            limit, usage = read(group / limit_file).strip(), read(group / usage_file).strip()
            if limit.isdigit() and usage.isdigit():
                # The kernel counts page cache as usage, but frees it on demand.
                stat = dict(line.split(maxsplit=1) for line in read(group / "memory.stat").splitlines())
                yield max(int(limit) - int(usage) + int(stat.get(f"{prefix}inactive_file", "0")), 0)
