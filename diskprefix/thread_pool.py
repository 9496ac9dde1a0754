"""Threads that outlive an error: pools that start no thread where work is submitted, and threads that begin again.

A system may refuse a thread at any time: a limit of tasks, or no memory for a stack.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

log = logging.getLogger("diskprefix")

T = TypeVar("T")

_AGAIN_S = 1.0
"""Seconds between the error of a thread and its next beginning."""


class ThreadPool(Executor):
    """A pool of at most `max_threads` threads, whose names begin with `name`. For any thread.

    `submit` only queues: a thread of the pool that takes work while no other one waits for work starts the next one. So
    once the pool has started, no caller starts a thread. If the system refuses a thread, work waits for those that are
    there, and the next work asks again. `begin` is called first on each thread.
    """

    def __init__(self, max_threads: int, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self._max_threads, self._name, self._begin = max_threads, name, begin
        self._waiting: queue.SimpleQueue[Work[Any] | None] = queue.SimpleQueue()
        """The work of the threads. None ends them."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_free = 0
        """The number of threads without work."""
        self._is_closed = False

    def start(self) -> ThreadPool:
        """Starts the first thread, if none has started, and returns this pool. Raises `RuntimeError` if the system
        refuses it."""
        with self._lock:
            if not self._threads:
                self._add_thread()
        return self

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Queues a call, and returns its future. Raises `RuntimeError`, and queues nothing, after `shutdown`, and if
        the system refuses the first thread of a pool that was not started."""
        self.start()
        work = Work(partial(fn, *args, **kwargs))
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"no more work for {self._name}")
            self._waiting.put(work)
        return work.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accepts no more work, and ends each thread after the queued work; with `cancel_futures`, after its own."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        if cancel_futures:
            with suppress(queue.Empty):
                # Bound: nothing is added to a closed pool.
                while True:
                    if (work := self._waiting.get_nowait()) is not None:
                        work.future.cancel()
        self._waiting.put(None)
        for thread in threads if wait else ():
            thread.join()

    def _add_thread(self) -> None:
        """Starts a thread. The caller holds the lock."""
        thread = standing_thread(self._run, f"{self._name}_{len(self._threads)}")
        thread.start()
        self._threads.append(thread)
        self._num_free += 1

    def _run(self) -> None:
        self._begin()
        # Bound: `shutdown` ends the thread.
        while (work := self._waiting.get()) is not None:
            self._take_place()
            try:
                work.complete()
            finally:
                del work
                with self._lock:
                    self._num_free += 1
        self._waiting.put(None)

    def _take_place(self) -> None:
        """Counts a thread that takes work, and starts one that takes the next work."""
        with self._lock:
            self._num_free -= 1
            if self._num_free > 0 or len(self._threads) >= self._max_threads or self._is_closed:
                return
            try:
                self._add_thread()
            except (RuntimeError, MemoryError) as error:
                log.warning("no further thread for %s, whose work waits: %s", self._name, error)


class Work(Generic[T]):
    """A call, and the future of its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self.future: Future[T] = Future()

    def complete(self) -> None:
        """Makes the call, unless the future was cancelled, and sets the future's result or exception.

        Lets go of the call and its arguments before: the thread may be without a processor for long afterwards, and
        the body of a request must not outlive the work on it.
        """
        if not self.future.set_running_or_notify_cancel():
            return
        set_outcome: Callable[[], None]
        try:
            set_outcome = partial(self.future.set_result, self._call())
        except BaseException as error:  # noqa: BLE001 (the caller gets it)
            set_outcome = partial(self.future.set_exception, error)
        del self._call
        set_outcome()
        # An error refers to this frame, which must not refer to the error.
        del set_outcome, self


def standing_thread(
    work: Callable[[], None], name: str, on_error: Callable[[Exception], object] = lambda _: None
) -> threading.Thread:
    """Returns a thread, to be started, that runs `work` until it returns. After an error it calls `on_error` and begins
    again, on the same thread: nobody watches it, and others wait for what it does. `work` must be able to begin in any
    state of its values."""

    def run() -> None:
        # Bound: ends once `work` returns.
        while True:
            try:
                work()
            except Exception as error:  # noqa: BLE001 (the thread must outlive any error)
                with suppress(Exception):
                    report_failure(name, error)
                    on_error(error)
                time.sleep(_AGAIN_S)
            else:
                return

    return threading.Thread(target=run, name=name, daemon=True)


def report_failure(name: str, error: Exception) -> None:
    """Logs the error of a standing thread."""
    log.error("the thread %s failed, and begins again", name, exc_info=error)


def start_helper(work: Callable[[], object], name: str) -> bool:
    """Starts a thread for work that can be left out. Returns False, and logs it, if the system refuses the thread."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except (RuntimeError, MemoryError) as error:
        log.warning("no thread for %s: %s", name, error)
        return False
    return True
