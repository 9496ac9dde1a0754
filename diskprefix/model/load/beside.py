"""Work that goes on beside the rest of a start. Reading and packing hold no lock of Python's, so threads do them while
another one imports libraries, computes digests and reads the tokenizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import Thread
from typing import TypeAlias

import torch

Task: TypeAlias = Callable[[], None]


class WorkBeside:
    """Runs tasks on all threads that torch has but one: that of the caller, which joins them in `finish`. Not
    thread-safe."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._failures: list[Exception] = []
        self._threads: list[Thread] = []

    def begin(self, tasks: Iterable[Task]) -> None:
        """Begins with tasks, after those that were begun before. Threads that still work go on with these."""
        self._tasks += tasks
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        helpers = [Thread(target=self._work, name="weights", daemon=True) for _ in range(_num_helpers())]
        for thread in helpers[len(self._threads) :]:
            thread.start()
            self._threads.append(thread)

    def finish(self) -> None:
        """Returns once all tasks are done. Raises what one of them raised."""
        self._work()
        self._wait()
        for failure in self._failures:
            raise failure

    def stop(self) -> None:
        """Ends the work. What is not begun yet is left out."""
        self._tasks.clear()
        self._wait()

    def _wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while self._tasks:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return  # Another thread was faster.
            try:
                task()
            except Exception as error:  # noqa: BLE001 - `finish` raises it
                self._failures.append(error)
                self._tasks.clear()


def _num_helpers() -> int:
    return torch.get_num_threads() - 1
