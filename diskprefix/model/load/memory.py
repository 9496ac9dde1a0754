"""The memory that a model's weights take, and the memory that is free."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from diskprefix.errors import ModelError

if TYPE_CHECKING:
    import torch

ADVICE = "free some, or choose a smaller model, another --dtype or another --device"


@contextmanager
def explain_out_of_memory(problem: str) -> Iterator[None]:
    """Turns what torch raises when memory runs out into a `ModelError` that names the `problem`."""
    try:
        yield
    except Exception as error:
        from diskprefix.kv.layout import is_out_of_memory

        if is_out_of_memory(error):
            raise ModelError(f"{problem}; {ADVICE}") from error
        raise


@contextmanager
def one_thread() -> Iterator[None]:
    """Gives a context in which torch uses one thread: for many small operations that memory bandwidth limits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def trim_heap() -> None:
    """Gives the heap's free memory back to the kernel, where the C library can. A start leaves tens of MiB."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def use_gpu(device: torch.device) -> None:
    """Makes `device`, if it is one of several GPUs, that of this thread."""
    if device.index:
        import torch

        torch.accelerator.set_device_index(device.index)


def available_bytes(device: torch.device) -> int:
    """Returns the free memory of `device` in bytes, with what torch holds of it unused."""
    if device.type == "cpu":
        return available_ram_bytes()
    import torch

    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    of_device = torch.get_device_module(device)
    unused = of_device.memory_reserved(device) - of_device.memory_allocated(device)
    return int(of_device.mem_get_info(device)[0] + max(0, unused))


def kv_bytes() -> int:
    """Returns how many bytes of the free main memory KV may take. The rest is for computing with it."""
    return int(available_ram_bytes() * 0.9)


def available_ram_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
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
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rests(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yields what is left under each limit from this process's control group (version 2) up to the root."""
    lines = _read(proc / "self" / "cgroup").splitlines()
    group = next((cgroups / line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    while group is not None:
        limit, usage = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
        if limit.isdigit() and usage.isdigit():
            # The kernel counts page cache as usage, but frees it on demand.
            stat = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
            yield max(int(limit) - int(usage) + int(stat.get("inactive_file", "0")), 0)
        group = group.parent if cgroups in group.parents else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
