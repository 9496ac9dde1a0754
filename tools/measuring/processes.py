"""Facts of processes, files and ports, as Linux reports them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

_SAMPLE_S = 0.02
_QUIET_S = 2.0
_QUIET_SHARE = 0.05
"""The part of a CPU that processes may take that have nothing to do."""


def status_bytes(pid: int, *keys: str) -> int:
    """Returns the sum of a process's sizes in `/proc/PID/status` under some keys, such as `RssAnon`; 0 if it is
    gone."""
    total = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            total += int(value.split()[0]) << 10 if name in keys else 0
    return total


def disk_bytes(folder: Path) -> int:
    """Returns the disk space of a folder's files, without holes; 0 if there is no such folder."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def drop_cached(path: Path) -> None:
    """Drops a file's pages from the page cache. Pages that a process has mapped stay."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def peak_of(num_bytes: Callable[[], int]) -> Iterator[SimpleNamespace]:
    """Yields an object whose `peak_bytes` is the largest result of `num_bytes` so far. It is final after the block."""
    peak, is_over = SimpleNamespace(peak_bytes=0), Event()

    def watch() -> None:
        while not is_over.wait(_SAMPLE_S):
            peak.peak_bytes = max(peak.peak_bytes, num_bytes())

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()
        peak.peak_bytes = max(peak.peak_bytes, num_bytes())


def wait_quiet(pids: Callable[[], list[int]], most_s: float) -> bool:
    """Waits until processes have neither computed nor written to a disk for two seconds: what a program does in idle
    time is done. Returns False if they still do after `most_s` seconds."""
    deadline, before = time.monotonic() + most_s, _work(pids())
    while time.monotonic() < deadline:
        time.sleep(_QUIET_S)
        now = _work(pids())
        if now[0] - before[0] <= _QUIET_SHARE * _QUIET_S and now[1] == before[1]:
            return True
        before = now
    return False


def _work(pids: list[int]) -> tuple[float, int]:
    """Returns the seconds of CPU time that processes have used, and the bytes that they have written."""
    seconds, written = 0.0, 0
    for pid in pids:
        with suppress(OSError):
            # After the program's name, which may have spaces.
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
            written += sum(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))
    return seconds, written


def family(pid: int) -> list[int]:
    """Returns a process and its descendants."""
    pids = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                pids += family(int(child))
    return pids


def lower_peak(pid: int) -> None:
    """Resets a process's `VmHWM` to its resident memory now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
