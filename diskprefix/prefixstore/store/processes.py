"""Describes other processes that hold a lock of the store, for people. Other systems than Linux give fewer facts."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from diskprefix.printable import shown

_STATES = {"T": "suspended", "t": "held by a debugger", "D": "waiting for a disk"}


def described(pid: int) -> str:
    """Returns a description of a process for people, with its program and its state if they can be read. Names no
    argument but the command of diskprefix, because other arguments may be secret."""
    if not pid:
        return "another process"
    known = [fact for fact in (_program(pid), _STATES.get(_state(pid), "")) if fact]
    return f"process {pid} ({', '.join(known)})" if known else f"process {pid}"


def _program(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        names = [os.path.basename(word) for word in words]
        if "diskprefix" not in names:
            return shown(names[0])
        command = names[names.index("diskprefix") + 1]
        return f"diskprefix {command}" if command.isalpha() else "diskprefix"
    return ""


def is_suspended(pid: int) -> bool:
    """Returns whether a process was stopped by a signal, for example with Ctrl+Z."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    """Returns the letter of a process's state, empty if it cannot be read."""
    with suppress(OSError, IndexError):
        # The name of the program comes before the state, in parentheses, and may contain any characters.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


def flock_holder(fd: int) -> int:
    """Returns the id of a process that has a lock (`flock`) on an open file, 0 if none is known."""
    status = os.fstat(fd)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # Number, kind, ADVISORY, READ or WRITE, process, place; "->" after the number marks a process that waits.
            words = line.split()
            if words[1] == "FLOCK" and words[5] == place:
                return int(words[4])
    return 0
