"""The CPUs that a thread may run on. An engine may bind its computing thread to one CPU. A thread started there
inherits the binding, and would wait for the computing thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def unbind() -> None:
    """Lets this thread, and threads that it starts, run on all CPUs of the parent process. Only a binding to a single
    CPU is removed: a wider one, such as to a NUMA node, stays."""
    if not hasattr(os, "sched_getaffinity"):
        return
    own = os.sched_getaffinity(0)
    with suppress(OSError):
        allowed = os.sched_getaffinity(os.getppid())
        if len(own) == 1 and own < allowed:
            os.sched_setaffinity(0, allowed)


@contextmanager
def unbound() -> Iterator[None]:
    """Unbinds this thread within the block."""
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    unbind()
    try:
        yield
    finally:
        if own is not None:
            os.sched_setaffinity(0, own)
