"""The state of a process before a command runs: its standard files and its signals."""

from __future__ import annotations

import os
import signal
import sys

_HANDLED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2}
"""The signals that commands handle. A supervisor that blocks them for itself may leave them blocked."""


def begin() -> None:
    """Opens standard files that are closed, and unblocks the signals that commands handle. Call it before any other
    file is opened."""
    _open_standard_files()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)


def _open_standard_files() -> None:
    """Opens `/dev/null` in place of those of the files 0, 1 and 2 that are closed. Otherwise the next socket would have
    that number, and what is printed would go to its client."""
    # Bound: an open file has the lowest number that is free.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        # As standard files are, also for the processes that this one starts.
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Python found the file closed.
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
