"""Runs work that may be killed by a signal or hang, in a process of its own."""

from __future__ import annotations

import os
import resource
import signal
import traceback
from collections.abc import Callable


def run_isolated(work: Callable[[], str], timeout_s: float) -> str:
    """Returns what `work` returns in a forked child; otherwise "signal …", "hang" or "traceback …".

    The alarm that ends a hang is the kernel's: it also ends one inside a library. Call it where no threads run.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(read_end)
        _work_and_exit(work, timeout_s, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answers:
        answer = answers.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGALRM:
        return "hang"
    return f"signal {signal.Signals(-code).name}" if code < 0 else answer


def _work_and_exit(work: Callable[[], str], timeout_s: float, answers: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        answer = work()
    except BaseException:  # noqa: BLE001 (only the parent may go on, and judges what went wrong)
        answer = f"traceback {traceback.format_exc()}"
    os.write(answers, answer.encode()[:60_000])
    os._exit(0)
