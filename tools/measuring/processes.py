"""What Linux says of processes, files and ports."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path


def status_bytes(pid: int, *keys: str) -> int:
    """Returns the sum of sizes that the kernel has for a process, such as `RssAnon`; 0 if it is gone."""
    found = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            found += int(value.split()[0]) << 10 if name in keys else 0
    return found


def disk_bytes(folder: Path) -> int:
    """Returns what the files of a folder take on the disk, without holes; 0 if there is no such folder."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
