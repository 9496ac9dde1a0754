"""The threads that compute operators: when there are any, when they sleep, and when they end."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from diskprefix.native import calls, library

NUMBERS = np.arange(1 << 18, dtype=np.uint16)
WIDENED = (NUMBERS.astype(np.uint32) << 16).tobytes()


def widened(num_threads: int) -> bytes:
    """Returns numbers that an operator has made from NUMBERS, which share threads."""
    operators = library.operators()
    assert operators is not None
    out = np.empty(NUMBERS.size, dtype=np.float32)
    call = calls.WideningCall(width=1, rows=NUMBERS.ctypes.data, out=out.ctypes.data)
    operation = calls.Operation(calls.WIDEN, 0, ctypes.addressof(call))
    plan = calls.Operations(1, ctypes.addressof(operation))
    assert not operators.run(bytes(plan), bytes(calls.PlanStep(num_rows=NUMBERS.size, num_threads=num_threads)))
    return out.tobytes()


def threads() -> set[Path]:
    return set(Path("/proc/self/task").iterdir())


def helpers_of(num_threads: int) -> set[Path]:
    """Returns the threads that help this one in its first call."""
    before = threads()
    assert widened(num_threads) == WIDENED
    return threads() - before


def test_each_thread_that_computes_has_helpers_that_end_with_it() -> None:
    for num_threads in (1, 2, 5):
        with ThreadPoolExecutor(1) as pool:
            helpers = pool.submit(helpers_of, num_threads).result()
            assert len(helpers) == num_threads - 1
            assert not pool.submit(helpers_of, num_threads).result()
        while helpers & threads():
            time.sleep(0.01)


def test_helpers_sleep_while_nothing_is_computed() -> None:
    with ThreadPoolExecutor(1) as pool:
        helpers = pool.submit(helpers_of, 4).result()
        while {(one / "stat").read_text().rpartition(")")[2].split()[0] for one in helpers} != {"S"}:
            time.sleep(0.01)
        assert pool.submit(widened, 4).result() == WIDENED


def test_threads_that_compute_at_once_do_not_disturb_each_other() -> None:
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(widened, [1 + number % 5 for number in range(300)])) == {WIDENED}


def in_a_process(code: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_a_forked_process_has_its_own_helpers() -> None:
    code = "import os; from tests.native.test_team import *; widened(3); child = os.fork(); "
    code += "assert len(helpers_of(3)) == (0 if child else 2); child and sys.exit(os.waitpid(child, 0)[1])"
    in_a_process(code)


def test_operators_need_no_torch() -> None:
    in_a_process("import sys; from tests.native.test_team import *; widened(2); assert 'torch' not in sys.modules")
