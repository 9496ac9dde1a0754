"""On which processors our threads run. vLLM's worker for processors has its thread bound to one, where it computes; a
thread that it starts would have to wait for it there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def unbind() -> None:
    """Lets this thread, and those that it starts, run on all processors that the parent process may use, if it is bound
    to one of them. A wider choice, as that of a NUMA node, is left."""
    if not hasattr(os, "sched_getaffinity"):
        return
    own = os.sched_getaffinity(0)
    with suppress(OSError):
        allowed = os.sched_getaffinity(os.getppid())
        if len(own) == 1 and own < allowed:
            os.sched_setaffinity(0, allowed)


@contextmanager
def unbound() -> Iterator[None]:
    """Within it, this thread is as after `unbind`."""
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    unbind()
    try:
        yield
    finally:
        if own is not None:
            os.sched_setaffinity(0, own)
